"""Small valid random dumps, written with plain pyarrow and not through `DumpWriter`.

Tests of whoever reads dumps use them: `from tests.dumps.factory import make_dump`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deltad.dumps import derived_metadata
from deltad.masks import CRITERIA, Tokens
from deltad.support import topk_support

Columns = dict[str, NDArray[Any]]

OPTIONAL = (
    "pre_collision", "post_collision", "pre_entropy", "post_entropy", "full_kl_pre",
    "full_kl_post", "full_kl_direction", "full_tv_pre", "full_tv_post", "full_tv_direction",
    "linear_delta", "linear_delta_own", "linear_delta_sequence", "linear_delta_batch",
    "delta_tenth", "delta_triple", "delta_d_noise", "weight", "token",
)  # fmt: skip

DERIVED = (
    "d_pre", "d_post", "d_dot_aggregated", "d_dot_uniform", "d_dot_exact", "d_dot_local",
    "sampled_rank",
)  # fmt: skip
NULLABLE = (
    "linear_delta_own", "linear_delta_sequence", "linear_delta_batch", "delta_tenth",
    "delta_triple", "delta_d_noise",
)  # fmt: skip
VECTORS = ("topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs", "topk_post_logprobs")


def make_dump(
    path: Path,
    *,
    arms: Iterable[str] = ("none", "ratio", "predictive-kl-aggregated"),
    seeds: Iterable[int] = (0, 1),
    top_k: int = 4,
    vocab_size: int = 24,
    rows: int = 60,
    rng_seed: int = 0,
    optional: Iterable[str] = OPTIONAL,
    threshold: float = 0.15,
    divergence: str = "kl",
    stored: tuple[str, float] | None = None,
    null_vectors: float = 0.0,
    ranks: int = 2,
    parts: int = 2,
    empty_seeds: Iterable[int] = (),
    drift: float = 0.8,
    shuffle: bool = True,
    padding: float = np.nan,
    metadata: Mapping[str, Any] | None = None,
    row_group_size: int = 11,
    change: Callable[[str, int, Columns], None] | None = None,
    derived: bool = False,
) -> Path:
    """Write a valid random dump.

    Every column holds values of its own. Of the tokens about a third are sampled outside the
    top-K, a seventh has Â = 0, some have −∞ in the behavior's list, some end in padding (−1),
    some have a behavior without tail (truncated sampling), and the scalar log-probs lie a
    little (below 1e-4 nats) beside the entries in the lists.

    Parameters
    ----------
    path : Path
        RUN, made if need be.
    arms : iterable of str
        `in_loss` of an arm named as a criterion is what that criterion keeps at `threshold`
        and `divergence`; `zero-step` leaves the policy as it is; others keep all tokens.
    seeds : iterable of int
        Seeds; all arms have the same tokens in each.
    top_k, vocab_size : int
        K and n; K may exceed n, then the rest is padding.
    rows : int
        Tokens a seed.
    rng_seed : int
        For the generator.
    optional : iterable of str
        Optional columns to write, by default all.
    threshold, divergence : float, str
        Of the masks that were applied.
    stored : (divergence, threshold), optional
        Keep only rows above; `rows_seen` counts the dropped ones.
    null_vectors : float
        Share of rows whose vectors are NULL.
    ranks, parts : int
        Files a seed: ranks × parts, rows dealt out at random.
    empty_seeds : iterable of int
        Of `seeds`, those that have a file of no rows.
    drift : float
        Scale of the difference of π to μ in logits; 0 gives D = 0 nearly everywhere.
    shuffle : bool
        Give each arm its own order of rows.
    padding : float
        What lists of log-probs hold at padding; never read.
    metadata : mapping, optional
        Changes to the footer's metadata.
    row_group_size : int
        Rows a row group.
    change : callable, optional
        Called with arm, seed and the seed's columns (a row a token) before they are dealt
        out to files; may change them in place.
    derived : bool
        Add the derived columns, of the KL divergence.

    Returns
    -------
    Path
        `path`.
    """
    empty = set(empty_seeds)
    for arm in arms:
        for seed in seeds:
            entropy = [rng_seed, seed % 2**32]
            count = 0 if seed in empty else rows
            columns = _tokens(np.random.default_rng(entropy), count, top_k, vocab_size, drift)
            rng = np.random.default_rng([*entropy, zlib.crc32(arm.encode())])
            _step(columns, rng, zero=arm == "zero-step")
            stored_vectors = np.random.default_rng([*entropy, 1]).random(count) >= null_vectors
            _finish(columns, arm, padding, vocab_size, threshold, divergence)
            if change is not None:
                change(arm, seed, columns)
            if derived:
                columns |= derived_columns(columns, vocab_size, stored_vectors)
            above = np.ones(count, bool)
            if stored is not None:
                above = _support_tokens(columns, vocab_size).divergence(stored[0]) > stored[1]
            order = rng.permutation(count) if shuffle else np.arange(count)
            home = np.random.default_rng([*entropy, 2]).integers(0, ranks * parts, count)
            for file in range(ranks * parts):
                mine = order[home[order] == file]
                kept = mine[above[mine]]
                wanted = [name for name in columns if name in optional or name not in OPTIONAL]
                more = {"derived": derived_metadata("kl")} if derived else {}
                write_part(
                    path
                    / f"arm={arm}"
                    / f"seed={seed}"
                    / f"part-{file // parts}-{file % parts}.parquet",
                    {name: columns[name][kept] for name in wanted if not name.startswith("_")},
                    vectors=stored_vectors[kept],
                    metadata={
                        **_metadata(arm, top_k, vocab_size, threshold, divergence, stored),
                        "rows_seen": len(mine),
                        **more,
                        **(metadata or {}),
                    },
                    top_k=top_k,
                    row_group_size=row_group_size,
                )
    return path


def derived_columns(
    columns: Columns, vocab_size: int, vectors: NDArray[np.bool_], divergence: str = "kl"
) -> Columns:
    """Derived columns of all rows, NULL where a row has no vectors."""
    before = _support_tokens(columns, vocab_size)
    after = _support_tokens(columns, vocab_size, "post")
    listed = columns["topk_ids"] == columns["token_id"][:, None]
    found: Columns = {
        "d_pre": before.divergence(divergence),
        "d_post": after.divergence(divergence),
        **{
            f"d_dot_{tail}": before.direction(divergence, tail).total
            for tail in ("aggregated", "uniform", "exact")
        },
        "d_dot_local": before.direction(divergence, "aggregated").local,
    }
    found = {name: np.where(vectors, values, np.nan) for name, values in found.items()}
    rank = np.where(listed.any(axis=1), listed.argmax(axis=1), -1)
    found["sampled_rank"] = np.where(vectors, rank, -2).astype(np.int16)
    return found


def write_part(
    file: Path,
    columns: Mapping[str, NDArray[Any]],
    *,
    metadata: Mapping[str, Any],
    top_k: int,
    vectors: NDArray[np.bool_] | None = None,
    row_group_size: int = 11,
) -> None:
    """Write one file of a dump from NumPy columns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = len(columns["step"])
    vectors = np.ones(rows, bool) if vectors is None else vectors
    arrays, fields = [], []
    for name, values in columns.items():
        if name in VECTORS:
            item = pa.int32() if name == "topk_ids" else pa.float32()
            kind = pa.list_(pa.field("element", item, nullable=False), top_k)
            flat = pa.array(np.ascontiguousarray(values).reshape(-1), type=item)
            mask = None if vectors.all() else pa.array(~vectors)
            array = pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=mask)
            field = pa.field(name, kind, nullable=mask is not None)
        elif name == "token":
            array = pa.array(list(values), pa.string()).dictionary_encode()
            field = pa.field(name, array.type, nullable=False)
        else:
            nullable = name in NULLABLE or (name in DERIVED and values.dtype.kind == "f")
            array = pa.array(values, mask=np.isnan(values) if nullable else None)
            field = pa.field(name, array.type, nullable=nullable)
        arrays.append(array)
        fields.append(field)
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    write_table(file, table, metadata, row_group_size=row_group_size)


