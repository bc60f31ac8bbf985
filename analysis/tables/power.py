"""Seeds needed to see a difference of so many points, judged by a dump's own seeds.

A dump with few seeds says little about what criteria do, and enough about how many seeds it would
take: the spread between seeds, how often they tie, how often a criterion keeps nothing. Dumps are
simulated by drawing its seeds anew, with the criterion's kept tokens made safe (or unsafe) one by
one with the probability that sets the mean difference; no formula is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltad.analysis.pairs import SIDES, Pair, asked
from deltad.analysis.question import Question, QuestionError
from deltad.analysis.result import (
    DASH,
    Column,
    Result,
    Table,
    counted,
    number,
    points,
    record,
    title,
)
from deltad.analysis.statistics import mean

TESTS: Final = ("sign test", "Wilcoxon", "paired t")
"""Whose power is simulated. The permutation test of the mean rejects as the paired t-test does,
to within a few per cent of its level."""

POINTS: Final = (0.01, 0.02, 0.03, 0.05, 0.1)
"""Differences that are looked at by default, as shares."""

POWER: Final = 0.8
LEVEL: Final = 0.05

TIMES: Final = 4000
"""Dumps simulated for one power, which is then known to 0.006 (one standard error) near 0.8."""

LEAST_POINT: Final = 1e-4
LEAST_LEVEL: Final = 1e-6
"""The smallest difference (a hundredth of a point), level and power that may be asked for."""

MOST_SEEDS: Final = 1_000_000
FINEST: Final = 0.001
"""Where the search for a number of seeds ends; to what a detectable difference is found."""

_DIGITS: Final = 12  # differences that are equal as fractions must tie

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SeedModel:
    """The law of one seed's paired difference criterion − baseline.

    `values` are ascending, `shares` their probabilities, and `empty` that of a seed without a
    pair of rates: together they are 1.
    """

    values: Floats
    shares: Floats
    empty: float

    @property
    def mean(self) -> float:
        """Mean difference of a paired seed."""
        return float(self.values @ self.shares) / (1 - self.empty)

    @property
    def spread(self) -> float:
        """Standard deviation of the difference of a paired seed."""
        squares = float(np.square(self.values - self.mean) @ self.shares)
        return math.sqrt(squares / (1 - self.empty))


@dataclass(frozen=True, eq=False)
class PowerRow:
    """One test and one difference: seeds needed, if any number will do, and what rejects then."""

    table: PowerTable
    test: str
    difference: float
    seeds: int | None
    power: float
    rejects_equal: float
    power_here: float


@dataclass(frozen=True, eq=False)
class PowerTable(Result):
    """What a number of seeds can see, by the seeds of one dump.

    Attributes
    ----------
    pair : Pair
        The counts by seed that are drawn from; its `bootstrap_seed` seeds the random numbers.
    points : tuple of float
        Differences, as shares; ascending.
    goal, level : float
        Power asked for; level of the two-sided tests.
    times : int
        Dumps simulated for one power.
    """

    pair: Pair
    points: tuple[float, ...] = POINTS
    goal: float = POWER
    level: float = LEVEL
    times: int = TIMES
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def question(self) -> Question:
        """What was asked."""
        return self.pair.question

    @property
    def seeds(self) -> int:
        """Seeds of this dump."""
        return len(self.pair.seeds)

    def counts(self, side: str) -> tuple[Floats, Floats]:
        """Unsafe and determined kept tokens of a side by seed, each token counted once."""
        kept = self.pair.side(side)
        return kept.by_seed("increase"), kept.by_seed("determined")

    @cached_property
    def rates(self) -> dict[str, Floats]:
        """Rates of both sides in the seeds in which both have one."""
        found = {side: self.pair.side(side).rates for side in SIDES}
        both = ~np.isnan(sum(found.values()))
        return {side: each[both] for side, each in found.items()}

    @property
    def spread(self) -> float:
        """Standard deviation of the paired difference over seeds; NaN with fewer than two."""
        gaps = self.rates["criterion"] - self.rates["baseline"]
        return float(gaps.std(ddof=1)) if len(gaps) > 1 else math.nan

    def model(self, difference: float) -> SeedModel | None:
        """The law of a seed's difference where the criterion's rate is so much lower."""
        if difference not in self._known:
            ours, theirs = (self.counts(side) for side in SIDES)
            self._known[difference] = seed_model(ours, theirs, -difference)
        found: SeedModel | None = self._known[difference]
        return found

    def shares(self, difference: float, seeds: int) -> dict[str, float]:
        """Share of simulated dumps in which each test rejects, by test; NaN without a model."""
        if (difference, seeds) not in self._known:
            model, seed = self.model(difference), self.pair.bootstrap_seed
            self._known[difference, seeds] = (
                dict.fromkeys(TESTS, math.nan)
                if model is None
                else rejections(model, seeds, level=self.level, times=self.times, seed=seed)
            )
        found: dict[str, float] = self._known[difference, seeds]
        return found

    def error(self, share: float) -> float:
        """Standard error of a simulated share."""
        return math.sqrt(share * (1 - share) / self.times)

    @property
    def searches(self) -> tuple[tuple[str, float], ...]:
        """Test and difference of each row."""
        known = self.model(0.0) is not None
        return tuple((test, point) for test in TESTS for point in self.points if known)

    def row(self, test: str, point: float) -> PowerRow:
        """The row of one test and difference; searched for once, in a second or two."""
        if (test, point) not in self._known:
            model, seeds = self.model(point), None
            if model is not None:
                # What it would take if differences were normal; with skew it takes another number.
                start = 8 * (max(model.spread, 0.01) / point) ** 2 / (1 - model.empty)
                seeds = seeds_needed(
                    lambda seeds: self.shares(point, seeds)[test], self.goal,
                    start=round(min(start, MOST_SEEDS)),
                )  # fmt: skip
            shares = (
                self.shares(difference, number)[test] if number else math.nan
                for difference, number in ((point, seeds), (0.0, seeds), (point, self.seeds))
            )
            self._known[test, point] = PowerRow(self, test, point, seeds, *shares)
        found: PowerRow = self._known[test, point]
        return found

    @cached_property
    def rows(self) -> tuple[PowerRow, ...]:
        """By test and difference; none where fewer than two seeds have both rates."""
        return tuple(self.row(test, point) for test, point in self.searches)

    @property
    def rejects_equal_here(self) -> dict[str, float]:
        """Share of dumps of as many seeds in which each test rejects equal mean rates."""
        return self.shares(0.0, self.seeds)

    @cached_property
    def detectable_here(self) -> dict[str, float]:
        """Smallest difference that each test sees with this dump's seeds; NaN where none."""
        if self.model(0.0) is None:
            return dict.fromkeys(TESTS, math.nan)

        def detectable(test: str) -> float:
            """Of one test."""
            most = float(self.rates["baseline"].mean())
            return detectable_difference(
                lambda difference: self.shares(difference, self.seeds)[test], self.goal, most
            )

        return {test: detectable(test) for test in TESTS}

    @cached_property
    def curves(self) -> tuple[tuple[float, list[int], list[dict[str, float]]], ...]:
        """Of equal rates and of each difference: numbers of seeds, and what rejects there."""
        if not self.rows:
            return ()
        most = max([2 * self.seeds, 100, *(row.seeds or 0 for row in self.rows)])
        grid = [int(seeds) for seeds in np.unique(np.geomspace(5, most, 16).round())]
        return tuple(
            (point, grid, [self.shares(point, seeds) for seeds in grid])
            for point in (0.0, *self.points)
            if self.model(point) is not None
        )

    def objects(self) -> dict[str, Any]:
        """The question, what this dump's seeds are like, `rows`."""
        paired = self.pair.paired
        return {
            **asked(self.question),
            "baseline": self.question.names[1],
            "criterion": self.question.names[0],
            "power": self.goal,
            "level": self.level,
            "simulation": {"dumps": self.times, "seed": self.pair.bootstrap_seed},
            "dump": {
                "seeds": self.seeds,
                "paired": paired.seeds,
                "tied": paired.tied,
                "without_rate": self.seeds - paired.seeds,
                **{f"{side}_rate": mean(self.rates[side]) for side in reversed(SIDES)},
                "spread": self.spread,
                "detectable": self.detectable_here,
                "rejects_equal": self.rejects_equal_here,
            },
            "rows": [record(POWER_COLUMNS[:-2], row) for row in self.rows],  # the last are of all
        }

    def parts(self) -> Iterable[str | Table]:
        """Seeds needed by test and difference, and what this dump's number of seeds can see."""
        paired = self.pair.paired
        ours, theirs = (number(mean(self.rates[side])) for side in SIDES)
        yield f"{title(self.question)} · {self.question.protocol}"
        yield (
            f"{counted(self.seeds, 'seed')}, {paired.seeds} with both rates, {paired.tied} of them "
            f"tied. Mean unsafe-keep rates over these: criterion {ours}, "
            f"baseline {theirs}; the difference has standard deviation "
            f"{number(self.spread)} over seeds."
        )
        if not self.rows:
            yield (
                "Fewer than two seeds have both rates: this dump says nothing about how many seeds "
                "it takes."
            )
            return
        yield Table.of(POWER_COLUMNS, self.rows)
        seen = (self.detectable_here[test] for test in TESTS)
        yield Table(
            [f"with {counted(self.seeds, 'seed')}", *TESTS],
            [
                ["detectable difference", *(_in_points(each) for each in seen)],
                ["rejects equal rates", *(number(self.rejects_equal_here[t]) for t in TESTS)],
            ],
        )
        yield (
            f"Two-sided tests at level {self.level:g}, power {self.goal:g}; each share from "
            f"{self.times} dumps simulated by drawing these seeds anew (random seed "
            f"{self.pair.bootstrap_seed}), ± {self.error(self.goal):.3f} near {self.goal:g}. Here: "
            "with this dump's seeds. Seeds without a rate are counted. The permutation test of the "
            "mean rejects as the paired t-test does."
        )
        if self.pair.weighted:
            yield "The simulation counts each token once, whatever number of tokens it stands for."
        limit = 1.5 * self.level + 3 * self.error(self.level)
        over = [
            test
            for test in TESTS
            if self.rejects_equal_here[test] > limit
            or any(row.rejects_equal > limit for row in self.rows if row.test == test)
        ]
        if over:
            yield (
                f"{' and '.join(over)}: where equal mean rates are rejected more often than the "
                "level says, this is no test of the mean. Rates over few tokens are skewed, so "
                "that most seeds can be lower though the means are equal."
            )


