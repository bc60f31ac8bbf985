"""Seeds needed to see a difference of so many points, judged by a dump's own seeds.

A dump with few seeds says little about what criteria do, and enough about how many seeds it
would take: the spread between seeds, how often they tie, how often a criterion keeps nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .question import Question, QuestionError
from .rates import RateTable
from .result import Result
from .simulated import PowerRow, SimulatedDumps
from .statistics import mean
from .statistics.power import TESTS, TIMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

POINTS: Final = (0.01, 0.02, 0.03, 0.05, 0.1)
"""Differences that are looked at by default, as shares."""

POWER: Final = 0.8
LEVEL: Final = 0.05

POWER_COLUMNS: Final[dict[str, str]] = {
    "test": "sign test, Wilcoxon's, or the paired t-test (as the permutation test of the mean)",
    "difference": "how far the criterion's mean unsafe-keep rate lies below the baseline's",
    "seeds": "seeds needed, those without a rate among them; NaN where there is no such number",
    "power": "simulated power with so many seeds",
    "power_error": "its standard error",
    "rejects_equal": "share of dumps of so many seeds in which the test rejects equal mean rates",
    "power_here": "simulated power with the number of seeds of this dump",
    "rejects_equal_here": "the same of equal mean rates: should be the level or less",
    "detectable_here": "smallest difference that this dump's number of seeds sees; NaN: none",
}
"""Columns of a power table, a row a test and difference, and what they mean."""


LEAST_POINT: Final = 1e-4
"""The smallest difference that may be asked for, a hundredth of a point: a million seeds."""

LEAST_LEVEL: Final = 1e-6
"""The smallest level and power that may be asked for."""


@dataclass(frozen=True, eq=False)
class PowerTable(Result):
    """What a number of seeds can see, by the seeds of one dump.

    Attributes
    ----------
    table : RateTable
        The counts that it rests on.
    points : tuple of float
        Differences, as shares; ascending.
    goal, level : float
        Power asked for; level of the two-sided tests.
    times : int
        Dumps simulated for one power.
    """

    table: RateTable
    points: tuple[float, ...] = POINTS
    goal: float = POWER
    level: float = LEVEL
    times: int = TIMES

    @cached_property
    def dumps(self) -> SimulatedDumps:
        """Dumps like this one."""
        return SimulatedDumps(self.table, self.level, self.times)

    @property
    def question(self) -> Question:
        """What was asked."""
        return self.table.question

    @property
    def seeds(self) -> int:
        """Seeds of this dump."""
        return len(self.table.seeds)

    @cached_property
    def paired_rates(self) -> dict[str, float]:
        """Mean rate of each side over the seeds in which both have one."""
        rates = {side: self.table.rates(side) for side in ("criterion", "baseline")}
        both = ~(np.isnan(rates["criterion"]) | np.isnan(rates["baseline"]))
        return {side: mean(each[both]) for side, each in rates.items()}

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the paired difference over seeds; NaN with fewer than two."""
        gaps = self.table.rates("criterion") - self.table.rates("baseline")
        gaps = gaps[~np.isnan(gaps)]
        return float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan

    @cached_property
    def rows(self) -> tuple[PowerRow, ...]:
        """A row a test and difference; none where fewer than two seeds have both rates."""
        return tuple(self.row(test, point) for test, point in self.searches)

    @property
    def searches(self) -> tuple[tuple[str, float], ...]:
        """Test and difference of each row."""
        if self.dumps.model(0.0) is None:
            return ()
        return tuple((test, point) for test in TESTS for point in self.points)

    @cached_property
    def rejects_equal_here(self) -> dict[str, float]:
        """Share of dumps of as many seeds in which each test rejects equal mean rates."""
        return self.dumps.shares(0.0, self.seeds)

    @cached_property
    def detectable_here(self) -> dict[str, float]:
        """Smallest difference that each test sees with this dump's seeds; NaN where none."""
        most = self.paired_rates["baseline"]
        if self.dumps.model(0.0) is None:
            return dict.fromkeys(TESTS, math.nan)
        return {test: self.dumps.detectable(test, self.seeds, self.goal, most) for test in TESTS}

    @cached_property
    def curves(self) -> tuple[tuple[float, list[int], list[dict[str, float]]], ...]:
        """Of equal rates and of each difference: numbers of seeds, and what rejects there."""
        if not self.rows:
            return ()
        most = max([2 * self.seeds, 100, *(row.seeds or 0 for row in self.rows)])
        grid = [int(seeds) for seeds in np.unique(np.geomspace(5, most, 16).round())]
        return tuple(
            (point, grid, [self.dumps.shares(point, seeds) for seeds in grid])
            for point in (0.0, *self.points)
            if self.dumps.model(point) is not None
        )

    def row(self, test: str, point: float) -> PowerRow:
        """The row of one test and difference; searched for once."""
        if (test, point) not in self._found:
            self._found[test, point] = self.dumps.search(test, point, self.goal)
        return self._found[test, point]

    def to_json_object(self) -> dict[str, Any]:
        """`format`, the question, what this dump's seeds are like, `rows`; NaN is None."""
        from .export import FORMAT, without_nan

        paired, question = self.table.paired, self.question
        known: dict[str, Any] = without_nan(
            {
                "format": FORMAT,
                "threshold": question.threshold,
                "divergence": question.divergence,
                "protocol": question.protocol,
                "baseline": question.baseline,
                "criterion": question.criterion,
                "power": self.goal,
                "level": self.level,
                "simulation": {"dumps": self.times, "seed": self.table.bootstrap_seed},
                "dump": {
                    "seeds": self.seeds,
                    "paired": paired.seeds,
                    "tied": paired.tied,
                    "without_rate": self.seeds - paired.seeds,
                    "baseline_rate": self.paired_rates["baseline"],
                    "criterion_rate": self.paired_rates["criterion"],
                    "spread": self.spread,
                    "detectable": self.detectable_here,
                    "rejects_equal": self.rejects_equal_here,
                },
                "rows": [
                    {
                        "test": row.test,
                        "difference": row.difference,
                        "seeds": row.seeds,
                        "power": row.power,
                        "power_error": self.dumps.error(row.power),
                        "rejects_equal": row.rejects_equal,
                        "power_here": row.power_here,
                    }
                    for row in self.rows
                ],
            }
        )
        return known

    def columns(self) -> dict[str, list[Any]]:
        """A row a test and difference, the columns of `POWER_COLUMNS`."""
        rows = [
            [
                row.test,
                row.difference,
                math.nan if row.seeds is None else row.seeds,
                row.power,
                self.dumps.error(row.power),
                row.rejects_equal,
                row.power_here,
                self.rejects_equal_here[row.test],
                self.detectable_here[row.test],
            ]
            for row in self.rows
        ]
        return {name: [row[at] for row in rows] for at, name in enumerate(POWER_COLUMNS)}

    def text(self) -> RenderableType:
        """Seeds needed by test and difference, and what this dump's seeds see."""
        from .forms.power import power_text

        return power_text(self)

    def figure(self) -> Figure:
        """Power against seeds, a panel a test; see `power_figure`."""
        from .figures.power import power_figure

        return power_figure(self)

    @cached_property
    def _found(self) -> dict[tuple[str, float], PowerRow]:
        """Rows searched so far."""
        return {}


