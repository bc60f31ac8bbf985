"""Changes that leave a dump sound: what differs between healthy runs, and must raise no alarm.

As in `broken_sampling`, arrays are replaced and never written into; the rows are in order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.random import Generator

from deltad.divergence import DIVERGENCES
from deltad.dumps import OPTIONAL, Batch, Metadata, batch_support

from .broken_precision import declared, engine_noise, rounded_logits
from .broken_values import replaced_last
from .slots import BEHAVIOR, POLICIES, Columns, needs


def untouched(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The dump as it is."""
    return metadata


def some_groups(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A share of the prompts with all their responses."""
    return _keep_some(columns, metadata, "group", strength, rng)


def some_steps(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A share of the optimizer steps."""
    return _keep_some(columns, metadata, "step", strength, rng)


def thinned(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Only rows with a large D are stored, as long recordings do."""
    known = np.asarray((columns["topk_ids"] >= 0).any(axis=1))
    batch = Batch("", 0, columns, np.ones(len(known), bool))
    seen = max(metadata.rows_seen, len(known))
    above = (DIVERGENCES["kl"](batch_support(batch, metadata)) > strength) & known
    if metadata.stored_above is not None:
        strength = max(strength, metadata.stored_above[1])
    needs(int(above.sum()), f"D > {strength:g}")
    for name in columns:
        columns[name] = columns[name][above]
    rule = {"rule": "above", "divergence": "kl", "threshold": strength}
    return dataclasses.replace(metadata, stored=rule, rows_seen=seen)


def without_vectors(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The vectors of a share of rows were not stored."""
    gone = rng.random(len(columns["token_id"])) < strength
    columns["topk_ids"] = np.where(gone[:, None], -1, columns["topk_ids"]).astype(np.int32)
    for side in (BEHAVIOR, *POLICIES):
        name = f"topk_{side}_logprobs"
        columns[name] = np.where(gone[:, None], np.float32(np.nan), columns[name])
    return metadata


def without_optional(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """No optional column was recorded."""
    for name in OPTIONAL:
        columns.pop(name, None)
    return metadata


def without_metadata(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The metadata holds what it must and nothing else but the update."""
    return Metadata(
        top_k=metadata.top_k,
        vocab_size=metadata.vocab_size,
        temperature=metadata.temperature,
        stored=metadata.stored,
        rows_seen=metadata.rows_seen,
        update=metadata.update,
    )


def declared_replacing(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The sampled token takes the K-th's place, and the metadata says so."""
    metadata = replaced_last(columns, metadata, strength, rng)
    return dataclasses.replace(metadata, behavior={**metadata.behavior, "support": "replaced-last"})


def fewer_listed(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The engine returned fewer ids in a share of rows, and padded the lists with −1."""
    ids = columns["topk_ids"]
    short = rng.random(len(ids)) < strength
    given = rng.integers(max(1, ids.shape[1] // 2), ids.shape[1] + 1, len(ids))
    gone = short[:, None] & (np.arange(ids.shape[1])[None, :] >= given[:, None])
    columns["topk_ids"] = np.where(gone, -1, ids).astype(np.int32)
    for side in (BEHAVIOR, *POLICIES):
        name = f"topk_{side}_logprobs"
        columns[name] = np.where(gone, np.float32(np.nan), columns[name])
    return metadata


def bf16_engine(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A bfloat16 engine beside a float32 trainer of the same weights, and it says so."""
    return engine_noise(columns, declared(metadata, "bfloat16"), strength, rng)


def declared_rounding(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The engine rounds its logits to bfloat16, and the metadata says bfloat16."""
    return rounded_logits(columns, declared(metadata, "bfloat16"), strength, rng)


def some_zero(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Groups whose responses were all right or all wrong: Â is 0 there."""
    zero = rng.random(int(columns["group"].max(initial=0)) + 1)[columns["group"]] < strength
    advantage = np.where(zero, 0, columns["advantage"]).astype(np.float32)
    columns["advantage"] = advantage
    return metadata


def scaled_advantages(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """Advantages in another unit."""
    columns["advantage"] = (strength * columns["advantage"]).astype(np.float32)
    return metadata


def _keep_some(
    columns: Columns, metadata: Metadata, by: str, share: float, rng: Generator
) -> Metadata:
    """Keep the rows of a share of the values of a column."""
    found = np.unique(columns[by])
    chosen = found[rng.permutation(len(found))[: max(1, round(share * len(found)))]]
    kept = np.isin(columns[by], chosen)
    rows = len(kept)
    for name in columns:
        columns[name] = columns[name][kept]
    seen = round(metadata.rows_seen * kept.sum() / max(1, rows))
    return dataclasses.replace(metadata, rows_seen=max(seen, int(kept.sum())))