def _in_points(share: float) -> str:
    """A difference that was searched for, in points."""
    return DASH if math.isnan(share) else f"{100 * share:.1f} points"


POWER_COLUMNS: Final = [
    Column("test", "sign test, Wilcoxon's, or the paired t-test (as the permutation test of the "
           "mean)", lambda row: row.test, "test", key=True),
    Column("difference", "how far the criterion's mean unsafe-keep rate lies below the baseline's",
           lambda row: row.difference, "criterion lower by", lambda row: points(row.difference),
           key=True),
    Column("seeds", "seeds needed, those without a rate among them; NaN where there is no such "
           "number", lambda row: math.nan if row.seeds is None else row.seeds, "seeds needed"),
    Column("power", "simulated power with so many seeds", lambda row: row.power),
    Column("power_error", "its standard error", lambda row: row.table.error(row.power)),
    Column("rejects_equal", "share of dumps of so many seeds in which the test rejects equal mean "
           "rates", lambda row: row.rejects_equal, "rejects equal rates",
           lambda row: number(row.rejects_equal)),
    Column("power_here", "simulated power with the number of seeds of this dump",
           lambda row: row.power_here, "power here", lambda row: number(row.power_here)),
    Column("rejects_equal_here", "the same of equal mean rates: should be the level or less",
           lambda row: row.table.rejects_equal_here[row.test]),
    Column("detectable_here", "smallest difference that this dump's number of seeds sees, or NaN",
           lambda row: row.table.detectable_here[row.test]),
]  # fmt: skip
"""Columns of a power table, one row per test and difference."""