def power_table(
    table: RateTable,
    *,
    points: Sequence[float] = POINTS,
    power: float = POWER,
    level: float = LEVEL,
    times: int = TIMES,
) -> PowerTable:
    """Seeds needed to see that a criterion's unsafe-keep rate is lower by so much.

    Parameters
    ----------
    table : RateTable
        Counts by seed of a dump.
    points : sequence of float
        Differences in (0, 1], as shares: 0.05 is five points.
    power : float
        The power asked for, in (0, 1).
    level : float
        Of the two-sided tests, in (0, 1).
    times : int
        Dumps simulated for one power.

    Returns
    -------
    PowerTable
        Computed as it is asked for: a second or two a point.

    Raises
    ------
    QuestionError
        A number outside its range.

    Notes
    -----
    Dumps are simulated by drawing seeds of this one anew, with the criterion's kept tokens
    made safe (or unsafe) one by one with the probability that sets the mean difference; see
    `deltad.analysis.statistics.power.seed_model`. So counts, ties, empty seeds and the spread
    between seeds are the dump's own, and no formula is trusted.
    """
    check_options(points, power, level)
    return PowerTable(table, tuple(sorted(set(points))), power, level, times)


def check_options(points: Sequence[float], power: float, level: float) -> None:
    """Refuse numbers outside their range.

    Raises
    ------
    QuestionError
        Which, and what it must be.
    """
    for name, value in (("power", power), ("level", level)):
        if not LEAST_LEVEL <= value < 1:
            raise QuestionError(f"`{name}` must lie between {LEAST_LEVEL:g} and 1, got {value:g}")
    if not points or not all(LEAST_POINT <= point <= 1 for point in points):
        given = ", ".join(f"{100 * point:g}" for point in points) or "none"
        raise QuestionError(f"`points` must lie between {100 * LEAST_POINT:g} and 100, got {given}")
    if not power > level:
        raise QuestionError(f"`power` must be above `level`, got {power:g} and {level:g}")
