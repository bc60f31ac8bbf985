"""Dumps simulated by drawing the seeds of one dump anew, each once and remembered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from .rates import RateTable
from .statistics.power import (
    TESTS,
    SeedModel,
    detectable_difference,
    rejections,
    seed_model,
    seeds_needed,
)


@dataclass(frozen=True)
class PowerRow:
    """One test and one difference.

    Attributes
    ----------
    test : str
        One of `deltad.analysis.statistics.power.TESTS`.
    difference : float
        How far the criterion's mean rate lies below the baseline's.
    seeds : int or None
        Seeds needed; None where the rate cannot fall so far, or beyond a million.
    power, rejects_equal : float
        Share of simulated dumps of so many seeds in which the test rejects: at that
        difference, and where the mean rates are equal. NaN without `seeds`.
    power_here : float
        The first with this dump's number of seeds; NaN where the rate cannot fall so far.
    """

    test: str
    difference: float
    seeds: int | None
    power: float
    rejects_equal: float
    power_here: float


@dataclass(frozen=True, eq=False)
class SimulatedDumps:
    """What the tests say of simulated dumps of any number of seeds.

    Attributes
    ----------
    table : RateTable
        The counts by seed that are drawn from; its `bootstrap_seed` seeds the random numbers.
    level : float
        Of the two-sided tests.
    times : int
        Dumps simulated for one share.
    """

    table: RateTable
    level: float
    times: int

    def model(self, difference: float) -> SeedModel | None:
        """The law of a seed's difference where the criterion's rate is so much lower."""
        if difference not in self._models:
            ours, theirs = (
                tuple(
                    [getattr(getattr(seed, side), name) for seed in self.table.seeds]
                    for name in ("unsafe", "kept")
                )
                for side in ("criterion", "baseline")
            )
            self._models[difference] = seed_model(
                (ours[0], ours[1]), (theirs[0], theirs[1]), -difference
            )
        return self._models[difference]

    def shares(self, difference: float, seeds: int) -> dict[str, float]:
        """Share of simulated dumps in which each test rejects, by test; NaN without a model."""
        key = (difference, seeds)
        if key not in self._simulated:
            model = self.model(difference)
            self._simulated[key] = (
                dict.fromkeys(TESTS, math.nan)
                if model is None
                else rejections(
                    model,
                    seeds,
                    level=self.level,
                    times=self.times,
                    seed=self.table.bootstrap_seed,
                )
            )
        return self._simulated[key]

    def error(self, share: float) -> float:
        """Standard error of a simulated share."""
        return math.sqrt(share * (1 - share) / self.times)

    def search(self, test: str, point: float, goal: float) -> PowerRow:
        """How many seeds a test needs to see a difference with some power."""
        model = self.model(point)
        if model is None:
            return PowerRow(test, point, None, math.nan, math.nan, math.nan)
        # What it would take if differences were normal; with skew it takes another number.
        start = 8 * (max(model.spread, 0.01) / point) ** 2 / (1 - model.empty)
        needed = seeds_needed(
            lambda seeds: self.shares(point, seeds)[test], goal, start=round(min(start, 1e6))
        )
        power = math.nan if needed is None else self.shares(point, needed)[test]
        equal = math.nan if needed is None else self.shares(0.0, needed)[test]
        return PowerRow(
            test, point, needed, power, equal, self.shares(point, len(self.table.seeds))[test]
        )

    def detectable(self, test: str, seeds: int, goal: float, most: float) -> float:
        """Smallest difference, up to `most`, that a test sees with some power; NaN: none."""
        return detectable_difference(lambda point: self.shares(point, seeds)[test], goal, most)

    @cached_property
    def _models(self) -> dict[float, SeedModel | None]:
        """Laws made so far, by difference."""
        return {}

    @cached_property
    def _simulated(self) -> dict[tuple[float, int], dict[str, float]]:
        """Shares simulated so far, by difference and seeds."""
        return {}