PowerTable.COLUMNS = POWER_COLUMNS


def power_table(
    table: Pair,
    *,
    points: Sequence[float] = POINTS,
    power: float = POWER,
    level: float = LEVEL,
    times: int = TIMES,
) -> PowerTable:
    """Seeds needed to see that a criterion's unsafe-keep rate is lower by so much.

    Parameters
    ----------
    table : Pair
        Counts by seed of a dump.
    points : sequence of float
        Differences in (0, 1], as shares: 0.05 is five points.
    power, level : float
        The power asked for, and the level of the two-sided tests, in (0, 1).
    times : int
        Dumps simulated for one power.

    Returns
    -------
    PowerTable
        Computed as it is asked for: a second or two per point.

    Raises
    ------
    QuestionError
        A number outside its range.
    """
    for name, value in (("power", power), ("level", level)):
        if not LEAST_LEVEL <= value < 1:
            raise QuestionError(f"`{name}` must lie between {LEAST_LEVEL:g} and 1, got {value:g}")
    if not points or not all(LEAST_POINT <= point <= 1 for point in points):
        given = ", ".join(f"{100 * point:g}" for point in points) or "none"
        raise QuestionError(f"`points` must lie between {100 * LEAST_POINT:g} and 100, got {given}")
    if not power > level:
        raise QuestionError(f"`power` must be above `level`, got {power:g} and {level:g}")
    return PowerTable(table, tuple(sorted(set(points))), power, level, times)


