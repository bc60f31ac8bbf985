"""Files of scores into one arm and seed of a dump, all of it or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import (
    READINGS,
    DumpError,
    DumpWriter,
    Metadata,
    part_batches,
    part_numbers,
)
from deltad.dumps.batch import Batch
from deltad.dumps.consistency import applied
from deltad.dumps.finding import Finding
from deltad.dumps.footers import PartFile, scan
from deltad.dumps.incoming import incoming
from deltad.dumps.layout import part_path
from deltad.dumps.validate import row_findings
from deltad.dumps.writer import Existing

from .assemble import Response, assemble
from .faults import LISTED, Faults, OfflineError
from .files import Progress, ScoringFiles
from .join import TWICE, Joined, shortened
from .records import Record

BLOCK: Final = 8192
"""Rows that are checked and written at once."""

_NAMED_ANEW: Final = (
    "must be a whole number, since RUN has responses of step {} already and texts are numbered "
    "anew by every import: whether it is among them cannot be known"
)
_LABELS: Final = {
    "join": "the file to join",
    "pre": "the file of scores before the step",
    "post": "the file of scores after the step",
}


class Source(Protocol):
    """Where responses come from."""

    @property
    def size(self) -> int:
        """Bytes to read."""

    def records(self, faults: Faults, progress: Progress | None = None) -> Iterator[Record]:
        """Read the responses, from the beginning each time; what is wrong goes to `faults`."""


@dataclass(frozen=True)
class Imported:
    """What an import wrote.

    Attributes
    ----------
    paths : tuple of Path
        Files of the dump.
    responses, tokens : int
        Responses, and rows.
    left_out : int
        Tokens that were not sampled, by `response_mask`.
    without_lists : int
        Rows without top-K lists.
    readings : tuple of str
        Readings of the policy that the files held.
    top_k : int
        K.
    ignored : tuple of str
        Fields that mean nothing and were passed over.
    """

    paths: tuple[Path, ...]
    responses: int
    tokens: int
    left_out: int
    without_lists: int
    readings: tuple[str, ...]
    top_k: int
    ignored: tuple[str, ...]


class UpdateError(ValueError):
    """The metadata contradict the arm's name, or do not tell the mask that they name."""


class _LookFirstError(Exception):
    """A token has no list, or a longer one, than the first response let expect."""


def import_dump(
    source: Source,
    run: str | Path,
    *,
    metadata: Mapping[str, Any],
    pre: ScoringFiles | None = None,
    post: ScoringFiles | None = None,
    join: ScoringFiles | None = None,
    arm: str = "actual",
    seed: int = 0,
    top_k: int | None = None,
    existing: Existing = "refuse",
    progress: Progress | None = None,
) -> Imported:
    """Write responses, and how the policy scores them, as one arm and seed of a dump.

    Files are streamed: besides what waits for its turn (`join.IN_MEMORY` records) a block of
    rows is held, and a number a response. The files appear in RUN together when all is read
    and every value is sound; otherwise nothing does.

    Parameters
    ----------
    source : Source
        The responses; `ScoringFiles` or a reader of some trainer's or engine's files.
    run : str or Path
        RUN, made if need be.
    metadata : mapping
        Keys of `Metadata` but for `top_k`: `vocab_size` must be there.
    pre, post : ScoringFiles, optional
        Scores of the policy before and after the step; not needed where the source has them.
    join : ScoringFiles, optional
        More fields of the same responses.
    arm, seed : str, int
        Partition.
    top_k : int, optional
        K; by default that of RUN where there is one, else the longest list of all responses,
        and 1 where there is none.
    existing : {"refuse", "replace", "append"}
        What to do where RUN has this arm and seed.
    progress : callable, optional
        Told the number of bytes read.

    Returns
    -------
    Imported
        What was written.

    Raises
    ------
    OfflineError
        Files that make no dump; nothing was written.
    DumpError
        RUN is no dump, holds this arm and seed already, or another K, vocabulary or temperature.
    ValueError
        A value of `metadata`, or a name, that is not possible; `UpdateError` where it is the
        update's.
    """
    run = Path(run)
    first, readings = _first(source, {"pre": pre, "post": post})
    longest, bare = _lists_of(first)
    top_k = top_k or _top_k_of(run, arm, seed, existing)
    described = Metadata(**{**metadata, "top_k": top_k or max(1, longest)})
    _check_run(run, described, arm, seed, existing)
    others = {"join": join, "pre": pre, "post": post}
    task = _Task(
        source,
        {role: files for role, files in others.items() if files is not None},
        readings,
        described,
        _known_keys(run, arm, seed) if existing == "append" else set(),
        progress,
        nullable=bare,
        guessed=top_k is None,
    )
    new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    staging = run / f"_importing.{secrets.token_hex(8)}"
    try:
        try:
            found = _write(task, staging, arm, seed)
        except _LookFirstError:
            shutil.rmtree(staging)
            every = [_lists_of(record) for record in source.records(Faults())]
            described = Metadata(
                **{**metadata, "top_k": top_k or max(1, *(each for each, _ in every))}
            )
            _check_run(run, described, arm, seed, existing)
            task = dataclasses.replace(
                task, metadata=described, nullable=any(bare for _, bare in every), guessed=False
            )
            found = _write(task, staging, arm, seed)
        paths = _publish(staging, run, arm, seed, existing)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # not empty
                run.rmdir()
    return dataclasses.replace(found, paths=paths)


