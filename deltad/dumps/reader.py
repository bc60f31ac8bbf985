"""Reading a dump: what the footers tell first, then rows in batches."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltad._checks import printable

from .batch import Batch, from_arrow
from .columns import COLUMNS, OPTIONAL, READINGS, VECTORS
from .errors import DAMAGE, DumpError, unreadable
from .footers import PartFile, scan
from .metadata import Metadata
from .storage import StorageError, open_parquet, place
from .unfinished import unfinished

BATCH_BYTES: Final = 64 << 20
"""Bytes of a batch's numbers, at most, unless one row has more."""


@dataclass(frozen=True)
class Dump:
    """A dump whose footers obey the contract.

    Attributes
    ----------
    path : Path
        RUN; for a URL what `deltad.dumps.storage.place` makes of it.
    parts : tuple of PartFile
        All files, sorted by arm, seed, rank and part.
    """

    path: Path
    parts: tuple[PartFile, ...]

    def __repr__(self) -> str:
        seeds = {part.seed for part in self.parts}
        return (
            f"<Dump {self.path}: arms {', '.join(self.arms)}; {len(seeds)} seeds, "
            f"{sum(part.rows for part in self.parts)} rows, top-{self.top_k} of {self.vocab_size}>"
        )

    @classmethod
    def open(cls, path: str | Path) -> Dump:
        """Read all footers and no row.

        Parameters
        ----------
        path : str or Path
            RUN, a folder or a URL.

        Returns
        -------
        Dump
            Its rows are unread: `check_batch` judges them as they come.

        Raises
        ------
        FileNotFoundError
            There is no RUN.
        DumpError
            Not a dump, files missing or unreadable, columns missing or of the wrong type,
            metadata that breaks the contract or differs between files.
        StorageError
            RUN is a URL that is out of reach.
        """
        parts, problems = scan(path)
        if problems:
            raise problems[0]
        return cls(place(path), tuple(parts))

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, sorted."""
        return tuple(sorted({part.arm for part in self.parts}))

    @property
    def top_k(self) -> int:
        """K."""
        return self.parts[0].metadata.top_k

    @property
    def vocab_size(self) -> int:
        """Size n of the vocabulary."""
        return self.parts[0].metadata.vocab_size

    @property
    def temperature(self) -> float:
        """Sampling temperature."""
        return self.parts[0].metadata.temperature

    @property
    def unfinished(self) -> tuple[tuple[str, int], ...]:
        """Arm and seed of every recording that has not ended, sorted."""
        noted = {(each.arm, each.seed) for each in unfinished(self.path)}
        return tuple(sorted(noted | {(p.arm, p.seed) for p in self.parts if not p.ended}))

    @property
    def unfinished_text(self) -> str:
        """One sentence that names `unfinished`; empty where there is none."""
        seeds: dict[str, list[str]] = {}
        for arm, seed in self.unfinished:
            seeds.setdefault(arm, []).append(str(seed))
        arms = [
            f"arm {arm}, seed{'s' if len(found) > 1 else ''} {', '.join(found[:5])}"
            + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            for arm, found in seeds.items()
        ]
        return printable(f"recording has not ended in {'; '.join(arms)}") if arms else ""

    def seeds(self, arm: str) -> tuple[int, ...]:
        """Seeds of an arm, ascending.

        Raises
        ------
        DumpError
            There is no such arm.
        """
        return tuple(sorted({part.seed for part in self.files(arm)}))

    def files(self, arm: str, seed: int | None = None) -> tuple[PartFile, ...]:
        """Files of an arm, or of one of its seeds.

        Raises
        ------
        DumpError
            There is no such arm, or no such seed in it.
        """
        found = tuple(part for part in self.parts if part.arm == arm)
        if not found:
            raise DumpError(
                self.path, f"there is no arm {arm!r}, the arms are {', '.join(self.arms)}"
            )
        if seed is None:
            return found
        mine = tuple(part for part in found if part.seed == seed)
        if not mine:
            raise DumpError(self.path, f"there is no seed {seed} in arm {arm!r}")
        return mine

    def metadata(self, arm: str) -> Metadata:
        """Metadata of an arm's first file; others may differ in what need not agree."""
        return self.files(arm)[0].metadata

    def rows_seen(self, arm: str, seed: int) -> int:
        """Tokens looked at, Σ over the seed's files."""
        return sum(part.metadata.rows_seen for part in self.files(arm, seed))

    def rows(self, arm: str, seed: int) -> int:
        """Rows stored, Σ over the seed's files."""
        return sum(part.rows for part in self.files(arm, seed))

    def check_arms(self, arms: Iterable[str]) -> None:
        """Refuse arms that cannot hold the same tokens, by what their footers count.

        Parameters
        ----------
        arms : iterable of str
            Arms that will be compared, recorded to their end.

        Raises
        ------
        DumpError
            There is no such arm, or two arms that were stored by the same rule differ in the
            rows or in the `rows_seen` of a seed that both have.
        """
        known: dict[tuple[int, frozenset[object]], tuple[str, int, int]] = {}
        for arm in arms:
            for seed in self.seeds(arm):
                files = self.files(arm, seed)
                rows, seen = self.rows(arm, seed), self.rows_seen(arm, seed)
                rules = frozenset(part.metadata.choice for part in files)
                other, *expected = known.setdefault((seed, rules), (arm, rows, seen))
                if [rows, seen] != expected:
                    raise DumpError(
                        files[0].path.parent,
                        f"arms {other} and {arm} must hold the same tokens of seed {seed}, found "
                        f"{expected[0]} rows of {expected[1]} tokens and {rows} of {seen}",
                        kind="same tokens",
                    )

    def optional_columns(self, arm: str) -> frozenset[str]:
        """Optional columns that every file of the arm has, files of no rows aside."""
        found = set(OPTIONAL)
        for part in self.files(arm):
            if part.rows:
                found &= set(part.columns)
        return frozenset(found)

    def readings(self, arm: str) -> frozenset[str]:
        """Readings of the policy, "pre" and "post", that every file of the arm has.

        Files of no rows aside. Without "post" there is no ΔD, without "pre" no D.
        """
        found = set(READINGS)
        for part in self.files(arm):
            if part.rows:
                found = {each for each in found if READINGS[each][0] in part.columns}
        return frozenset(found)

    def batches(
        self,
        arm: str,
        seed: int,
        *,
        columns: Iterable[str] | None = None,
        batch_rows: int = 65_536,
    ) -> Iterator[Batch]:
        """Read the rows of one seed, file by file.

        Parameters
        ----------
        arm, seed : str, int
            Partition.
        columns : iterable of str, optional
            Columns wanted, by default all that a file has. `topk_ids` comes along with any
            vector, since it tells the padding.
        batch_rows : int
            Rows a batch, at most; fewer where they would take more than `BATCH_BYTES`.

        Yields
        ------
        Batch
            Unchecked but for types; none for a file of no rows.

        Raises
        ------
        DumpError
            No such arm or seed, a file that lacks a wanted column, or one that is damaged.
        ValueError
            `columns` names none, or one that the contract does not know; `batch_rows` is not
            positive.
        """
        names = None if columns is None else tuple(dict.fromkeys(columns))
        for part in self.files(arm, seed):
            yield from part_batches(part, columns=names, batch_rows=batch_rows)