def seed_model(
    criterion: tuple[ArrayLike, ArrayLike],
    baseline: tuple[ArrayLike, ArrayLike],
    difference: float,
) -> SeedModel | None:
    """The law of a seed's difference where its mean over paired seeds is `difference`.

    None where fewer than two seeds have both rates, or where the criterion's mean rate r would
    have to leave [0, 1]. With g its goal, (the baseline's) + `difference`, each of its unsafe
    tokens becomes safe with probability 1 − g/r where g ≤ r, else each safe one unsafe with
    (g − r)/(1 − r): the mean is then exact, whatever the counts.

    >>> model = seed_model(([1, 2, 0], [2, 2, 0]), ([2, 2, 1], [4, 4, 1]), difference=-0.1)
    >>> round(model.mean, 12), round(model.empty, 3)
    (-0.1, 0.333)
    """
    (above, below), (other_above, other_below) = (
        tuple(np.asarray(each, dtype=np.float64) for each in side) for side in (criterion, baseline)
    )
    seeds = len(below)
    both = (below > 0) & (other_below > 0)
    if np.count_nonzero(both) < 2:
        return None
    above, below = above[both], below[both]
    theirs = other_above[both] / other_below[both]
    rate, goal = float((above / below).mean()), float(theirs.mean()) + difference
    # A goal that rounding put just outside is one at the end.
    if not -1e-12 <= goal <= 1 + 1e-12:
        return None
    goal = min(max(goal, 0.0), 1.0)
    from scipy.stats import binom

    steps = np.arange(int(below.max()) + 1)
    shares: Floats
    if goal <= rate:
        shares = np.asarray(binom.pmf(steps, above[:, None], goal / rate if rate else 1.0))
    else:
        turn = (goal - rate) / (1 - rate)
        shares = np.asarray(binom.pmf(steps - above[:, None], (below - above)[:, None], turn))
    differences = np.round(steps / below[:, None] - theirs[:, None], _DIGITS)
    possible = shares > 0
    values, where = np.unique(differences[possible], return_inverse=True)
    return SeedModel(
        values=values,
        shares=np.bincount(where, weights=shares[possible]) / seeds,
        empty=1 - len(below) / seeds,
    )


