"""A run's steps at a glance: the newest of every arm, totals, and how numbers went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltad.dumps.storage import place
from deltad.steps import RATES, StepQuestion, StepScalars

from .export import FORMAT, without_nan
from .rates import ratio
from .result import Result
from .step_files import StepFiles
from .words import DASH, count, number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHOWN: Final = (
    "tokens", "outside", "outside_rate", "outside_increase_rate", "disagreement",
    "criterion_unsafe_keep_rate", "baseline_unsafe_keep_rate", "d_pre_p50", "d_pre_p99",
    "d_post_p99", "delta_d_outside_mean", "temperature", "kl", "k3_kl", "chi2_token", "ess",
    "ppl_ratio", "clip_fraction",
)  # fmt: skip
"""Scalars whose course is shown unless others are asked for; masked tokens come after them."""

BLOCKS: Final = "▁▂▃▄▅▆▇█"

_VALUE: Final = 10
"""Characters that a number takes at most."""

_TOTALS: Final = (
    "tokens", "outside", "outside_increase", "disagreement", "disagreement_increase",
    "criterion_kept", "criterion_unsafe", "criterion_contracting",
    "baseline_kept", "baseline_unsafe", "baseline_contracting",
)  # fmt: skip


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
        Scalars whose course `text` shows, without the prefix.
    rows : int
        Arms and seeds in `text`, the last ones by seed.
    width : int
        Characters that the courses in `text` may take in all.
    problems : mapping of str to str
        Files that could not be read, and why.
    """

    run: Path
    steps: Sequence[StepScalars]
    shown: tuple[str, ...] = SHOWN
    rows: int = 8
    width: int = 160
    problems: Mapping[str, str] = field(default_factory=dict)

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
            `shown`, `rows` and `width`.

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
        return cls(files.run, steps, problems=dict(files.problems), **options)

    @cached_property
    def courses(self) -> dict[tuple[str, int], list[StepScalars]]:
        """Steps in order, by arm and seed."""
        found: dict[tuple[str, int], list[StepScalars]] = {}
        for step in self.steps:
            found.setdefault((step.arm, step.seed), []).append(step)
        return found

    def columns(self) -> dict[str, list[Any]]:
        """A row a step: keys, ranks, then every scalar; NaN where a step has no such number."""
        scalars = [step.scalars(prefix="", sums=False) for step in self.steps]
        names = dict.fromkeys(name[1:] for each in scalars for name in each)
        return {
            "arm": [step.arm for step in self.steps],
            "seed": [step.seed for step in self.steps],
            "step": [step.step for step in self.steps],
            "ranks": [len(step.ranks) for step in self.steps],
            **{name: [each.get(f"/{name}", math.nan) for each in scalars] for name in names},
        }

    def to_json_object(self) -> dict[str, Any]:
        """The newest step of every arm and seed with its numbers, and totals by arm."""
        found: dict[str, Any] = without_nan(
            {
                "format": FORMAT,
                "run": str(self.run),
                "newest": [
                    {
                        "arm": arm,
                        "seed": seed,
                        "step": steps[-1].step,
                        "steps": len(steps),
                        "ranks": list(steps[-1].ranks),
                        "threshold": steps[-1].question.threshold,
                        "divergence": steps[-1].question.divergence,
                        "criterion": steps[-1].question.criterion,
                        "baseline": steps[-1].question.baseline,
                        "scalars": steps[-1].scalars(),
                    }
                    for (arm, seed), steps in self.courses.items()
                ],
                "totals": [
                    {"arm": arm, **self.total(arm)}
                    for arm in dict.fromkeys(a for a, _ in self.courses)
                ],
                "problems": [
                    {"file": file, "message": message} for file, message in self.problems.items()
                ],
            }
        )
        return found

    def total(self, arm: str) -> dict[str, float]:
        """Counts of an arm over all seeds and steps, with the rates of `RATES` they make."""
        mine = [step for step in self.steps if step.arm == arm]
        counts: dict[str, float] = {
            name: sum(s.counts.get(name, 0) for s in mine) for name in _TOTALS
        }
        if not all(step.whole for step in mine):
            del counts["tokens"]
        rates = {
            name: ratio(counts[above], counts[below])
            for name, (above, below) in RATES.items()
            if above in counts and below in counts
        }
        return {"seeds": len({step.seed for step in mine}), "steps": len(mine), **counts, **rates}

    def text(self) -> RenderableType:
        """Totals and newest steps, then the course of each number in the newest seed."""
        from rich.console import Group
        from rich.text import Text

        problems = [Text(f"{file}: {message}") for file, message in self.problems.items()]
        if not self.steps:
            return Group(Text(f"{self.run}: no step is complete yet"), *problems)
        first = self.steps[-1].question
        unit = " nats" if first.divergence == "kl" else ""
        head = (
            f"{first.criterion} against {first.baseline} · outside: "
            f"top-K {first.divergence.upper()} > {first.threshold:g}{unit}"
        )
        thinned = not all(step.whole for step in self.steps)
        notes = [Text("Only tokens outside are stored: nothing is said of all tokens.")] * thinned
        return Group(Text(head, style="bold"), self._overview(), self._course(), *notes, *problems)

    def _overview(self) -> Table:
        """A row an arm, all seeds together, then rows of the last seeds."""
        table = _grid(
            "arm", "seed", "step", "tokens", "outside", "P(ΔD > 0)\noutside", "in dis-\nagreement",
            "unsafe / kept\ncriterion", "unsafe / kept\nbaseline", "ranks",
        )  # fmt: skip
        for arm in dict.fromkeys(arm for arm, _ in self.courses):
            total = self.total(arm)
            table.add_row(
                arm, f"all {total['seeds']:.0f}", count(int(total["steps"]), "step"),
                *_counts(total), "", style="bold",
            )  # fmt: skip
        last = sorted(self.courses, key=lambda place: (place[1], place[0]))[-self.rows :]
        for arm, seed in reversed(last):
            newest = self.courses[arm, seed][-1]
            counts: dict[str, float] = dict(newest.counts)
            if not newest.whole:
                counts.pop("tokens", None)
            table.add_row(
                arm, str(seed), str(newest.step), *_counts(counts), str(len(newest.ranks))
            )
        return table

    def _course(self) -> Table:
        """A row a number: its newest value and how it went, for every arm of the last seed."""
        last = max(seed for _, seed in self.courses)
        arms = [arm for arm, seed in self.courses if seed == last]
        names = max(map(len, (*self.shown, "masked/predictive-kl-aggregated")))
        each = (self.width - names - 3) // len(arms) - _VALUE - 6
        width = min(40, max(6, each))
        table = _grid(
            f"seed {last}, newest step", *(head for arm in arms for head in (_folded(arm), ""))
        )
        series = {
            arm: [step.scalars(prefix="", sums=False) for step in self.courses[arm, last]]
            for arm in arms
        }
        masked = dict.fromkeys(
            name[1:] for each in series.values() for name in each[-1] if name.startswith("/masked/")
        )
        for name in (*self.shown, *masked):
            values = {arm: [each.get(f"/{name}", math.nan) for each in series[arm]] for arm in arms}
            if all(math.isnan(value) for each in values.values() for value in each):
                continue
            cells = ((_short(values[arm][-1]), sparkline(values[arm], width)) for arm in arms)
            table.add_row(name, *(cell for pair in cells for cell in pair))
        return table


