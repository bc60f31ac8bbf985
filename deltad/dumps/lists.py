"""Which values the lists of a dump may hold: ids, log-probs, their mass, the sampled token's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad._checks import AGREEMENT_TOLERANCE

from .batch import Batch
from .finding import Finding, anywhere, find
from .metadata import Metadata

# A sum of K probabilities in float32 is looked at again in float64 if it is this near the
# limit: each exponential and each addition rounds by at most one unit in the last place of 1.
_FLOAT32_SLACK: Final = 2.4e-7

_LARGEST: Final = np.finfo(np.float32).max

_SCALAR_OF: Final = {
    "topk_behavior_logprobs": "behavior_logprob",
    "topk_pre_logprobs": "pre_logprob",
    "topk_post_logprobs": "post_logprob",
}


def rank_order(batch: Batch, metadata: Metadata) -> Iterator[Finding]:
    """Find lists of the behavior policy that do not descend; nothing computed depends on it."""
    name = "topk_behavior_logprobs"
    values, used = batch[name], _used(batch)
    with np.errstate(invalid="ignore"):
        lowest = np.minimum.accumulate(np.where(used, values, np.inf), axis=1)
        bad = used[:, 1:] & (values[:, 1:] > lowest[:, :-1] + metadata.logprob_tolerance)
    yield from find(
        name,
        "rank order",
        anywhere(bad),
        lambda row: (
            "must be in rank order, the most likely first, found "
            f"{values[row, 1 + int(bad[row].argmax())]:.6g} after "
            f"{lowest[row, int(bad[row].argmax())]:.6g}"
        ),
    )


def _used(batch: Batch) -> NDArray[np.bool_]:
    """Slots that hold an id."""
    return np.asarray(batch["topk_ids"] >= 0)


def ids(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Ids of the vocabulary, each once, and −1."""
    ids = batch[name]
    if not ids.size:
        return
    high = metadata.vocab_size - 1
    if ids.min() < -1 or ids.max() > high:
        bad = (ids < -1) | (ids > high)
        yield from find(
            name,
            "range",
            anywhere(bad),
            lambda row: (
                f"must hold ids in [0, {high}] or -1 (padding), "
                f"found {ids[row, int(bad[row].argmax())]}"
            ),
        )
    ordered = np.sort(ids, axis=1)
    same = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    yield from find(
        name,
        "distinct",
        anywhere(same),
        lambda row: f"must hold an id once, found {ordered[row, int(same[row].argmax())]} twice",
    )


def logprobs(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Log-probs at the listed ids, finite."""
    yield from _list(batch, metadata, name, finite=True)


def logprobs_or_zero(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Log-probs at the listed ids, −∞ among them."""
    yield from _list(batch, metadata, name, finite=False)


def _list(batch: Batch, metadata: Metadata, name: str, *, finite: bool) -> Iterator[Finding]:
    """Log-probs at the listed ids: each possible, their mass, and the sampled token's."""
    values = batch[name]
    if not values.size:
        return
    tolerance = metadata.logprob_tolerance
    used = _used(batch)
    # Padding counts as probability 0.
    seen = values if used.all() else np.where(used, values, -_LARGEST)
    if not (seen.max() <= tolerance and (not finite or seen.min() > -np.inf)):
        bad = ~(seen <= tolerance)
        if finite:
            bad |= np.isneginf(seen)
        kind = "a finite log-prob" if finite else "a log-prob or -inf,"
        broken = anywhere(bad)
        if name in batch.nulls:
            broken &= ~batch.nulls[name]
        yield from find(
            name,
            "range",
            broken,
            lambda row: (
                f"must be {kind} of at most 0 (rounding up to {tolerance:g} counts as 0), found "
                f"{seen[row, int(bad[row].argmax())]:.6g} at id "
                f"{batch['topk_ids'][row, int(bad[row].argmax())]}"
            ),
        )
    scalar = _SCALAR_OF[name]
    alone = None
    if "token_id" in batch.columns and scalar in batch.columns:
        hit = batch["topk_ids"] == batch["token_id"][:, None]
        slot = hit.argmax(axis=1)
        rows = np.arange(len(slot))
        listed = hit[rows, slot] & (batch["token_id"] >= 0)
        yield from _agreement(name, scalar, values[rows, slot], batch[scalar], listed)
        alone = np.where(listed | ~batch.vectors, -_LARGEST, batch[scalar])
    yield from _mass(name, seen, alone, tolerance)


def _agreement(
    name: str,
    scalar: str,
    entry: NDArray[Any],
    alone: NDArray[Any],
    listed: NDArray[np.bool_],
) -> Iterator[Finding]:
    """The sampled token's entry is its scalar; NaN has been found already."""
    gap = np.abs(entry.astype(np.float64) - alone)
    yield from find(
        name,
        "agreement",
        listed & (gap > AGREEMENT_TOLERANCE),
        lambda row: (
            f"must agree with `{scalar}` at the sampled token within {AGREEMENT_TOLERANCE:g} "
            f"nats, found {entry[row]:.7g} and {alone[row]:.7g}"
        ),
    )


def _mass(
    name: str, seen: NDArray[Any], alone: NDArray[Any] | None, tolerance: float
) -> Iterator[Finding]:
    """Probabilities of the support, the list and the sampled token alone, sum to 1 at most."""
    slack = _FLOAT32_SLACK * (seen.shape[1] + 2)
    suspicious = np.flatnonzero(_sum(seen, alone) > 1 + tolerance - slack)
    if not len(suspicious):
        return
    exact = _sum(
        seen[suspicious].astype(np.float64),
        None if alone is None else alone[suspicious].astype(np.float64),
    )
    bad = exact > 1 + tolerance
    if bad.any():
        found = dict(zip(suspicious[bad].tolist(), exact[bad].tolist(), strict=True))
        yield Finding(
            name,
            "mass",
            suspicious[bad],
            lambda row: (
                f"the support's probabilities must sum to 1 + {tolerance:g} at most, "
                f"found {found[row]:.6g}"
            ),
        )


def _sum(logprobs: NDArray[Any], alone: NDArray[Any] | None) -> NDArray[Any]:
    """Σ exp(min(0, x)) a row, in the type given."""
    clamped = logprobs if not logprobs.max() > 0 else np.minimum(logprobs, 0)
    # Adding up short rows, `sum` takes three times as long.
    total = np.einsum("ij->i", np.exp(clamped))
    return np.asarray(total if alone is None else total + np.exp(np.minimum(alone, 0)))
