"""A run's steps, read as they appear: the newest of every arm, totals, and how numbers went."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad._checks import parse_json, printable
from deltad.analysis.pairs import ratio
from deltad.analysis.result import (
    DASH,
    Column,
    Result,
    Table,
    counted,
    number,
    shown,
)
from deltad.analysis.values import WEIGHT
from deltad.divergence import DIVERGENCES
from deltad.dumps import PartFile, check_batch, part_batches
from deltad.dumps.footers import scan
from deltad.dumps.storage import place
from deltad.dumps.tokens import RESPONSE
from deltad.logprobs import LogprobSums
from deltad.steps import (
    RATES,
    STEPS,
    StepQuestion,
    StepScalars,
    columns_for,
    count_steps,
    judge_responses,
)

SHOWN: Final = (
    "tokens", "outside", "outside_rate", "outside_increase_rate", "disagreement",
    "criterion_unsafe_keep_rate", "baseline_unsafe_keep_rate", "d_pre_p50", "d_pre_p99",
    "d_post_p99", "delta_d_outside_mean", "temperature", "kl", "k3_kl", "chi2_token", "ess",
    "ppl_ratio", "clip_fraction",
)  # fmt: skip
"""Scalars whose course is shown unless others are asked for; masked tokens come after them."""

BLOCKS: Final = "▁▂▃▄▅▆▇█"

_SIDES: Final = ("criterion", "baseline")
_TOTALS: Final = (
    "tokens", "outside", "disagreement",
    *(f"{name}_{what}" for name in ("outside", "disagreement")
      for what in ("increase", "determined", "undetermined")),
    *(f"{side}_{what}" for side in _SIDES
      for what in ("kept", "unsafe", "contracting", "determined", "undetermined")),
)  # fmt: skip

Place = tuple[str, int]
"""Arm and seed."""


@dataclass
class StepFiles:
    """All steps that a run holds, read as they appear.

    Where a monitor has written lines (`RUN/_steps`), they are read; arms and seeds without are
    counted from the complete files of the dump. Half a line at the end of a file is left for the
    next `refresh`; what cannot be read becomes a problem, and the rest is read on.

    Attributes
    ----------
    run : Path
        RUN; it may be filled meanwhile.
    question : StepQuestion, optional
        What to count; lines that were counted for another question are passed over. None takes the
        monitor's, and the default for parts of a dump.
    problems : dict of str to str
        File and what is wrong with it, printable.
    weights : set of float
        Among them the least and the largest number of tokens that a row stands for, where files
        say it.
    """

    run: Path
    question: StepQuestion | None = None
    problems: dict[str, str] = field(default_factory=dict)
    weights: set[float] = field(default_factory=set)
    _lines: dict[Path, _Lines] = field(default_factory=dict)
    _parts: dict[Path, tuple[Place, list[StepScalars]]] = field(default_factory=dict)
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Read what is new; True if there was anything."""
        changed = False
        for path in sorted(self.run.glob(f"{STEPS}/arm=*/seed=*/rank-*.jsonl")):
            try:
                changed |= self._lines.setdefault(path, _Lines()).read(path)
            except OSError as error:
                self._problem(path, error)
            for message in self._lines[path].bad:
                self._problem(path, message)
        listed = {path: _state(path) for path in self.run.glob("arm=*/seed=*/part-*.parquet")}
        for path in [path for path, state in self._seen.items() if listed.get(path) != state]:
            changed = True  # gone, or written anew
            self._parts.pop(path, None)
            self.problems.pop(printable(str(path)), None)
        self._seen = listed
        if self._unread():
            changed |= self._read_parts()
        return changed

    def steps(self) -> list[StepScalars]:
        """Every step once, ranks added up; by arm, seed and step."""
        lined = self._lined()
        every = [step for found in lined.values() for step in found]
        every += [step for at, found in self._parts.values() if at not in lined for step in found]
        totals: dict[tuple[str, int, int], StepScalars] = {}
        for step in every:
            key = (step.arm, step.seed, step.step)
            known = totals.get(key)
            if known is None:
                totals[key] = step
            elif (known.question, known.whole) == (step.question, step.whole):
                totals[key] = known + step
            else:
                self._problem(
                    f"{self.run}, arm {step.arm}, seed {step.seed}, step {step.step}",
                    "was counted for another question by another rank, which is left out",
                )
        return [totals[key] for key in sorted(totals)]

    def _problem(self, where: object, what: object) -> None:
        """Note what is wrong with a file."""
        self.problems[printable(str(where))] = printable(str(what))

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
            self._problem(self.run, error)
            return True
        lined = self._lined()
        new = [part for part in parts if part.path not in self._parts]
        for part in new:
            at = (part.arm, part.seed)
            if at in lined:
                continue
            try:
                self._parts[part.path] = (at, list(self._count(part)))
            except (ValueError, OSError) as error:  # DumpError and CriterionError are ValueErrors
                self._parts[part.path] = (at, [])
                self._problem(part.path, error)
        for path in self._seen.keys() - {part.path for part in parts} - self._parts.keys():
            self._problem(path, "is not a file of a dump that can be read")
            self._parts[path] = (("", 0), [])
        return bool(new)

    def _count(self, part: PartFile) -> Iterator[StepScalars]:
        """Steps of one file, whose responses may go on from one batch to the next."""
        question = self.question or StepQuestion()
        columns = [name for name in (*columns_for(question), WEIGHT) if name in part.columns]
        where: dict[str, Any] = {"arm": part.arm, "seed": part.seed, "rank": part.rank}
        if not part.rows:
            return
        every = _response_columns(part, question)
        judged = judge_responses(every, question)
        steps: dict[int, StepScalars] = {}
        for batch in part_batches(part, columns=columns):
            check_batch(batch, part.metadata, columns)
            if WEIGHT in columns:
                self.weights |= {float(batch[WEIGHT].min()), float(batch[WEIGHT].max())}
            rows = slice(batch.first_row, batch.first_row + len(batch))
            mine = {name: keep[rows] for name, keep in judged.items()}
            for step in count_steps(batch, part.metadata, question, judged=mine, **where):
                known = steps.get(step.step)
                steps[step.step] = step if known is None else known + step
        for at, step in steps.items():
            here = every["step"] == at
            names = ("behavior_logprob", "pre_logprob", "sequence")
            sums = LogprobSums.by_sequence(*(every[name][here] for name in names))
            yield replace(step, logprobs=step.logprobs + sums)