@dataclass
class _Task:
    """What is to be written, and what was seen of it."""

    source: Source
    others: Mapping[str, ScoringFiles]
    readings: tuple[str, ...]
    metadata: Metadata
    known: set[tuple[int, int | str]]
    progress: Progress | None
    nullable: bool
    guessed: bool


def _first(
    source: Source, scores: Mapping[str, ScoringFiles | None]
) -> tuple[Record, tuple[str, ...]]:
    """The first sound response, and the readings of the policy that there are."""
    faults = Faults()
    record = next(source.records(faults), None)
    if record is None:
        faults.check()
        names = ", ".join(shortened(getattr(source, "paths", [])))
        raise OfflineError(f"the files hold no response: {names}")
    readings = tuple(
        reading
        for reading, names in READINGS.items()
        if scores[reading] is not None or names[0] in record.columns
    )
    if readings == ("post",):
        raise OfflineError(
            "scores after the step are nothing without those before it: give `--pre` too"
        )
    return record, readings


def _lists_of(record: Record) -> tuple[int, bool]:
    """The longest list of ids, and whether a token has none."""
    lists = record.columns.get("topk_ids")
    if lists is None:
        return 0, True
    longest = int((lists.values >= 0).sum(axis=1).max(initial=0))
    return longest, bool((lists.lengths < 0).any())


def _check_run(run: Path, metadata: Metadata, arm: str, seed: int, existing: str) -> None:
    """Refuse a RUN that these rows cannot stand in."""
    if not run.exists():
        return
    parts, problems = scan(run)
    if parts and problems:
        raise problems[0]
    mine = [part for part in parts if (part.arm, part.seed) == (arm, seed)]
    if mine and existing == "refuse":
        raise DumpError(
            mine[0].path,
            "exists already: give `--existing replace`, `--existing append`, another arm or seed, "
            "or another RUN",
        )
    for part in parts:
        if part in mine and existing == "replace":
            continue
        for key in ("top_k", "vocab_size", "temperature"):
            have, there = getattr(metadata, key), getattr(part.metadata, key)
            if have != there:
                raise DumpError(
                    part.path,
                    f"`{key}` must be the same in all files of a dump, found {there}, and {have} "
                    "in what is imported",
                )


def _top_k_of(run: Path, arm: str, seed: int, existing: str) -> int | None:
    """K of what will stay in RUN; None where that is nothing."""
    for part in scan(run)[0] if run.exists() else []:
        if existing != "replace" or (part.arm, part.seed) != (arm, seed):
            return part.metadata.top_k
    return None


def _known_keys(run: Path, arm: str, seed: int) -> set[tuple[int, int | str]]:
    """Step and sequence of the responses that are there already."""
    found: set[tuple[int, int | str]] = set()
    for part in scan(run)[0] if run.exists() else []:
        if (part.arm, part.seed) == (arm, seed):
            for batch in part_batches(part, columns=("step", "sequence")):
                found |= set(zip(batch["step"].tolist(), batch["sequence"].tolist(), strict=True))
    return found