def part_batches(
    part: PartFile,
    *,
    columns: Iterable[str] | None = None,
    batch_rows: int = 65_536,
    groups: range | None = None,
) -> Iterator[Batch]:
    """Read the rows of one file, or of some of its row groups.

    Parameters
    ----------
    part : PartFile
        Which file.
    columns, batch_rows
        As `Dump.batches` takes them.
    groups : range, optional
        Row groups, by their places in `part.groups`, one after the other; by default all.

    Yields
    ------
    Batch
        As `Dump.batches`.

    Raises
    ------
    DumpError, ValueError
        As `Dump.batches`.
    """
    wanted = _wanted(part, columns)
    if batch_rows < 1:
        raise ValueError(f"`batch_rows` must be at least 1, got {batch_rows}")
    if not part.rows:
        return
    first_row, last_row = 0, part.rows
    if groups is not None:
        first_row, last_row = sum(part.groups[: groups.start]), sum(part.groups[: groups.stop])
    row_bytes = sum(
        COLUMNS[name].dtype.itemsize * (part.metadata.top_k if COLUMNS[name].is_vector else 1)
        for name in wanted
    )
    try:
        with open_parquet(part.path, wanted, groups) as file:
            for found in file.iter_batches(
                max(1, min(batch_rows, BATCH_BYTES // row_bytes)),
                row_groups=None if groups is None else list(groups),
                columns=wanted,
                use_threads=False,
            ):
                batch = from_arrow(found, wanted, str(part.path), first_row, part.metadata.top_k)
                first_row += len(batch)
                if len(batch):
                    yield batch
    except (StorageError, DumpError):
        raise
    except MemoryError as error:
        group = bisect.bisect(list(itertools.accumulate(part.groups)), first_row)
        raise DumpError(
            part.path, f"row group {group} needs more memory than there is", kind="memory"
        ) from error
    except DAMAGE as error:
        raise unreadable(part.path, error) from error
    if first_row != last_row:
        raise DumpError(
            part.path, f"the footer promises {last_row} rows, but {first_row} were found"
        )


def _wanted(part: PartFile, columns: Iterable[str] | None) -> list[str]:
    """Columns to read of a file, in the contract's order."""
    if columns is None:
        return list(part.columns)
    asked = set(columns)
    if not asked:
        raise ValueError("`columns` must name at least one column")
    if unknown := sorted(asked - set(COLUMNS)):
        raise ValueError(f"a dump has no column {unknown[0]!r}")
    if asked & set(VECTORS):
        asked.add("topk_ids")
    if part.rows and (missing := sorted(asked - set(part.columns))):
        raise DumpError(part.path, "is missing in this file and is needed here", column=missing[0])
    return [name for name in part.columns if name in asked]
