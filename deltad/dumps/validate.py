"""Checking a whole dump: every row of every file, and what files and arms say of each other."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from reprlib import repr as brief

import numpy as np
from numpy.typing import NDArray

from .agreement import seed_findings
from .batch import Batch
from .consistency import SUPPORTS, Applied, applied, derived_findings
from .errors import DumpError, Problem
from .finding import Finding
from .footers import PartFile, scan
from .prompts import check_prompts
from .reader import part_batches
from .unfinished import unfinished
from .values import findings


class _Report:
    """Problems as they are found: the first is raised, or a few of each kind are listed."""

    def __init__(self, *, strict: bool, limit: int) -> None:
        self.problems: list[Problem] = []
        self._strict, self._limit = strict, limit
        self._counts: Counter[tuple[str, str | None, str]] = Counter()
        self._last: dict[tuple[str, str | None, str], int] = {}

    def add(self, error: DumpError) -> None:
        """Raise or list a problem."""
        if self._strict:
            raise error
        self._add(error.problem)

    def add_findings(self, path: str, first_row: int, found: Iterable[Finding]) -> None:
        """Raise the first row of several findings, or list the rows of each."""
        every = sorted(found, key=lambda finding: int(finding.rows[0]))
        for finding in every:
            room = self._limit - self._counts[path, finding.column, finding.kind]
            listed = finding.rows[: max(room, 0)] if not self._strict else finding.rows[:1]
            for row in listed.tolist():
                self.add(
                    DumpError(
                        path,
                        finding.describe(row),
                        row=first_row + row,
                        column=finding.column,
                        kind=finding.kind,
                    )
                )
            self._add_more(path, finding, len(finding.rows) - len(listed))

    def _add(self, problem: Problem) -> None:
        """List a problem."""
        key = (problem.path, problem.column, problem.kind)
        self._counts[key] += 1
        self._last[key] = len(self.problems)
        self.problems.append(problem)

    def _add_more(self, path: str, finding: Finding, rows: int) -> None:
        """Count rows that are not listed on the last one that is."""
        key = (path, finding.column, finding.kind)
        if rows and key in self._last:
            last = self.problems[self._last[key]]
            self.problems[self._last[key]] = dataclasses.replace(last, count=last.count + rows)


def check_dump(
    path: str | Path,
    *,
    strict: bool = True,
    limit: int = 10,
    batch_rows: int = 16_384,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Check everything that the contract says of a dump.

    In addition to names, footers and values: tokens are unique within arm and seed, the arms of
    a seed hold the same tokens and agree on what they share, `in_loss` of a masked arm is what
    its criterion decides on the stored values, a step of zero length leaves the policy as it was,
    rows stored above a threshold lie there, lists are in rank order, prompts can be read, and no
    recording is unfinished.

    Parameters
    ----------
    path : str or Path
        RUN.
    strict : bool
        Raise the first problem; otherwise list them all.
    limit : int
        Rows to list for each rule, column and file; the others are counted.
    batch_rows : int
        Rows read at once.
    progress : callable, optional
        Called with the number of files that are done and the number of all files.

    Returns
    -------
    list of Problem
        Empty for a dump that obeys the contract.

    Raises
    ------
    FileNotFoundError
        There is no RUN.
    DumpError
        With `strict`, the first problem.
    """
    report = _Report(strict=strict, limit=limit)
    parts, problems = scan(path)
    for problem in (*problems, *check_prompts(path)):
        report.add(problem)
    notes = {(each.arm, each.seed, each.rank): each for each in unfinished(path)}
    for each in notes.values():
        report.add(DumpError(each.path, each.sentence(), kind="unfinished"))
    unended = {(part.arm, part.seed, part.rank): part for part in parts if not part.ended}
    for arm, seed, rank in sorted(unended.keys() - notes.keys()):
        message = (
            f"the recording of rank {rank} has not ended, or its end note `_ended-{rank}-<files>` "
            "was not copied"
        )
        folder = unended[arm, seed, rank].path.parent
        report.add(DumpError(folder, message, kind="unfinished"))
    broken = {os.path.dirname(problem.problem.path) for problem in problems}
    done = 0
    for seed in sorted({part.seed for part in parts}):
        mine = [part for part in parts if part.seed == seed]
        incomplete = {arm for arm, of, _ in (*notes, *unended) if of == seed}
        incomplete |= {part.arm for part in mine if str(part.path.parent) in broken}
        readable = []
        for part in mine:
            if _check_part(part, report, batch_rows):
                readable.append(part)
            else:
                incomplete.add(part.arm)
            done += 1
            if progress is not None:
                progress(done, len(parts))
        for found in seed_findings(readable, batch_rows, incomplete=incomplete):
            if isinstance(found, DumpError):
                report.add(found)
            else:
                report.add_findings(found[0], found[1], [found[2]])
    return report.problems


def _check_part(part: PartFile, report: _Report, batch_rows: int) -> bool:
    """Check one file alone; False where its rows cannot be read."""
    path = str(part.path)
    mask = None
    try:
        mask = applied(part)
    except ValueError as error:
        report.add(DumpError(path, str(error), kind="metadata"))
    support = part.metadata.behavior.get("support", "union")
    if support not in SUPPORTS:
        message = f"`behavior.support` must be one of {', '.join(SUPPORTS)}, found {brief(support)}"
        report.add(DumpError(path, message, kind="metadata"))
    try:
        for batch in part_batches(part, batch_rows=batch_rows):
            report.add_findings(path, batch.first_row, row_findings(part, batch, mask))
    except DumpError as error:  # with `strict` also what `report` has just raised
        report.add(error)
        return False
    return True


def row_findings(part: PartFile, batch: Batch, mask: Applied | None) -> list[Finding]:
    """Find what is wrong with rows taken one by one.

    Parameters
    ----------
    part : PartFile
        Of which the batch is.
    batch : Batch
        All columns of the file.
    mask : Applied or None
        What `in_loss` must be.

    Returns
    -------
    list of Finding
        One a rule and column; contradictions between columns only of rows whose values are
        possible.
    """
    found = list(findings(batch, part.metadata))
    sound = np.ones(len(batch), dtype=np.bool_)
    for finding in found:
        sound[finding.rows] = False
    found += _sound_rows(derived_findings(part, batch, mask), sound)
    return found


def _sound_rows(found: Iterable[Finding], sound: NDArray[np.bool_]) -> Iterator[Finding]:
    """Findings at rows whose values are possible; of the others enough was said."""
    with np.errstate(all="ignore"):
        for finding in found:
            rows = finding.rows[sound[finding.rows]]
            if len(rows):
                yield finding._replace(rows=rows)
