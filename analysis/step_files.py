"""Following the steps of a run while they are written: lines of a monitor, or parts of a dump."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import Batch, Metadata, PartFile, check_batch, part_batches
from deltad.dumps.footers import scan
from deltad.logprobs import LogprobSums
from deltad.step_counting import columns_for, count_steps
from deltad.steps import STEPS, StepQuestion, StepScalars

Place = tuple[str, int]
"""Arm and seed."""

_State = tuple[int, int]
"""Size and time of a file, which tell whether it was written since."""


@dataclass
class StepFiles:
    """All steps that a run holds, read as they appear.

    Where a monitor has written lines (`RUN/_steps`), they are read; arms and seeds without are
    counted from the complete files of the dump. Half a line at the end of a file is left for
    the next `refresh`; what cannot be read becomes a problem, and the rest is read on.

    Attributes
    ----------
    run : Path
        RUN; it may be filled meanwhile.
    question : StepQuestion, optional
        What to count; lines that were counted for another question are passed over. None
        takes the monitor's, and the default for parts of a dump.
    problems : dict of str to str
        File and what is wrong with it.
    """

    run: Path
    question: StepQuestion | None = None
    problems: dict[str, str] = field(default_factory=dict)
    _lines: dict[Path, _Lines] = field(default_factory=dict)
    _parts: dict[Path, tuple[Place, list[StepScalars]]] = field(default_factory=dict)
    _seen: dict[Path, _State] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Read what is new; True if there was anything."""
        changed = False
        for path in sorted(self.run.glob(f"{STEPS}/arm=*/seed=*/rank-*.jsonl")):
            changed |= self._lines.setdefault(path, _Lines()).read(path, self.problems)
        listed = {path: _state(path) for path in self.run.glob("arm=*/seed=*/part-*.parquet")}
        for path in [path for path, state in self._seen.items() if listed.get(path) != state]:
            changed = True  # gone, or written anew
            self._parts.pop(path, None)
            self.problems.pop(str(path), None)
        self._seen = listed
        if self._unread():
            changed |= self._read_parts()
        return changed

    def steps(self) -> list[StepScalars]:
        """Every step once, ranks added up; by arm, seed and step."""
        lined = self._lined()
        totals: dict[tuple[str, int, int], StepScalars] = {}
        counted = (
            step for place, found in self._parts.values() if place not in lined for step in found
        )
        for step in (*(step for found in lined.values() for step in found), *counted):
            key = (step.arm, step.seed, step.step)
            known = totals.get(key)
            if known is None:
                totals[key] = step
            elif (known.question, known.whole) == (step.question, step.whole):
                totals[key] = known + step
            else:
                self.problems[f"{self.run}, arm {step.arm}, seed {step.seed}, step {step.step}"] = (
                    "was counted for another question by another rank, which is left out"
                )
        return [totals[key] for key in sorted(totals)]

    def _lined(self) -> dict[Place, list[StepScalars]]:
        """Steps of monitors by arm and seed."""
        found: dict[Place, list[StepScalars]] = defaultdict(list)
        for lines in self._lines.values():
            for step in lines.steps.values():
                if self.question is None or self.question.pair == step.question.pair:
                    found[step.arm, step.seed].append(step)
        return found

    def _unread(self) -> bool:
        """Whether there are parts that were not read and that no monitor stands for."""
        lined = {f"arm={arm}/seed={seed}" for arm, seed in self._lined()}
        return any(
            path not in self._parts and path.parent.relative_to(self.run).as_posix() not in lined
            for path in self._seen
        )

    def _read_parts(self) -> bool:
        """Count new files of the dump."""
        try:
            parts, _ = scan(self.run)
        except OSError as error:
            self.problems[str(self.run)] = str(error)
            return True
        lined = self._lined()
        new = [part for part in parts if part.path not in self._parts]
        for part in new:
            place = (part.arm, part.seed)
            if place in lined:
                continue
            try:
                self._parts[part.path] = (place, list(self._count(part)))
            except (ValueError, OSError) as error:  # DumpError and CriterionError are ValueErrors
                self._parts[part.path] = (place, [])
                self.problems[str(part.path)] = str(error)
        for path in self._seen.keys() - {part.path for part in parts} - self._parts.keys():
            self.problems[str(path)] = "is not a file of a dump that can be read"
            self._parts[path] = (("", 0), [])
        return bool(new)

    def _count(self, part: PartFile) -> Iterator[StepScalars]:
        """Steps of one file."""
        question = self.question or StepQuestion()
        columns = [name for name in columns_for(question) if name in part.columns]
        steps: dict[int, StepScalars] = {}
        texts: list[tuple[NDArray[Any], ...]] = []
        for batch in part_batches(part, columns=columns):
            check_batch(batch, part.metadata, columns)
            for step in _of_batch(batch, part.metadata, question, part):
                known = steps.get(step.step)
                steps[step.step] = step if known is None else known + step
            texts.append(
                tuple(
                    batch[name] for name in ("step", "sequence", "behavior_logprob", "pre_logprob")
                )
            )
        if not texts:
            return
        number, sequence, behavior, policy = (
            np.concatenate(each) for each in zip(*texts, strict=True)
        )
        for each, step in steps.items():
            here = number == each
            sums = LogprobSums.by_sequence(behavior[here], policy[here], sequence[here])
            yield replace(step, logprobs=step.logprobs + sums)


def _state(path: Path) -> _State:
    """Size and time of a file; zeros where it is gone already."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _of_batch(
    batch: Batch, metadata: Metadata, question: StepQuestion, part: PartFile
) -> Iterator[StepScalars]:
    """Steps of a batch, whose responses may go on in the next one."""
    return count_steps(
        batch, metadata, question, arm=part.arm, seed=part.seed, rank=part.rank, by_sequence=False
    )


@dataclass
class _Lines:
    """What was read of one file of lines."""

    offset: int = 0
    steps: dict[int, StepScalars] = field(default_factory=dict)

    def read(self, path: Path, problems: dict[str, str]) -> bool:
        """Read the whole lines that are new; True if there were any."""
        try:
            if path.stat().st_size < self.offset:  # written anew
                self.offset, self.steps = 0, {}
            with path.open("rb") as file:
                file.seek(self.offset)
                text = file.read()
        except OSError as error:
            problems[str(path)] = str(error)
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            try:
                step = StepScalars.from_json_object(json.loads(line))
            except (ValueError, RecursionError) as error:
                if line.strip():
                    problems[str(path)] = f"a line is passed over: {error}"
                continue
            self.steps[step.step] = step
        return bool(whole)
