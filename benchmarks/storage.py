"""Bytes and write time of a dump, beside pyarrow's defaults for the same columns.

Two sources of rows: synthetic ones shaped like a large language model's (the vocabulary of
Qwen3, a few per cent of tokens near or outside the region), and the values that the recipe
smollm2 recorded. Of the few real rows the column chunks are counted and not the footers, which
weigh nothing in files of a million rows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deltad.dumps import OPTIONAL, Dump, DumpWriter, Metadata, Near, derive, schema
from deltad.dumps.batch import Batch, to_arrow
from deltad.dumps.parquet import parquet_writer

from .measure import Times, interleaved
from .row import Row, missing

Rows = dict[str, NDArray[Any]]

ROOT: Final = Path(__file__).parents[1]
REAL: Final = ROOT / "data_dumps" / "smollm2-whole"
TOP_K: Final = 20
VOCAB: Final = 151_936
BYTES_FULL: Final = 0.75
BYTES_NEAR: Final = 0.12
TIME: Final = 0.5
APPENDED: Final = 2_048
"""Rows an append: a micro-batch."""


@dataclass(frozen=True)
class Case:
    """Rows to write.

    Attributes
    ----------
    name : str
        In the row's id.
    metadata : Metadata
        Of the file.
    rows : mapping of str to array
        All columns that a recorder gives.
    """

    name: str
    metadata: Metadata
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows["step"])

    def complete(self) -> Rows:
        """Rows with the derived columns: what lies in the file."""
        every = np.ones(len(self), dtype=np.bool_)
        return {**self.rows, **derive(Batch("", 0, self.rows, every), self.metadata)}


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    wanted = prefixes or ("S",)
    with tempfile.TemporaryDirectory(prefix="deltad-storage-") as folder:
        made = synthetic(32_768 if quick else 131_072)
        if any("S1".startswith(each) or each.startswith("S1") for each in wanted):
            yield from _bytes(made, Path(folder))
            if REAL.is_dir():
                yield from _bytes(recorded(near_share=0.025), Path(folder))
            else:
                yield missing("S1 smollm2 full", "bytes", BYTES_FULL, f"no {REAL}")
        if any("S2".startswith(each) or each.startswith("S2") for each in wanted):
            yield from _times(made, Path(folder), rounds=2 if quick else 5)


def synthetic(count: int, *, seed: int = 0) -> Case:
    """Rows shaped like a large language model's.

    Log-probs fall off from peaked to flat; the policy before the step lies beside the behavior's
    by a noise whose size differs from token to token, so that some 2.5 % of the tokens have
    D ≥ 0.01, half of them D > 0.15; the step moves logits by 0.003. Small ids are frequent, as
    in vocabularies made by merging.

    Parameters
    ----------
    count : int
        Rows.
    seed : int
        Of the random numbers.

    Returns
    -------
    Case
        Float32, with collisions and the bound on ΔD's error.
    """
    rng = np.random.default_rng(seed)
    fall = rng.exponential(size=(count, TOP_K)) / np.arange(1, TOP_K + 1) ** 0.7
    logits = -np.cumsum(fall * (0.2 + rng.gamma(1.2, 2.0, size=(count, 1))), axis=1)
    beyond = logits[:, -1] + np.log(rng.uniform(0.5, 8.0, count))
    tail_atoms = 50.0

    def reduced(logits: NDArray[Any], beyond: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        total = np.logaddexp.reduce(np.concatenate([logits, beyond[:, None]], axis=1), axis=1)
        return logits - total[:, None], np.exp(beyond - total)

    noise = 0.01 * np.exp(rng.normal(size=(count, 1)))
    far = rng.random((count, 1)) < 0.025
    noise = np.where(far, rng.uniform(0.2, 2.0, size=(count, 1)), noise)
    moves = [np.zeros((1, 1)), noise, np.full((count, 1), 0.003)]
    columns: Rows = {}
    for name, size in zip(("behavior", "pre", "post"), moves, strict=True):
        logits = logits + size * rng.normal(size=logits.shape)
        beyond = beyond + size[:, 0] * rng.normal(size=count)
        logprobs, rest = reduced(logits, beyond)
        columns[f"topk_{name}_logprobs"] = logprobs.astype(np.float32)
        collision = np.exp(2 * logprobs).sum(axis=1) + rest**2 / tail_atoms
        if name != "behavior":
            columns[f"{name}_collision"] = collision.astype(np.float32)
    spacing = np.exp(rng.normal(4.5, 1.5, size=(count, 1)))
    gaps = 1 + np.minimum(rng.exponential(spacing, size=(count, TOP_K)), 7_500).astype(np.int64)
    ids = rng.permuted(np.cumsum(gaps, axis=1), axis=1).astype(np.int32)
    row = np.arange(count)
    slot = np.minimum(
        (rng.random((count, 1)) > np.exp(columns["topk_behavior_logprobs"]).cumsum(axis=1)).sum(1),
        TOP_K - 1,
    )
    response = row // 512
    columns |= {
        "step": (response // 64).astype(np.int32),
        "group": (response // 8).astype(np.int32),
        "sequence": (response % 64).astype(np.int32),
        "position": (row % 512).astype(np.int32),
        "token_id": ids[row, slot],
        "advantage": rng.normal(size=response[-1] + 1).astype(np.float32)[response],
        "in_loss": np.ones(count, dtype=np.bool_),
        "topk_ids": ids,
        "delta_d_noise": rng.exponential(1e-6, count).astype(np.float32).astype(np.float64),
    }
    for name in ("behavior", "pre", "post"):
        columns[f"{name}_logprob"] = columns[f"topk_{name}_logprobs"][row, slot]
    return Case("synthetic", Metadata(top_k=TOP_K, vocab_size=VOCAB), columns)


def recorded(*, near_share: float) -> Case:
    """What the recipe smollm2 recorded of every token of one arm.

    Parameters
    ----------
    near_share : float
        Share of tokens with D ≥ 0.01 among those returned. The recipe makes half of its tokens
        such ones, where large models have a few per cent: all tokens below are taken, and so
        many of the others that the share is this.

    Returns
    -------
    Case
        A few hundred rows, in the order of the file.
    """
    dump = Dump.open(REAL)
    found = [batch for seed in dump.seeds("none") for batch in dump.batches("none", seed)]
    names = [name for name in found[0].columns if name != "token"]
    columns = {name: np.concatenate([batch[name] for batch in found]) for name in names}
    known = dump.metadata("none")
    metadata = Metadata(top_k=known.top_k, vocab_size=known.vocab_size, readout=known.readout)
    case = Case("smollm2", metadata, columns)
    near = case.complete()["d_pre"] >= Near().threshold
    wanted = round(near_share / (1 - near_share) * float((~near).sum()))
    taken = ~near | (near & (np.cumsum(near) <= wanted))
    return Case("smollm2", metadata, {name: values[taken] for name, values in columns.items()})


def _bytes(case: Case, folder: Path) -> Iterator[Row]:
    """S1: bytes of a full dump, and of scalars with near vectors."""
    complete = case.complete()
    default = _default(case, complete, folder / "default.parquet")
    size = _size if case.name == "synthetic" else _chunks
    per_row = size(default) / len(case)
    near_share = float((complete["d_pre"] >= Near().threshold).mean())
    for what, limit, options in (
        ("full", BYTES_FULL, {}),
        ("scalars and near vectors", BYTES_NEAR, {"vectors": Near()}),
    ):
        ours = size(_write(case, folder, **options)) / len(case)
        yield Row(
            id=f"S1 {case.name} {what}",
            what=f"bytes of {what}, to pyarrow's defaults for all columns and vectors",
            limit=limit,
            figure=ours / per_row,
            note=f"{ours:.1f} of {per_row:.1f} bytes a row; {len(case)} rows, "
            f"{100 * near_share:.1f} % with D >= {Near().threshold:g}",
        )


def _times(case: Case, folder: Path, *, rounds: int) -> Iterator[Row]:
    """S2: write time of the columns, and of everything that a writer does."""
    complete = case.complete()
    vectors = [name for name in complete if complete[name].ndim == 2]
    lists = {name: complete[name] for name in vectors}
    times = interleaved(
        {
            "default lists": lambda: _default(case, lists, folder / "lists.parquet"),
            "our lists": lambda: _encoded(case, lists, folder / "ours.parquet"),
            "default": lambda: _default(case, complete, folder / "default.parquet"),
            "our columns": lambda: _encoded(case, complete, folder / "ours.parquet"),
            "writer": lambda: _write(case, folder),
            "writer near": lambda: _write(case, folder, vectors=Near()),
        },
        rounds=rounds,
    )
    for ours, peer, limit, what in (
        ("our lists", "default lists", TIME, "writing the vectors, to pyarrow's defaults"),
        ("our columns", "default", TIME, "writing all columns, to pyarrow's defaults"),
        ("writer", "default", 1.0, "checking, deriving, writing, to pyarrow's mere writing"),
        ("writer near", "default", 1.0, "the same with near vectors, to pyarrow's writing of all"),
    ):
        yield _timed(times, ours, peer, what, limit, len(case))


def _timed(times: Times, ours: str, peer: str, what: str, limit: float, count: int) -> Row:
    """One ratio of times."""
    scale = 1e9 / count
    return Row(
        id=f"S2 {ours}",
        what=what,
        limit=limit,
        figure=times.ratio(ours, peer),
        spread=times.spread(ours, peer),
        note=f"{times.median(ours) * scale:.0f} of {times.median(peer) * scale:.0f} ns a row",
    )


def _table(case: Case, columns: Rows) -> pa.Table:
    """Arrow columns without NULL."""
    full = schema(case.metadata.top_k, optional=[name for name in columns if name in OPTIONAL])
    layout = pa.schema([field for field in full if field.name in columns])
    return to_arrow(columns, np.ones(len(case), dtype=np.bool_), layout)


def _default(case: Case, columns: Rows, path: Path) -> Path:
    """Written as pyarrow does unless told otherwise."""
    pq.write_table(_table(case, columns), path)
    return path


def _encoded(case: Case, columns: Rows, path: Path) -> Path:
    """Written in a dump's encodings, without checks."""
    table = _table(case, columns)
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table, row_group_size=32_768)
    return path


def _write(case: Case, folder: Path, **options: Any) -> Path:
    """Written by a `DumpWriter`, a micro-batch at a time."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    with DumpWriter(run, arm="none", seed=0, metadata=case.metadata, **options) as writer:
        for start in range(0, len(case), APPENDED):
            part = slice(start, start + APPENDED)
            writer.append({name: values[part] for name, values in case.rows.items()})
    (path,) = writer.paths
    return path


def _size(path: Path) -> float:
    """Bytes of the file."""
    return float(path.stat().st_size)


def _chunks(path: Path) -> float:
    """Bytes of its column chunks."""
    footer = pq.read_metadata(path)
    return float(
        sum(
            footer.row_group(group).column(column).total_compressed_size
            for group in range(footer.num_row_groups)
            for column in range(footer.num_columns)
        )
    )
