"""Files of scores into one arm and seed of a dump, all of it or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from deltad.dumps import READINGS, DumpWriter, Metadata
from deltad.dumps.storage import is_remote, place
from deltad.dumps.writer import Existing

from .assemble import Response, assemble
from .block import Block, LookFirstError
from .faults import Faults, OfflineError
from .files import Progress, ScoringFiles
from .join import TWICE, Joined, shortened
from .place import check_run, known_keys, publish, top_k_of
from .records import Record

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
    and every value is sound; otherwise nothing does. Where RUN is a URL they are uploaded then.

    Parameters
    ----------
    source : Source
        The responses; `ScoringFiles` or a reader of some trainer's or engine's files.
    run : str or Path
        RUN, a folder or a URL, made if need be.
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
    run = place(run)
    first, readings = _first(source, {"pre": pre, "post": post})
    longest, bare = _lists_of(first)
    top_k = top_k or top_k_of(run, arm, seed, existing)
    described = Metadata(**{**metadata, "top_k": top_k or max(1, longest)})
    check_run(run, described, arm, seed, existing)
    others = {"join": join, "pre": pre, "post": post}
    task = _Task(
        source,
        {role: files for role, files in others.items() if files is not None},
        readings,
        described,
        known_keys(run, arm, seed) if existing == "append" else set(),
        progress,
        nullable=bare,
        guessed=top_k is None,
    )
    new = not run.exists()
    run.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.gettempdir()) if is_remote(run) else run
    staging = aside / f"_importing.{secrets.token_hex(8)}"
    try:
        try:
            found = _write(task, staging, arm, seed)
        except LookFirstError:
            shutil.rmtree(staging)
            every = [_lists_of(record) for record in source.records(Faults())]
            described = Metadata(
                **{**metadata, "top_k": top_k or max(1, *(each for each, _ in every))}
            )
            check_run(run, described, arm, seed, existing)
            task = dataclasses.replace(
                task, metadata=described, nullable=any(bare for _, bare in every), guessed=False
            )
            found = _write(task, staging, arm, seed)
        paths = publish(staging, run, arm, seed, existing)
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


def _write(task: _Task, staging: Path, arm: str, seed: int) -> Imported:
    """Write everything aside.

    Raises
    ------
    OfflineError
        Anything is wrong; the whole of the files was looked at then.
    """
    faults = Faults()
    writer = DumpWriter(staging, arm=arm, seed=seed, metadata=task.metadata, readings=task.readings)
    block = Block(writer, task.metadata, task.readings, task.nullable, faults, arm)
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
                raise LookFirstError
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