def _response_columns(part: PartFile, question: StepQuestion) -> dict[str, NDArray[Any]]:
    """All rows of a file, of what is judged and summed by response."""
    needs = (name for each in question.of_responses for name in each.needs)
    names = [name for name in dict.fromkeys((*RESPONSE, *needs)) if name in part.columns]
    batches = list(part_batches(part, columns=names))
    for batch in batches:
        check_batch(batch, part.metadata, names)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def _state(path: Path) -> tuple[int, int]:
    """Size and time of a file, which tell whether it was written since; zeros where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@dataclass
class _Lines:
    """What was read of one file of lines, and what is wrong with some of them."""

    offset: int = 0
    steps: dict[int, StepScalars] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def read(self, path: Path) -> bool:
        """Read the whole lines that are new; True if there were any."""
        if path.stat().st_size < self.offset:  # written anew
            self.offset, self.steps = 0, {}
        with path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            try:
                step = StepScalars.from_json_object(parse_json(line))
            except ValueError as error:
                if line.strip():
                    self.bad.append(f"a line is passed over: {error}")
                continue
            self.steps[step.step] = step
        return bool(whole)


@dataclass(frozen=True, eq=False)
class StepTable(Result):
    """Steps of a run, each with its numbers.

    Attributes
    ----------
    run : Path
        RUN.
    steps : sequence of StepScalars
        By arm, seed and step; ranks added up.
    shown : tuple of str
        Scalars whose course the text shows, without the prefix.
    places : int
        Arms and seeds in the text, the last ones by seed.
    width : int
        Characters that the courses in the text may take in all.
    problems : mapping of str to str
        Files that could not be read, and why.
    unlike : bool
        Whether rows stand for unlike numbers of tokens: here each counts once.
    """

    run: Path
    steps: Sequence[StepScalars]
    shown: tuple[str, ...] = SHOWN
    places: int = 8
    width: int = 160
    problems: Mapping[str, str] = field(default_factory=dict)
    unlike: bool = False

    @classmethod
    def of(cls, run: str | Path, question: StepQuestion | None = None, **options: Any) -> StepTable:
        """Read what a run holds now.

        Parameters
        ----------
        run : str or Path
            RUN.
        question : StepQuestion, optional
            What to count; None for a monitor's own, and the default for a dump.
        **options
            `shown`, `places` and `width`.

        Returns
        -------
        StepTable
            Without steps where there are none yet.
        """
        files = StepFiles(place(run), question)
        files.refresh()
        return cls.from_files(files, **options)

    @classmethod
    def from_files(cls, files: StepFiles, **options: Any) -> StepTable:
        """Make a table of what was read so far."""
        steps = files.steps()
        unlike = len(files.weights) > 1
        return cls(files.run, steps, problems=dict(files.problems), unlike=unlike, **options)

    @cached_property
    def courses(self) -> dict[Place, list[StepScalars]]:
        """Steps in order, by arm and seed."""
        found: dict[Place, list[StepScalars]] = {}
        for step in self.steps:
            found.setdefault((step.arm, step.seed), []).append(step)
        return found

    @cached_property
    def rows(self) -> Sequence[tuple[StepScalars, dict[str, float]]]:
        """Every step with its scalars."""
        return [(step, _scalars(step)) for step in self.steps]

    @property
    def columns(self) -> Sequence[Column]:
        """One row per step: keys, ranks, then every scalar; NaN where a step has no such number."""
        return [
            Column("arm", "the update that was applied", lambda row: row[0].arm, key=True),
            Column("seed", "independent repetition", lambda row: row[0].seed, key=True),
            Column("step", "optimizer step", lambda row: row[0].step, key=True),
            Column("ranks", "ranks whose tokens are in it", lambda row: len(row[0].ranks)),
            *(
                Column(name, "a count, rate or metric of docs/monitor.md", _number(name))
                for name in dict.fromkeys(name for _, found in self.rows for name in found)
            ),
        ]

    def objects(self) -> dict[str, Any]:
        """The newest step of every arm and seed with its numbers, and totals by arm."""
        names = ("threshold", "divergence", "criterion", "baseline")
        return {
            "run": str(self.run),
            "newest": [
                {
                    "arm": arm,
                    "seed": seed,
                    "step": steps[-1].step,
                    "steps": len(steps),
                    "ranks": steps[-1].ranks,
                    **{name: getattr(steps[-1].question, name) for name in names},
                    "scalars": steps[-1].scalars(),
                }
                for (arm, seed), steps in self.courses.items()
            ],
            "totals": [{"arm": arm, **self.total(arm)} for arm in self._arms],
            "unweighted": self.unlike,
            "problems": [{"file": file, "message": why} for file, why in self.problems.items()],
        }

    def total(self, arm: str) -> dict[str, float]:
        """Counts of an arm over all seeds and steps, with the rates of `RATES` they make.

        A count that some step does not have is left out: it is not known.
        """
        mine = [step for step in self.steps if step.arm == arm]
        counts: dict[str, float] = {
            name: sum(step.counts[name] for step in mine)
            for name in _TOTALS
            if all(name in step.counts and (step.whole or name != "tokens") for step in mine)
        }
        rates = {
            name: ratio(counts[above], counts[below])
            for name, (above, below) in RATES.items()
            if above in counts and below in counts
        }
        return {"seeds": len({step.seed for step in mine}), "steps": len(mine), **counts, **rates}

    def parts(self) -> Iterable[str | Table]:
        """Totals and newest steps, then the course of each number in the newest seed."""
        if not self.steps:
            yield f"{self.run}: no step is complete yet"
        else:
            first = self.steps[-1].question
            unit = DIVERGENCES[first.divergence].unit
            yield (
                f"{first.criterion} against {first.baseline} · outside: top-K "
                f"{first.divergence.upper()} > {first.threshold:g}{unit and f' {unit}'}"
            )
            yield self._overview()
            yield self._course()
            if not all(step.whole for step in self.steps):
                yield "Only tokens outside are stored: nothing is said of all tokens."
            if self.unlike:
                yield (
                    "Rows stand for unlike numbers of tokens, and each counts once here: "
                    "`deltad table` weighs them."
                )
        yield from (f"{file}: {message}" for file, message in self.problems.items())

    @property
    def _arms(self) -> list[str]:
        """Every arm once."""
        return list(dict.fromkeys(arm for arm, _ in self.courses))

    def _overview(self) -> Table:
        """A row per arm, all seeds together, then rows of the last seeds."""
        rows = []
        for arm in self._arms:
            total = self.total(arm)
            steps = counted(total["steps"], "step")
            rows.append([arm, f"all {total['seeds']:.0f}", steps, *_counts(total), ""])
        last = sorted(self.courses, key=lambda at: (at[1], at[0]))[-self.places :]
        for arm, seed in reversed(last):
            newest = self.courses[arm, seed][-1]
            counts = {**newest.counts} if newest.whole else {**newest.counts, "tokens": None}
            ranks = str(len(newest.ranks))
            rows.append([arm, str(seed), str(newest.step), *_counts(counts), ranks])
        return Table(
            [
                "arm", "seed", "step", "tokens", "outside", "P(ΔD > 0) outside", "in disagreement",
                *(f"unsafe / determined, {side}" for side in _SIDES), "undetermined", "ranks",
            ],
            rows,
        )  # fmt: skip

    def _course(self) -> Table:
        """A row per number: its newest value and how it went, for every arm of the last seed."""
        last = max(seed for _, seed in self.courses)
        arms = [arm for arm, seed in self.courses if seed == last]
        series = {arm: [_scalars(step) for step in self.courses[arm, last]] for arm in arms}
        newest = (name for found in series.values() for name in found[-1])
        names = dict.fromkeys((*self.shown, *(n for n in newest if n.startswith("masked/"))))
        width = min(40, max(6, (self.width - max(map(len, names)) - 3) // len(arms) - 16))
        rows = []
        for name in names:
            values = [[found.get(name, math.nan) for found in series[arm]] for arm in arms]
            if not all(math.isnan(value) for each in values for value in each):
                cells = [cell for v in values for cell in (shown(v[-1]), sparkline(v, width))]
                rows.append([name, *cells])
        return Table([f"seed {last}, newest step", *(n for arm in arms for n in (arm, ""))], rows)


def _number(name: str) -> Callable[[Any], float]:
    """One of a step's scalars."""
    return lambda row: float(row[1].get(name, math.nan))


