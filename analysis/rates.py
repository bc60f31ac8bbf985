"""Unsafe-keep rates and contracting fractions, seed by seed and over seeds.

Of the tokens outside the region that exactly one of two criteria masks (the disagreement
set), each criterion keeps some. Kept tokens whose divergence the update raised were unsafe to
keep; those whose divergence it lowered contracted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from . import statistics
from .counting import ArmCounts, Judged, Tally
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
    unclear : ndarray of bool, shape (token,), optional
        Where |ΔD| is below the bound on its error; nowhere by default.
    weight : ndarray of float64, shape (token,), optional
        Tokens that each stands for, where they stand for unlike numbers.
    """

    delta_d: NDArray[np.float64]
    unclear: NDArray[np.bool_] | None = None
    weight: NDArray[np.float64] | None = None

    @property
    def kept(self) -> int:
        """How many there are."""
        return len(self.delta_d)

    @property
    def determined(self) -> int:
        """How many have a ΔD with a sign: what the rates are shares of."""
        return self.kept - self.undetermined

    @cached_property
    def undetermined(self) -> int:
        """How many have a ΔD below the bound on its error: neither unsafe nor contracting."""
        return 0 if self.unclear is None else int(np.count_nonzero(self.unclear))

    @cached_property
    def unsafe(self) -> int:
        """How many have ΔD > 0."""
        return int(np.count_nonzero(self._is_unsafe))

    @cached_property
    def contracting(self) -> int:
        """How many have ΔD < 0."""
        return int(np.count_nonzero(self._is_contracting))

    @cached_property
    def sums(self) -> dict[str, float]:
        """The same counts, each token with its weight, and `determined`: kept − undetermined."""
        if self.weight is None:
            return {
                "determined": self.determined,
                "unsafe": self.unsafe,
                "contracting": self.contracting,
            }
        return {
            "determined": float(self.weight[self._is_determined].sum()),
            "unsafe": float(self.weight[self._is_unsafe].sum()),
            "contracting": float(self.weight[self._is_contracting].sum()),
        }

    @property
    def unsafe_keep_rate(self) -> float:
        """Share of the determined with ΔD > 0, in [0, 1]; NaN where there is none."""
        return ratio(self.sums["unsafe"], self.sums["determined"])

    @property
    def contracting_fraction(self) -> float:
        """Share of the determined with ΔD < 0, in [0, 1]; NaN where there is none."""
        return ratio(self.sums["contracting"], self.sums["determined"])

    @property
    def _is_determined(self) -> NDArray[np.bool_]:
        if self.unclear is None:
            return np.ones(self.kept, dtype=np.bool_)
        return ~self.unclear

    @property
    def _is_unsafe(self) -> NDArray[np.bool_]:
        return self._is_determined & (self.delta_d > 0)

    @property
    def _is_contracting(self) -> NDArray[np.bool_]:
        return self._is_determined & (self.delta_d < 0)


@dataclass(frozen=True, eq=False)
class SeedRates:
    """One seed's counts.

    Attributes
    ----------
    seed : int
        Independent repetition.
    tokens, outside, disagreement : int
        Under `own` counted in the criterion's arm.
    outside_increase, disagreement_increase : int or None
        Of the tokens outside, and of those in disagreement, how many have ΔD > 0; None where
        not all of them were stored.
    without_vectors : int
        Rows whose D is unknown because their top-K vectors were not stored.
    baseline, criterion : Kept
        What each of the two keeps of the disagreement set.
    tallies : tuple of Tally
        The tokens outside and those in disagreement in more detail; made of the counts above
        where it is not given.
    """

    seed: int
    tokens: int
    outside: int
    outside_increase: int | None
    disagreement: int
    disagreement_increase: int
    without_vectors: int
    baseline: Kept
    criterion: Kept
    tallies: tuple[Tally, Tally] | None = None

    @classmethod
    def of(
        cls,
        seed: int,
        criterion_arm: ArmCounts,
        baseline_arm: ArmCounts,
        *,
        weighted: bool = False,
    ) -> SeedRates:
        """Put the two arms' counts together; both are the same one when shared.

        With `weighted` each token counts in rates as many times as it stands for.
        """
        ours, theirs = criterion_arm.disagreement, baseline_arm.disagreement
        disagreement = Tally.of(ours)
        return cls(
            seed=seed,
            tokens=criterion_arm.tokens,
            outside=criterion_arm.outside.tokens,
            outside_increase=criterion_arm.outside.increase,
            disagreement=disagreement.tokens,
            disagreement_increase=disagreement.increase or 0,
            without_vectors=criterion_arm.without_vectors,
            baseline=_kept(theirs[~theirs.keep[0]], weighted),
            criterion=_kept(ours[ours.keep[0]], weighted),
            tallies=(
                _unweighted(criterion_arm.outside, weighted),
                _unweighted(disagreement, weighted),
            ),
        )

    @property
    def outside_tally(self) -> Tally:
        """All tokens outside."""
        if self.tallies is not None:
            return self.tallies[0]
        return _unweighted(Tally(self.outside, self.outside_increase), weighted=False)

    @property
    def disagreement_tally(self) -> Tally:
        """All disagreement tokens."""
        if self.tallies is not None:
            return self.tallies[1]
        return _unweighted(Tally(self.disagreement, self.disagreement_increase), weighted=False)


def _kept(judged: Judged, weighted: bool) -> Kept:
    """The tokens that a criterion keeps."""
    return Kept(judged.delta_d, judged.undetermined, judged.weight if weighted else None)


def _unweighted(tally: Tally, weighted: bool) -> Tally:
    """A tally whose weights are its counts, unless tokens are to be weighted."""
    if weighted:
        return tally
    return replace(tally, weights=(tally.tokens - tally.undetermined, tally.increase or 0))


