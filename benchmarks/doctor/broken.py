"""Break a dump on purpose: a fault put into a copy, written past the checks of `DumpWriter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from deltad.dumps import KEY, METADATA_KEY, OPTIONAL, Dump, Metadata, part_batches, schema
from deltad.dumps.batch import to_arrow
from deltad.dumps.layout import PROMPTS, part_path
from deltad.dumps.storage import copy_tree

from .fault import FAULTS, Fault
from .rows import Columns, NothingToBreakError


def write_injected(
    source: Dump | str | Path,
    out: str | Path,
    fault: Fault | str,
    strength: float | None = None,
    seed: int = 0,
    *,
    arms: Iterable[str] | None = None,
    seeds: Iterable[int] | None = None,
) -> Path:
    """Write a copy of a dump with a fault in it, to see what the doctor says of it.

    Parameters
    ----------
    source : Dump, str or Path
        A dump that `deltad check` finds in order; or one that was broken by this, for a second
        fault.
    out : str or Path
        RUN of the copy, a folder that does not exist or is empty.
    fault : Fault or str
        The fault, or its name in `FAULTS`.
    strength : float, optional
        By default the middle one of its strengths.
    seed : int
        Of the random numbers: the same seed writes the same dump.
    arms, seeds : iterable, optional
        What to copy, by default all.

    Returns
    -------
    Path
        `out`, which holds one file per arm and seed, and the prompts. A seed without anything to
        break is copied as it is.

    Raises
    ------
    KeyError
        There is no such fault.
    NothingToBreakError
        Fewer rows change than it takes to break a dump.
    FileExistsError
        `out` holds something.
    """
    dump, out = source if isinstance(source, Dump) else Dump.open(source), Path(out)
    fault = FAULTS[fault] if isinstance(fault, str) else fault
    strength = fault.middle if strength is None else strength
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} must be empty, or not exist")
    chosen = None if seeds is None else frozenset(seeds)
    reason, copies = "rows", []
    broken = dict.fromkeys(dump.arms if arms is None else arms, 0)
    for arm in broken:
        for each in (one for one in dump.seeds(arm) if chosen is None or one in chosen):
            before, metadata = read_rows(dump, arm, each)
            columns = before
            if columns:
                rng = np.random.default_rng([seed, each % 2**32])
                try:
                    columns, metadata = fault.apply(before, metadata, strength, rng)
                except NothingToBreakError as error:
                    reason = str(error)
                else:
                    broken[arm] += _changed(before, columns)
            copies.append((arm, each, columns, metadata))
    found = max(broken.values(), default=0)
    if fault.cause is not None and found < fault.least:
        raise NothingToBreakError(
            f"{fault.name} must change {fault.least} rows of {dump.path} or more to break it, "
            f"changed {found}: it needs {reason}"
        )
    top_k = max(metadata.top_k for *_, metadata in copies)
    for arm, each, columns, metadata in copies:
        _write(part_path(out, arm, each, 0, 0), columns, metadata, top_k)
        prompts = dump.path / PROMPTS / f"seed={each}"
        if prompts.is_dir():
            copy_tree(prompts, out / PROMPTS / prompts.name)
    return out


def read_rows(dump: Dump, arm: str, seed: int) -> tuple[Columns, Metadata]:
    """All rows of one arm and seed, and the metadata that one file of them would have."""
    files = dump.files(arm, seed)
    filled = [part for part in files if part.rows]
    first = (filled or files)[0]
    # Parts may differ in optional columns; what all have is kept.
    names = [name for name in first.columns if all(name in part.columns for part in filled)]
    batches = [batch for part in filled for batch in part_batches(part, columns=names)]
    columns = {
        name: np.concatenate([batch[name] for batch in batches]) for name in names if batches
    }
    return columns, dataclasses.replace(first.metadata, rows_seen=dump.rows_seen(arm, seed))


def _changed(before: Columns, after: Columns) -> int:
    """Rows in which anything differs; all of them where their number or a width does."""
    order = np.lexsort(tuple(before[name] for name in reversed(KEY)))
    differs = np.zeros(len(order), bool)
    for name, values in after.items():
        old = before[name][order]
        if old.shape != values.shape:
            return len(order)
        same = old == values
        if values.dtype.kind == "f":
            same |= np.isnan(old) & np.isnan(values)
        differs |= ~same.reshape(len(order), -1).all(axis=1)
    return int(differs.sum())


def _write(path: Path, columns: Columns, metadata: Metadata, top_k: int) -> None:
    """Write one file, whatever values it holds; rows without any id have no vectors."""
    # A seed without anything to break may have narrower lists than the others.
    room = top_k - metadata.top_k
    metadata = dataclasses.replace(metadata, top_k=top_k)
    if not columns:
        table = schema(top_k).empty_table()
    else:
        padded = {
            name: np.pad(
                values,
                ((0, 0), (0, room)),
                constant_values=-1 if values.dtype.kind == "i" else np.nan,
            )
            if values.ndim == 2
            else values
            for name, values in columns.items()
        }
        vectors = np.asarray((padded["topk_ids"] >= 0).any(axis=1))
        optional = [name for name in columns if name in OPTIONAL]
        layout = schema(top_k, vectors_nullable=not bool(vectors.all()), optional=optional)
        table = to_arrow(padded, vectors, layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata({METADATA_KEY: metadata.to_json()})
    pq.write_table(table, path, compression="zstd")