def _write(task: _Task, staging: Path, arm: str, seed: int) -> Imported:
    """Write everything aside.

    Raises
    ------
    OfflineError
        Anything is wrong; the whole of the files was looked at then.
    """
    faults = Faults()
    writer = DumpWriter(staging, arm=arm, seed=seed, metadata=task.metadata, readings=task.readings)
    block = _Block(writer, task.metadata, task.readings, task.nullable, faults, arm)
    left_out = 0
    try:
        for response in _responses(task, faults):
            left_out += response.left_out
            block.add(response)
        block.flush()
        faults.check()
        writer.close()
    finally:
        writer.abort()
    files = [task.source, *task.others.values()]
    ignored = set().union(*(getattr(each, "ignored", set()) for each in files))
    return Imported(
        (), block.responses, writer.rows_stored, left_out, block.without_lists, task.readings,
        task.metadata.top_k, tuple(sorted(ignored)),
    )  # fmt: skip


def _responses(task: _Task, faults: Faults) -> Iterator[Response]:
    """Join the files, response by response; numbers stand for the names of groups and responses."""
    numbers = {"sequence": _Numbers(), "group": _Numbers()}
    seen = set(task.known)
    known_steps = {step for step, _ in task.known}
    grouped: bool | None = None
    unread = 0  # faults of records that the source could not give
    with contextlib.ExitStack() as stack:
        joined = {
            role: stack.enter_context(Joined(files, _LABELS[role], faults, task.progress))
            for role, files in task.others.items()
        }
        records = task.source.records(faults, task.progress)
        while True:
            before = faults.count
            record = next(records, None)
            unread += faults.count - before
            if record is None:
                break
            if isinstance(record.sequence, str) and record.step in known_steps:
                faults.add(record.fault(_NAMED_ANEW.format(record.step), name="sequence"))
                continue
            if record.key in seen:
                faults.add(record.fault(TWICE))
                continue
            seen.add(record.key)
            if task.guessed and _lists_of(record)[0] > task.metadata.top_k:
                raise _LookFirstError
            found = {role: files.take(record) for role, files in joined.items()}
            others = {role: other for role, other in found.items() if other is not None}
            if len(others) < len(found):
                continue
            response = assemble(
                record,
                others,
                top_k=task.metadata.top_k,
                readings=task.readings,
                faults=faults,
            )
            if response is None:
                continue
            group = next(
                (each.group for each in (record, *others.values()) if each.group is not None), None
            )
            grouped = group is not None if grouped is None else grouped
            if grouped is not (group is not None):
                word = "lacks" if grouped else "has"
                message = f"{word} it, unlike the responses before: all must have one, or none"
                faults.add(record.fault(message, name="group"))
                continue
            group = record.sequence if group is None else group
            names: dict[str, int | str] = {"sequence": record.sequence, "group": group}
            for name, value in names.items():
                number = numbers[name].of(value)
                if number is None:
                    message = "must be a whole number in all records, or a text in all"
                    faults.add(record.fault(message, name=name))
                    break
                response.columns[name] = np.full(len(response), number, dtype=np.int64)
            else:
                response.columns["step"] = np.full(len(response), record.step, dtype=np.int64)
                yield response
        for files in joined.values():
            files.finish(complete=not unread)