def _scalars(step: StepScalars) -> dict[str, float]:
    """A step's numbers by their bare names."""
    return {name[1:]: value for name, value in step.scalars(prefix="", sums=False).items()}


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw numbers as a line of blocks, the last one to the right.

    NaN leaves a gap; of more numbers than `width`, neighbors are averaged.

    Examples
    --------
    >>> sparkline([0, 1, 2, float("nan"), 7], 10)
    '▁▂▃ █'
    """
    places = min(width, len(values))
    means = []
    for at in range(places):
        part = values[at * len(values) // places : (at + 1) * len(values) // places]
        known = [value for value in part if math.isfinite(value)]
        means.append(ratio(sum(known), len(known)))
    known = [value for value in means if not math.isnan(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if math.isnan(value) else BLOCKS[round((value - low) * scale)] for value in means
    )


def _counts(counts: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of counts: tokens, outside, base rate, disagreement, both pairs, undetermined."""

    def whole(name: str) -> str:
        """A count, or a dash."""
        return DASH if counts.get(name) is None else f"{counts[name]:.0f}"

    base = ratio(counts.get("outside_increase", 0), counts.get("outside_determined", 0))
    return (
        whole("tokens"),
        whole("outside"),
        number(base),
        whole("disagreement"),
        *(f"{whole(f'{side}_unsafe')} / {whole(f'{side}_determined')}" for side in _SIDES),
        whole("outside_undetermined"),
    )
