"""Unsafe-keep rates and contracting fractions, seed by seed and over seeds.

Of the tokens outside the region that exactly one of two criteria masks (the disagreement
set), each criterion keeps some. Kept tokens whose divergence the update raised were unsafe to
keep; those whose divergence it lowered contracted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from . import statistics
from .counting import ArmCounts
from .question import OWN, Question
from .result import Result
from .statistics import Interval, Paired, PooledDifference

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

SIDES: Final = ("baseline", "criterion")


def ratio(numerator: float, denominator: float) -> float:
    """A share, or NaN over nothing."""
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True, eq=False)
class Kept:
    """The disagreement tokens that one criterion keeps.

    Attributes
    ----------
    delta_d : ndarray of float64, shape (token,)
        Their ΔD = D after − D before the update: nats for KL, a probability for TV.
    """

    delta_d: NDArray[np.float64]

    @property
    def kept(self) -> int:
        """How many there are."""
        return len(self.delta_d)

    @cached_property
    def unsafe(self) -> int:
        """How many have ΔD > 0."""
        return int(np.count_nonzero(self.delta_d > 0))

    @cached_property
    def contracting(self) -> int:
        """How many have ΔD < 0."""
        return int(np.count_nonzero(self.delta_d < 0))

    @property
    def unsafe_keep_rate(self) -> float:
        """Share with ΔD > 0, in [0, 1]; NaN where nothing is kept."""
        return ratio(self.unsafe, self.kept)


@dataclass(frozen=True, eq=False)
class SeedRates:
    """One seed's counts.

    Attributes
    ----------
    seed : int
        Independent repetition.
    tokens, outside, disagreement : int
        Under `own` counted in the criterion's arm.
    outside_increase, disagreement_increase : int
        Of the tokens outside, and of those in disagreement, how many have ΔD > 0.
    without_vectors : int
        Rows whose D is unknown because their top-K vectors were not stored.
    baseline, criterion : Kept
        What each of the two keeps of the disagreement set.
    """

    seed: int
    tokens: int
    outside: int
    outside_increase: int
    disagreement: int
    disagreement_increase: int
    without_vectors: int
    baseline: Kept
    criterion: Kept

    @classmethod
    def of(cls, seed: int, criterion_arm: ArmCounts, baseline_arm: ArmCounts) -> SeedRates:
        """Put the two arms' counts together; both are the same one when shared."""
        deltas = criterion_arm.disagreement_deltas
        return cls(
            seed=seed,
            tokens=criterion_arm.tokens,
            outside=criterion_arm.outside,
            outside_increase=criterion_arm.outside_increase,
            disagreement=len(deltas),
            disagreement_increase=int(np.count_nonzero(deltas > 0)),
            without_vectors=criterion_arm.without_vectors,
            baseline=Kept(baseline_arm.disagreement_deltas[~baseline_arm.kept_by_criterion]),
            criterion=Kept(deltas[criterion_arm.kept_by_criterion]),
        )


@dataclass(frozen=True)
class SideSummary:
    """One criterion over all seeds.

    Attributes
    ----------
    seeds : int
        Seeds in which it keeps a disagreement token, and so has a rate.
    kept, unsafe, contracting : int
        Summed over seeds.
    unsafe_keep_rate : float
        Mean over those seeds of unsafe / kept; NaN without any.
    unsafe_keep_rate_ci95 : tuple of float
        Bootstrap over those seeds; NaN with fewer than two.
    contracting_fraction : float
        Σ contracting / Σ kept, pooled over seeds; NaN where nothing is kept.
    contracting_fraction_ci95 : tuple of float
        Bootstrap over all seeds, numerator and denominator drawn together.
    """

    seeds: int
    kept: int
    unsafe: int
    contracting: int
    unsafe_keep_rate: float
    unsafe_keep_rate_ci95: Interval
    contracting_fraction: float
    contracting_fraction_ci95: Interval


@dataclass(frozen=True)
class BaseRate:
    """How often ΔD > 0 among some tokens, whatever a criterion says.

    Attributes
    ----------
    tokens, increase : int
        Tokens, and those of them with ΔD > 0.
    """

    tokens: int
    increase: int

    @property
    def increase_rate(self) -> float:
        """P(ΔD > 0), in [0, 1]; NaN over no tokens."""
        return ratio(self.increase, self.tokens)

    @property
    def constant_guess(self) -> float:
        """Share on which the better constant guess is right, in [0.5, 1]; NaN over no tokens."""
        rate = self.increase_rate
        return math.nan if math.isnan(rate) else max(rate, 1 - rate)