def _grid(*headers: str) -> Table:
    """An unboxed table: the first column to the left, the others to the right, never folded."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, header in enumerate(headers):
        grid.add_column(header, justify="right" if at else "left", no_wrap=True)
    return grid


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw numbers as a line of blocks, the last one to the right.

    Parameters
    ----------
    values : sequence of float
        In order; NaN leaves a gap.
    width : int
        Characters at most; of more numbers than that, neighbours are averaged.

    Returns
    -------
    str
        Of `min(width, len(values))` characters.

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
        means.append(sum(known) / len(known) if known else math.nan)
    known = [value for value in means if not math.isnan(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if math.isnan(value) else BLOCKS[round((value - low) * scale)] for value in means
    )


def _folded(arm: str) -> str:
    """An arm's name in lines little wider than a number."""
    lines = [""]
    for part in arm.replace("-", "-\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > 13:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _counts(counts: Mapping[str, float]) -> tuple[str, ...]:
    """Cells of counts: tokens, outside, base rate, disagreement, both pairs."""

    def whole(name: str) -> str:
        return f"{counts[name]:.0f}" if name in counts else DASH

    return (
        whole("tokens"),
        whole("outside"),
        number(ratio(counts.get("outside_increase", 0), counts.get("outside", 0))),
        whole("disagreement"),
        *(
            f"{whole(f'{side}_unsafe')} / {whole(f'{side}_kept')}"
            for side in ("criterion", "baseline")
        ),
    )


def _short(value: float) -> str:
    """A number of any size in few characters."""
    return DASH if math.isnan(value) else f"{value:.4g}".replace("-", "−")