def rejections(
    model: SeedModel, seeds: int, *, level: float = LEVEL, times: int = TIMES, seed: int = 0
) -> dict[str, float]:
    """Share of `times` simulated dumps of so many seeds in which each test rejects.

    The sign test is exact; Wilcoxon's has the normal law with a continuity correction; where all
    seeds differ by the same, the t-test has the p of the permutation test. A test that is
    undefined does not reject.
    """
    from statistics import NormalDist

    from scipy.special import stdtr
    from scipy.stats import binom

    rng = np.random.default_rng(seed)
    values = model.values
    chances = np.append(model.shares, model.empty)
    counts = rng.multinomial(seeds, chances / chances.sum(), size=times)[:, :-1]
    lower, higher = counts[:, values < 0].sum(axis=1), counts[:, values > 0].sum(axis=1)
    differ = lower + higher
    sign = (differ > 0) & (2 * binom.cdf(np.minimum(lower, higher), differ, 0.5) <= level)

    # Differences take few values, so that their ranks are known from how many have each.
    sizes, where = np.unique(np.abs(values), return_inverse=True)
    place = np.zeros((len(values), len(sizes)))
    place[np.arange(len(values)), where] = values != 0
    of_size = counts @ place
    ranks = np.cumsum(of_size, axis=1) - (of_size - 1) / 2
    signed = (counts @ (place * np.sign(values)[:, None]) * ranks).sum(axis=1)
    reach = NormalDist().inv_cdf(1 - level / 2) * np.sqrt((of_size * ranks**2).sum(axis=1))
    wilcoxon = (differ > 0) & (np.abs(signed) >= reach + 1)

    pairs = counts.sum(axis=1)
    mean = counts @ values / np.maximum(pairs, 1)
    squares = np.maximum(counts @ values**2 - pairs * mean**2, 0)
    error = np.sqrt(squares / np.maximum(pairs - 1, 1) / np.maximum(pairs, 1))
    spread = error > 10.0**-_DIGITS
    scores = np.abs(mean) / np.where(spread, error, 1)
    p_values = 2 * stdtr(np.maximum(pairs - 1, 1), -scores)
    alike = np.where(mean == 0, 1.0, 2.0 ** (1.0 - pairs))  # all differ by the same: all flips
    student = (pairs > 1) & (np.where(spread, p_values, alike) <= level)
    shares = (float(rejected.mean()) for rejected in (sign, wilcoxon, student))
    return dict(zip(TESTS, shares, strict=True))


def seeds_needed(power: Callable[[int], float], goal: float, *, start: int) -> int | None:
    """The smallest number of seeds with some power, to 1 %; None beyond a million.

    >>> seeds_needed(lambda seeds: seeds / 100, 0.8, start=5)
    80
    """
    enough = cache(lambda seeds: power(seeds) >= goal)
    low, high = 1, min(max(2, start), MOST_SEEDS)
    if enough(high):
        while high > 2 and enough(max(2, high // 2)):
            high = max(2, high // 2)
        low = high // 2
    else:
        while not enough(high):
            if high >= MOST_SEEDS:
                return None
            low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def detectable_difference(power: Callable[[float], float], goal: float, most: float) -> float:
    """The smallest difference up to `most` with some power, to 0.001; NaN: none.

    >>> detectable_difference(lambda difference: 4 * difference, 0.8, 1.0)
    0.2
    """
    low, high = 0, math.floor(most / FINEST + 1e-9)
    if high < 1 or power(high * FINEST) < goal:
        return math.nan
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power(middle * FINEST) < goal else (low, middle)
    return round(high * FINEST, 6)