@dataclass(frozen=True, eq=False)
class RateTable(Result):
    """Two criteria compared on one dump.

    Attributes
    ----------
    question : Question
        What was asked, its protocol settled.
    seeds : tuple of SeedRates
        In ascending order of seed.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    """

    question: Question
    seeds: tuple[SeedRates, ...]
    bootstrap_seed: int = 0

    @cached_property
    def baseline(self) -> SideSummary:
        """The baseline over all seeds."""
        return self._side("baseline")

    @cached_property
    def criterion(self) -> SideSummary:
        """The criterion over all seeds."""
        return self._side("criterion")

    @cached_property
    def paired(self) -> Paired:
        """Both criteria compared within seeds."""
        return statistics.compare_paired(
            self.rates("criterion"), self.rates("baseline"), bootstrap_seed=self.bootstrap_seed
        )

    @cached_property
    def pooled_unsafe(self) -> PooledDifference:
        """Unsafe / kept pooled over seeds, criterion − baseline, seeds as clusters."""
        return self._pooled("unsafe")

    @cached_property
    def pooled_contracting(self) -> PooledDifference:
        """Contracting / kept pooled over seeds, criterion − baseline, seeds as clusters."""
        return self._pooled("contracting")

    @property
    def outside(self) -> BaseRate:
        """All tokens outside the region."""
        return BaseRate(self._sum("outside"), self._sum("outside_increase"))

    @property
    def disagreement(self) -> BaseRate:
        """All disagreement tokens."""
        return BaseRate(self._sum("disagreement"), self._sum("disagreement_increase"))

    @property
    def without_vectors(self) -> int:
        """Rows whose D is unknown because their top-K vectors were not stored."""
        return self._sum("without_vectors")

    def rates(self, side: str) -> NDArray[np.float64]:
        """Unsafe-keep rate of one side by seed, shape (seed,); NaN where it keeps nothing."""
        return np.array([getattr(seed, side).unsafe_keep_rate for seed in self.seeds])

    def delta_d(self, side: str) -> NDArray[np.float64]:
        """ΔD of every disagreement token that one side keeps, all seeds, shape (token,)."""
        return np.concatenate([np.empty(0), *(getattr(seed, side).delta_d for seed in self.seeds)])

    def per_seed(self, name: str) -> float:
        """Mean of a count over seeds; NaN without seeds."""
        return ratio(self._sum(name), len(self.seeds))

    def sign_accuracy(self, side: str) -> float:
        """Share of disagreement tokens whose ΔD one criterion foretold, shape ().

        Parameters
        ----------
        side : {"baseline", "criterion"}
            Keeping a token foretells ΔD ≤ 0, masking it ΔD > 0.

        Returns
        -------
        float
            In [0, 1]; the two criteria's add up to 1. NaN without disagreement, and under
            `own`, where a masked token has no update of its own to be judged by.
        """
        if self.question.protocol == OWN:
            return math.nan
        keeps, masks = (self.criterion, self.baseline)
        if side == "baseline":
            keeps, masks = masks, keeps
        return ratio(keeps.kept - keeps.unsafe + masks.unsafe, keeps.kept + masks.kept)

    def to_json_object(self) -> dict[str, Any]:
        """The object that `deltad table --format json` prints; NaN is None."""
        from .export import rate_object

        return rate_object(self)

    def columns(self) -> dict[str, list[Any]]:
        """A row a seed, the columns of `analysis.export.RATE_COLUMNS`."""
        from .export import rate_columns

        return rate_columns(self)

    def text(self) -> RenderableType:
        """Both criteria, the paired comparison, base rates; see `rate_text`."""
        from .text import rate_text

        return rate_text(self)

    def figure(self) -> Figure:
        """The paper's Figure 4; see `figure4`."""
        from .figures import figure4

        return figure4(self)

    def _side(self, side: str) -> SideSummary:
        """Summary of one criterion."""
        kept = np.array([getattr(seed, side).kept for seed in self.seeds])
        contracting = np.array([getattr(seed, side).contracting for seed in self.seeds])
        rates = self.rates(side)
        return SideSummary(
            seeds=int(np.count_nonzero(kept)),
            kept=int(kept.sum()),
            unsafe=sum(getattr(seed, side).unsafe for seed in self.seeds),
            contracting=int(contracting.sum()),
            unsafe_keep_rate=statistics.mean(rates),
            unsafe_keep_rate_ci95=statistics.bootstrap_mean(rates, seed=self.bootstrap_seed),
            contracting_fraction=ratio(int(contracting.sum()), int(kept.sum())),
            contracting_fraction_ci95=statistics.bootstrap_ratio(
                contracting, kept, seed=self.bootstrap_seed
            ),
        )

    def _pooled(self, name: str) -> PooledDifference:
        """Difference of the shares of kept tokens that a count makes, pooled over seeds."""
        ours, theirs = (
            tuple(
                np.array([getattr(getattr(seed, side), each) for seed in self.seeds])
                for each in (name, "kept")
            )
            for side in ("criterion", "baseline")
        )
        return statistics.pooled_difference((ours[0], ours[1]), (theirs[0], theirs[1]))

    def _sum(self, name: str) -> int:
        """Sum of a count over seeds."""
        return sum(getattr(seed, name) for seed in self.seeds)