class _Numbers:
    """Numbers for names: an int stands for itself, texts are counted."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._kind: type | None = None

    def of(self, value: int | str) -> int | None:
        """The number; None where there is none."""
        self._kind = self._kind or type(value)
        if type(value) is not self._kind:
            return None
        if isinstance(value, str):
            return self._known.setdefault(value, len(self._known))
        return value


class _Block:
    """Rows on their way into the writer, with where they came from."""

    def __init__(
        self,
        writer: DumpWriter,
        metadata: Metadata,
        readings: tuple[str, ...],
        nullable: bool,
        faults: Faults,
        arm: str,
    ) -> None:
        self.responses = self.without_lists = 0
        self._writer, self._metadata, self._readings = writer, metadata, readings
        self._nullable, self._faults, self._arm = nullable, faults, arm
        self._held: list[Response] = []
        self._rows = 0
        self._names: frozenset[str] | None = None

    def add(self, response: Response) -> None:
        """Take a response."""
        names = frozenset(response.columns)
        self._names = self._names or names
        if apart := sorted(names ^ self._names):
            lacks = "lacks" if apart[0] in self._names else "has"
            fault = response.record.fault(
                f"{lacks} it, unlike the responses before: all must have the same fields",
                name=apart[0],
            )
            self._faults.add(fault)
            return
        self._held.append(response)
        self._rows += len(response)
        if self._rows >= BLOCK:
            self.flush()

    def flush(self) -> None:
        """Check what is held, and write it while nothing is wrong."""
        held, self._held, self._rows = self._held, [], 0
        if not held:
            return
        columns = {
            name: np.concatenate([each.columns[name] for each in held]) for name in held[0].columns
        }
        vectors = np.concatenate([each.vectors for each in held])
        try:
            batch = incoming(
                columns, vectors, top_k=self._metadata.top_k, label="", readings=self._readings
            )
        except DumpError as error:
            # Of a block, not of a row: too large a number, half a surrogate pair.
            problem = error.problem
            for each in held:
                self._blame(each, problem.column, problem.message)
            return
        for finding in self._findings(batch):
            for row in finding.rows[: LISTED + 1].tolist():
                response, place = _at(held, row)
                record, name = response.sources.get(
                    finding.column, (response.record, finding.column)
                )
                position = int(response.columns["position"][place])
                self._faults.add(record.fault(finding.describe(row), position=position, name=name))
            self._faults.count += max(0, len(finding.rows) - LISTED - 1)
        if self._faults.count:
            return
        if not vectors.all() and not self._nullable:
            raise _LookFirstError
        self._writer.append(columns, vectors_stored=vectors if self._nullable else None)
        self.responses += len(held)
        self.without_lists += int(np.count_nonzero(~vectors))

    def _findings(self, batch: Batch) -> list[Finding]:
        """What is wrong with rows; the first block tells whether the update's mask is known."""
        names = tuple(batch.columns)
        part = PartFile(Path(), self._arm, 0, 0, 0, len(batch), self._metadata, names)
        try:
            mask = applied(part)
        except ValueError as error:
            raise UpdateError(str(error)) from error
        return row_findings(part, batch, mask)

    def _blame(self, response: Response, column: str | None, message: str) -> None:
        """Make a fault of a column whose type or size is wrong, where it is this response's."""
        values = response.columns.get(column or "")
        kind = getattr(values, "dtype", None)
        if values is not None and kind is not None and kind.kind == "i":
            bad = np.flatnonzero((values < -(2**31)) | (values >= 2**31))
            if not len(bad):
                return
        record, name = response.sources.get(column or "", (response.record, column or ""))
        self._faults.add(record.fault(message, name=name))


def _at(held: list[Response], row: int) -> tuple[Response, int]:
    """The response that a row of a block is of, and the row within it."""
    ends: NDArray[np.intp] = np.cumsum([len(each) for each in held])
    index = int(np.searchsorted(ends, row, side="right"))
    return held[index], row - (int(ends[index - 1]) if index else 0)


def _publish(staging: Path, run: Path, arm: str, seed: int, existing: str) -> tuple[Path, ...]:
    """Put complete files into their places."""
    numbers = part_numbers(staging, arm=arm, seed=seed)
    target = part_path(run, arm, seed, 0, 0).parent
    staged = part_path(staging, arm, seed, 0, 0).parent
    first = 0
    if existing == "append" and target.is_dir():
        first = max(part_numbers(run, arm=arm, seed=seed), default=-1) + 1
        for number in numbers:
            os.rename(
                staged / f"part-0-{number}.parquet", target / f"part-0-{first + number}.parquet"
            )
    else:
        if target.is_dir():
            os.rename(target, staging / "replaced")
        if target.parent.is_dir():
            os.rename(staged, target)
        else:
            os.rename(staged.parent, target.parent)
    return tuple(part_path(run, arm, seed, 0, first + number) for number in numbers)
