"""Break a dump on purpose: a fault put into a copy, written past the checks of `DumpWriter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deltad.dumps import KEY, METADATA_KEY, OPTIONAL, Dump, Metadata, part_batches, schema
from deltad.dumps.batch import to_arrow
from deltad.dumps.layout import PROMPTS, part_path
from deltad.dumps.storage import copy_tree

from .injections import CONTROLS, INJECTIONS, Injection, NothingToBreakError
from .slots import Columns

_ROWS_PER_GROUP = 32_768


def named_injection(name: str) -> Injection:
    """The fault or control of this name.

    Raises
    ------
    ValueError
        There is none.
    """
    every = {**INJECTIONS, **CONTROLS}
    if name not in every:
        raise ValueError(f"there is no injection {name!r}, there are {', '.join(every)}")
    return every[name]


def write_injected(
    source: Dump | str | Path,
    out: str | Path,
    injection: Injection | str,
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
    injection : Injection or str
        The fault, or its name in `INJECTIONS` or `CONTROLS`.
    strength : float, optional
        Its size in its unit, by default the middle one of its strengths.
    seed : int
        Of the random numbers: the same seed writes the same dump.
    arms, seeds : iterable, optional
        What to copy, by default all.

    Returns
    -------
    Path
        `out`, which holds a file an arm and seed, and the prompts. A seed without anything to
        break is copied as it is.

    Raises
    ------
    ValueError
        There is no such injection.
    NothingToBreakError
        Fewer rows change than it takes to break a dump.
    FileExistsError
        `out` holds something.
    DumpError, FileNotFoundError
        The source cannot be read.
    """
    rows = Rows(source if isinstance(source, Dump) else Dump.open(source))
    return rows.write(Path(out), injection, strength, seed, arms=arms, seeds=seeds)


class Rows:
    """A dump's rows by arm and seed, each read once.

    Parameters
    ----------
    dump : Dump
        An open dump.
    """

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self._read: dict[tuple[str, int], tuple[Columns, Metadata]] = {}

    def read(self, arm: str, seed: int) -> tuple[Columns, Metadata]:
        """All rows of one arm and seed, and the metadata that one file of them would have."""
        if (arm, seed) not in self._read:
            files = self.dump.files(arm, seed)
            filled = [part for part in files if part.rows]
            # Parts may differ in optional columns; what all have is kept.
            names = [
                name
                for name in (filled or files)[0].columns
                if all(name in part.columns for part in filled)
            ]
            batches = [batch for part in filled for batch in part_batches(part, columns=names)]
            columns = {
                name: np.concatenate([batch[name] for batch in batches]) if batches else None
                for name in names
            }
            metadata = dataclasses.replace(
                (filled or files)[0].metadata, rows_seen=self.dump.rows_seen(arm, seed)
            )
            self._read[arm, seed] = (
                {name: each for name, each in columns.items() if each is not None},
                metadata,
            )
        return self._read[arm, seed]

    def write(
        self,
        out: Path,
        injection: Injection | str,
        strength: float | None = None,
        seed: int = 0,
        *,
        arms: Iterable[str] | None = None,
        seeds: Iterable[int] | None = None,
    ) -> Path:
        """Write a broken copy; as `write_injected`."""
        fault = named_injection(injection) if isinstance(injection, str) else injection
        size = fault.strengths[len(fault.strengths) // 2] if strength is None else strength
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} must be empty, or not exist")
        chosen = None if seeds is None else frozenset(seeds)
        reason = "rows"
        broken = dict.fromkeys(self.dump.arms if arms is None else arms, 0)
        copies = []
        for arm in broken:
            for each in self.dump.seeds(arm):
                if chosen is not None and each not in chosen:
                    continue
                before, metadata = self.read(arm, each)
                columns = before
                if columns:
                    rng = np.random.default_rng([seed, each % 2**32])
                    try:
                        columns, metadata = fault.apply(before, metadata, size, rng)
                    except NothingToBreakError as error:
                        reason = str(error)
                    else:
                        broken[arm] += _changed(before, columns)
                copies.append((arm, each, columns, metadata))
        found = max(broken.values(), default=0)
        if fault.cause is not None and found < fault.least:
            raise NothingToBreakError(
                f"{fault.name} must change {fault.least} rows of {self.dump.path} or more to "
                f"break it, changed {found}: it needs {reason}"
            )
        top_k = max(metadata.top_k for *_, metadata in copies)
        for arm, each, columns, metadata in copies:
            if metadata.top_k != top_k:  # a seed without anything to break, beside wider lists
                columns = _widened(columns, top_k)
                metadata = dataclasses.replace(metadata, top_k=top_k)
            _write(part_path(out, arm, each, 0, 0), columns, metadata)
            prompts = self.dump.path / PROMPTS / f"seed={each}"
            if prompts.is_dir():
                copy_tree(prompts, out / PROMPTS / prompts.name)
        return out


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


def _widened(columns: Columns, top_k: int) -> Columns:
    """Lists padded to K values."""
    return {
        name: np.pad(
            values,
            ((0, 0), (0, top_k - values.shape[1])),
            constant_values=-1 if values.dtype.kind == "i" else np.nan,
        )
        if values.ndim == 2
        else values
        for name, values in columns.items()
    }


def _write(path: Path, columns: Mapping[str, NDArray[Any]], metadata: Metadata) -> None:
    """Write one file, whatever values it holds; rows without any id have no vectors."""
    optional = [name for name in columns if name in OPTIONAL]
    if not columns:
        table = schema(metadata.top_k).empty_table()
    else:
        vectors = np.asarray((columns["topk_ids"] >= 0).any(axis=1))
        layout = schema(metadata.top_k, vectors_nullable=not bool(vectors.all()), optional=optional)
        table = to_arrow(columns, vectors, layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table.replace_schema_metadata({METADATA_KEY: metadata.to_json()}),
        path,
        compression="zstd",
        row_group_size=_ROWS_PER_GROUP,
    )