def write_table(
    file: Path,
    table: pa.Table,
    metadata: Mapping[str, Any] | str | bytes | None,
    *,
    row_group_size: int = 11,
    **options: Any,
) -> None:
    """Write a table with the given metadata; text goes into the footer as it is."""
    kept = {}
    if metadata is not None:
        text = metadata if isinstance(metadata, str | bytes) else json.dumps(metadata)
        kept = {b"deltad": text}
    options = {"row_group_size": max(1, row_group_size), **options}
    pq.write_table(table.replace_schema_metadata(kept), file, **options)


def part_files(run: Path) -> list[Path]:
    """All parts of a dump, sorted."""
    return sorted(run.glob("arm=*/seed=*/*.parquet"))


def read_metadata(file: Path) -> dict[str, Any]:
    """Metadata of a part."""
    found: dict[str, Any] = json.loads(pq.read_metadata(file).metadata[b"deltad"])
    return found


def edit(file: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    """Rewrite a part with another table and the same metadata; options are pyarrow's."""
    table = change(pq.ParquetFile(file).read())
    write_table(file, table, read_metadata(file), **options)


def edit_metadata(file: Path, *, drop: Iterable[str] = (), **changes: Any) -> None:
    """Rewrite a part with changed metadata."""
    found = {**read_metadata(file), **changes}
    for key in drop:
        del found[key]
    write_table(file, pq.ParquetFile(file).read(), found)


def edit_value(file: Path, column: str, row: int, value: Any, slot: int | None = None) -> None:
    """Rewrite a part with one value changed; `slot` for one value of a list."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(column)
        field = table.schema.field(index)
        values = table.column(column).to_pylist()
        if slot is None:
            values[row] = value
        else:
            values[row][slot] = value
        kind = field.type
        nullable = field.nullable or values[row] is None
        if pa.types.is_fixed_size_list(kind):
            holes = any(item is None for row in values if row is not None for item in row)
            item = pa.field("element", kind.value_type, nullable=holes)
            kind = pa.list_(item, kind.list_size)
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        array = pa.array(values, plain)
        if pa.types.is_dictionary(kind):
            array = array.dictionary_encode().cast(kind)
        return table.set_column(index, pa.field(column, array.type, nullable=nullable), array)

    edit(file, change)


def _metadata(
    arm: str,
    top_k: int,
    vocab_size: int,
    threshold: float,
    divergence: str,
    stored: tuple[str, float] | None,
) -> dict[str, Any]:
    """Metadata of a file, but for `rows_seen`."""
    rule: dict[str, Any] = {"rule": "all"}
    if stored is not None:
        rule = {"rule": "above", "divergence": stored[0], "threshold": stored[1]}
    return {
        "format": 1,
        "deltad": "0.0.1",
        "top_k": top_k,
        "vocab_size": vocab_size,
        "temperature": 0.7,
        "model": "random-model",
        "tokenizer": "random-tokenizer",
        "behavior": {"engine": "factory", "staleness": 1, "support": "union"},
        "readout": {"hidden_dtype": "float32", "head_dtype": "float32", "logits_rounded": False},
        "update": {
            "mask": arm if arm in CRITERIA else "none",
            "threshold": threshold,
            "divergence": divergence,
            "optimizer": "sgd",
            "lr": 0.0 if arm == "zero-step" else 0.1,
            "batch": 32,
        },
        "stored": rule,
        "versions": {"factory": "1"},
        "created": "2026-01-02T03:04:05+00:00",
        "colour": "blue",
    }


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probs of logits along the last axis; −∞ stays."""
    top = logits.max(axis=-1, keepdims=True, initial=-1e30)
    shifted = logits - top
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True), where=True)
    return np.asarray(shifted - total)