@dataclass(frozen=True)
class SideSummary:
    """One criterion over all seeds.

    Attributes
    ----------
    seeds : int
        Seeds in which it keeps a disagreement token whose ΔD is determined, and so has a rate.
    kept, unsafe, contracting, undetermined : int
        Summed over seeds.
    unsafe_keep_rate : float
        Mean over those seeds of unsafe / (kept − undetermined); NaN without any.
    unsafe_keep_rate_ci95 : tuple of float
        Bootstrap over those seeds; NaN with fewer than two.
    contracting_fraction : float
        Σ contracting / Σ (kept − undetermined), pooled over seeds; NaN over nothing.
    contracting_fraction_ci95 : tuple of float
        Bootstrap over all seeds, numerator and denominator drawn together.
    """

    seeds: int
    kept: int
    unsafe: int
    contracting: int
    undetermined: int
    unsafe_keep_rate: float
    unsafe_keep_rate_ci95: Interval
    contracting_fraction: float
    contracting_fraction_ci95: Interval

    @property
    def determined(self) -> int:
        """Kept tokens whose ΔD has a sign: what the rates are shares of."""
        return self.kept - self.undetermined


@dataclass(frozen=True)
class BaseRate:
    """How often ΔD > 0 among some tokens, whatever a criterion says.

    Attributes
    ----------
    tokens : int
        All of them.
    increase : int or None
        Those with ΔD > 0; None where not all of them were stored.
    undetermined : int
        Those whose ΔD is below the bound on its error.
    weights : tuple of float, optional
        Σ weight of the determined tokens, and of those of them with ΔD > 0, where tokens stand
        for unlike numbers.
    """

    tokens: int
    increase: int | None
    undetermined: int = 0
    weights: tuple[float, float] | None = None

    @property
    def determined(self) -> int:
        """Tokens whose ΔD has a sign."""
        return self.tokens - self.undetermined

    @property
    def increase_rate(self) -> float:
        """P(ΔD > 0) of the determined, in [0, 1]; NaN over no tokens or where not known."""
        if self.increase is None:
            return math.nan
        if self.weights is not None:
            return ratio(self.weights[1], self.weights[0])
        return ratio(self.increase, self.determined)

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
    share : float
        Of the sequences, drawn at random, that were recorded and are counted.
    """

    question: Question
    seeds: tuple[SeedRates, ...]
    bootstrap_seed: int = 0
    share: float = 1.0

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
        """Unsafe / determined pooled over seeds, criterion − baseline, seeds as clusters."""
        return self._pooled("unsafe")

    @cached_property
    def pooled_contracting(self) -> PooledDifference:
        """Contracting / determined pooled over seeds, criterion − baseline, as clusters."""
        return self._pooled("contracting")

    @property
    def outside(self) -> BaseRate:
        """All tokens outside the region."""
        return self._base("outside_tally")

    @property
    def disagreement(self) -> BaseRate:
        """All disagreement tokens."""
        return self._base("disagreement_tally")

    @property
    def without_vectors(self) -> int:
        """Rows whose D is unknown because their top-K vectors were not stored."""
        return self._sum("without_vectors")

    @property
    def bounded(self) -> int:
        """Disagreement tokens of which a bound on the error of ΔD was recorded."""
        return sum(seed.disagreement_tally.bounded for seed in self.seeds)

    @property
    def weighted(self) -> bool:
        """Whether tokens stand for unlike numbers of tokens, so that rates weigh them."""
        return any(seed.criterion.weight is not None for seed in self.seeds)

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
        """Share of determined disagreement tokens whose ΔD one criterion foretold, shape ().

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
        right = keeps.kept - keeps.undetermined - keeps.unsafe + masks.unsafe
        return ratio(right, sum(each.kept - each.undetermined for each in (keeps, masks)))

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
        each = [getattr(seed, side) for seed in self.seeds]
        determined = np.array([kept.sums["determined"] for kept in each])
        contracting = np.array([kept.sums["contracting"] for kept in each])
        rates = self.rates(side)
        return SideSummary(
            seeds=int(np.count_nonzero(determined)),
            kept=sum(kept.kept for kept in each),
            unsafe=sum(kept.unsafe for kept in each),
            contracting=sum(kept.contracting for kept in each),
            undetermined=sum(kept.undetermined for kept in each),
            unsafe_keep_rate=statistics.mean(rates),
            unsafe_keep_rate_ci95=statistics.bootstrap_mean(rates, seed=self.bootstrap_seed),
            contracting_fraction=ratio(float(contracting.sum()), float(determined.sum())),
            contracting_fraction_ci95=statistics.bootstrap_ratio(
                contracting, determined, seed=self.bootstrap_seed
            ),
        )

    def _pooled(self, name: str) -> PooledDifference:
        """Difference of the shares of determined tokens that a count makes, pooled over seeds."""
        ours, theirs = (
            tuple(
                np.array([getattr(seed, side).sums[each] for seed in self.seeds])
                for each in (name, "determined")
            )
            for side in ("criterion", "baseline")
        )
        return statistics.pooled_difference((ours[0], ours[1]), (theirs[0], theirs[1]))

    def _base(self, name: str) -> BaseRate:
        """Base rate of all seeds."""
        whole = sum((getattr(seed, name) for seed in self.seeds), Tally(0, 0))
        weights = whole.weights if self.weighted else None
        return BaseRate(whole.tokens, whole.increase, whole.undetermined, weights)

    def _sum(self, name: str) -> int:
        """Sum of a count over seeds."""
        return sum(getattr(seed, name) for seed in self.seeds)
