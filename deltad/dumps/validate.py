"""Checking a whole dump: every row of every file, and what files and arms say of each other."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from reprlib import repr as brief

import numpy as np
from numpy.typing import NDArray

from .agreement import Rows, arm_findings, key_findings
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

    Beside names, footers and values: tokens are unique within arm and seed, arms agree on what
    they share, `in_loss` of a masked arm is what its criterion decides on the stored values, a
    step of zero length leaves the policy as it was, rows stored above a threshold lie there,
    lists are in rank order, prompts can be read, and no recording is unfinished.

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
    for each in unfinished(path):
        report.add(DumpError(each.path, each.sentence(), kind="unfinished"))
    done = 0
    for seed in sorted({part.seed for part in parts}):
        rows: dict[str, list[Rows]] = {}
        for part in (part for part in parts if part.seed == seed):
            found = _check_part(part, report, batch_rows)
            if found is not None:
                rows.setdefault(part.arm, []).append(found)
            done += 1
            if progress is not None:
                progress(done, len(parts))
        for files in rows.values():
            for path_, finding in key_findings(files):
                report.add_findings(path_, 0, [finding])
        for path_, first_row, finding in arm_findings(rows, batch_rows):
            report.add_findings(path_, first_row, [finding])
    return report.problems


def _check_part(part: PartFile, report: _Report, batch_rows: int) -> Rows | None:
    """Check one file alone; what identifies its rows, or None where they cannot be read."""
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
    keys = [np.zeros((0, 4), dtype=np.int32)]
    try:
        for batch in part_batches(part, batch_rows=batch_rows):
            report.add_findings(path, batch.first_row, row_findings(part, batch, mask))
            keys.append(np.stack([batch[name] for name in Rows.KEY], axis=1))
    except DumpError as error:  # with `strict` also what `report` has just raised
        report.add(error)
        return None
    return Rows(part, np.concatenate(keys))


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