def _tokens(
    rng: np.random.Generator, rows: int, top_k: int, vocab_size: int, drift: float
) -> Columns:
    """What all arms share: keys, the behavior policy and the policy before the step."""
    index = np.arange(rows)
    sequence = index // 5
    logits = rng.normal(size=(rows, vocab_size)) * rng.uniform(0.3, 3.0, size=(rows, 1))
    move = rng.normal(size=(rows, vocab_size)) * rng.uniform(0, drift, size=(rows, 1))
    log_pi = _log_softmax(logits + move)
    # Truncated sampling: in a quarter of the rows all but a few ids have μ = 0.
    rank = np.argsort(np.argsort(-logits, axis=1), axis=1)
    kept = np.where(
        rng.random(rows) < 0.25,
        rng.integers(1, max(2, min(top_k, vocab_size) + 1), rows),
        vocab_size,
    )
    log_mu = _log_softmax(np.where(rank < kept[:, None], logits, -np.inf))
    ids = np.full((rows, top_k), -1, np.int32)
    listed = np.argsort(rank, axis=1)[:, :top_k]
    ids[:, : listed.shape[1]] = listed
    # The engine returned fewer in a fifth of the rows.
    fewer = np.where(rng.random(rows) < 0.2, rng.integers(0, top_k + 1, rows), top_k)
    ids[np.arange(top_k)[None, :] >= fewer[:, None]] = -1
    # Sampled outside the top-K more often than a policy would.
    weight = np.exp(log_mu) * np.where(rank >= top_k, 3.0, 1.0)
    weight /= weight.sum(axis=1, keepdims=True)
    token_id = (weight.cumsum(axis=1) < rng.random((rows, 1))).sum(axis=1)
    token_id = np.minimum(token_id, vocab_size - 1)
    impossible = np.isneginf(log_mu[index, token_id]) if rows else np.zeros(0, bool)
    token_id = np.where(impossible, np.argsort(rank, axis=1)[:, 0], token_id).astype(np.int32)
    advantage = np.where(rng.random(rows) < 1 / 7, 0.0, rng.normal(size=rows) + 0.01)
    return {
        "step": (sequence // 4).astype(np.int32),
        "group": (100 + sequence // 2).astype(np.int32),
        "sequence": (1000 + sequence).astype(np.int32),
        "position": (index % 5).astype(np.int32),
        "token_id": token_id,
        "advantage": advantage.astype(np.float32),
        "topk_ids": ids,
        "_log_mu": log_mu,
        "_log_pre": log_pi,
        "weight": (1 + (sequence % 4) / 4).astype(np.float32),
        "_jitter": rng.uniform(-4e-5, 4e-5, size=(rows, 3)),
    }


def _step(columns: Columns, rng: np.random.Generator, *, zero: bool) -> None:
    """Move the policy by one update."""
    log_pre = columns["_log_pre"]
    move = rng.normal(size=log_pre.shape) * 0.2
    columns["_log_post"] = log_pre if zero else _log_softmax(log_pre + move)
    columns["linear_delta"] = rng.normal(size=len(log_pre)).astype(np.float32)
    # Of a generator of their own; the sampled tokens' alone are NULL for some.
    more = np.random.default_rng(len(log_pre))
    sampled = more.random(len(log_pre)) < 0.6
    for name in NULLABLE:
        values: NDArray[Any] = more.normal(size=len(log_pre)).astype(np.float32)
        if name == "delta_d_noise":
            values = np.abs(values).astype(np.float64) * 1e-9
        rare = name in ("linear_delta_own", "linear_delta_sequence", "delta_d_noise")
        columns[name] = np.where(sampled, values, values.dtype.type(np.nan)) if rare else values


def _finish(
    columns: Columns,
    arm: str,
    padding: float,
    vocab_size: int,
    threshold: float,
    divergence: str,
) -> None:
    """Read the stored columns off the whole distributions."""
    ids, k = columns["topk_ids"], columns["token_id"]
    rows = np.arange(len(k))
    log_mu = columns["_log_mu"]
    for place, (name, log_p) in enumerate(
        (("behavior", log_mu), ("pre", columns["_log_pre"]), ("post", columns["_log_post"]))
    ):
        # After a zero step the scalars are the same to the bit, the jitter too.
        jitter = columns["_jitter"][:, min(place, 1) if arm == "zero-step" else place]
        columns[f"{name}_logprob"] = (log_p[rows, k] - np.abs(jitter)).astype(np.float32)
        at_ids = log_p[rows[:, None], ids] if vocab_size else log_p
        values = np.where(ids >= 0, at_ids, padding).astype(np.float32)
        columns[f"topk_{name}_logprobs"] = values
        if name != "behavior":
            pi = np.exp(log_p)
            columns[f"{name}_collision"] = (pi**2).sum(axis=1).astype(np.float32)
            columns[f"{name}_entropy"] = -(pi * log_p).sum(axis=1).astype(np.float32)
            mu = np.exp(log_mu)
            gap = np.where(mu > 0, np.where(mu > 0, log_mu, 0) - log_p, 0)
            columns[f"full_kl_{name}"] = np.maximum((mu * gap).sum(axis=1), 0)
            columns[f"full_tv_{name}"] = 0.5 * np.abs(mu - pi).sum(axis=1)
    mu, pi = np.exp(log_mu), np.exp(columns["_log_pre"])
    pi_k, mu_k = pi[rows, k], mu[rows, k]
    square = (pi**2).sum(axis=1)
    columns["full_kl_direction"] = (pi_k - mu_k) - ((pi - mu) * pi).sum(axis=1)
    sign = np.sign(mu - pi)
    columns["full_tv_direction"] = -0.5 * (
        sign[rows, k] * pi_k
        - (sign * pi**2).sum(axis=1)
        - (pi_k - square) * (sign * pi).sum(axis=1)
    )
    columns["token"] = np.asarray([f"<{token}>" for token in k], dtype=object)
    keep = np.ones(len(k), bool)
    if arm in CRITERIA:
        tokens = _support_tokens(columns, vocab_size)
        keep = CRITERIA[arm].keeps(tokens, threshold=threshold, divergence=divergence)
    columns["in_loss"] = keep


def _support_tokens(columns: Columns, vocab_size: int, time: str = "pre") -> Tokens:
    """What criteria look at, in float64 from the stored values."""
    stored = {
        name: values.astype(np.float64)
        for name, values in columns.items()
        if values.dtype == np.float32
    }
    support = topk_support(
        columns["topk_ids"],
        stored["topk_behavior_logprobs"],
        stored[f"topk_{time}_logprobs"],
        columns["token_id"],
        stored["behavior_logprob"],
        stored[f"{time}_logprob"],
        vocab_size=vocab_size,
    )
    return Tokens(
        stored["advantage"],
        stored["behavior_logprob"],
        stored["pre_logprob"],
        support=support,
        collision=stored["pre_collision"],
        full={
            family: (columns[f"full_{family}_pre"], columns[f"full_{family}_direction"])
            for family in ("kl", "tv")
        },
    )
