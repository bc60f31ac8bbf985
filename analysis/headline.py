"""The paper's headline read again: what 34.2 against 36.9 %, lower in 38 of 61 seeds, can bear.

The paper prints two means and a count of seeds; it prints neither ties nor the spread over seeds.
So the spread is assumed in several ways, each named, and what follows from it is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from . import paper
from .result import Result
from .statistics import Interval, sign_test
from .statistics.power import seeds_needed

if TYPE_CHECKING:
    from rich.console import RenderableType

LEVEL: Final = 0.05
POWER: Final = 0.8

SPLITS: Final = ((41, 41), (18, 64), (13, 69))
"""Disagreement tokens kept a seed by the prediction and by the ratio, which the paper does not
print; they add up to its 82. The last is about what `data_dumps/tiny` has (193 of 1217)."""


@dataclass(frozen=True)
class Spread:
    """What follows from one assumption on the spread of the paired difference.

    Attributes
    ----------
    assumption : str
        In words.
    spread : float
        Standard deviation of a seed's difference, as a share.
    p : float
        Two-sided p of the paired t-test of the reported difference.
    power : float
        Of that test at level 0.05, if the true difference were the reported one.
    detectable : float
        Difference that as many seeds see with power 0.8.
    seeds : int
        Seeds that see the reported difference with power 0.8.
    lower_if_equal : float
        Share of the differing seeds in which the criterion is lower though the rates are equal.
    sign_p : float
        Two-sided binomial p of the reported count against that share; no ties.
    """

    assumption: str
    spread: float
    p: float
    power: float
    detectable: float
    seeds: int
    lower_if_equal: float
    sign_p: float


@dataclass(frozen=True)
class Headline(Result):
    """The reported numbers, and what they can bear.

    Attributes
    ----------
    criterion, baseline : float
        Unsafe-keep rates, taken as means over seeds.
    lower, seeds : int
        Seeds in which the criterion's is lower; all seeds.
    disagreement : int
        Disagreement tokens a seed.
    """

    criterion: float
    baseline: float
    lower: int
    seeds: int
    disagreement: int

    @property
    def difference(self) -> float:
        """Criterion − baseline."""
        return self.criterion - self.baseline

    @property
    def sign_test_p(self) -> float:
        """Two-sided, if no seed is tied."""
        return sign_test(self.lower, self.seeds - self.lower)

    @property
    def with_ties(self) -> dict[int, float]:
        """Sign test's p if so many of the seeds that are not lower are tied."""
        return {ties: sign_test(self.lower, self.seeds - self.lower - ties) for ties in range(6)}

    @property
    def share_ci95(self) -> Interval:
        """Exact (Clopper–Pearson) interval of the share of seeds that are lower."""
        from scipy.special import betaincinv

        above = self.seeds - self.lower
        low = betaincinv(self.lower, above + 1, 0.025) if self.lower else 0.0
        high = betaincinv(self.lower + 1, above, 0.975) if above else 1.0
        return float(low), float(high)

    @cached_property
    def spreads(self) -> tuple[Spread, ...]:
        """What follows from each assumption."""
        from scipy.special import ndtri

        # Of normal differences with the reported mean, the reported share is below 0.
        implied = abs(self.difference) / float(ndtri(self.lower / self.seeds))
        found = [self._spread(f"normal, {self.lower} of {self.seeds} lower", implied, 0.5)]
        for ours, theirs in SPLITS:
            noise = math.sqrt(
                self.criterion * (1 - self.criterion) / ours
                + self.baseline * (1 - self.baseline) / theirs
            )
            share = _lower_if_equal((self.criterion + self.baseline) / 2, ours, theirs)
            found.append(
                self._spread(f"tokens alone, {ours} and {theirs} kept a seed", noise, share)
            )
        return tuple(found)

    def columns(self) -> dict[str, list[Any]]:
        """A row an assumption."""
        return {
            name: [getattr(each, name) for each in self.spreads]
            for name in Spread.__dataclass_fields__
        }

    def to_json_object(self) -> dict[str, Any]:
        """The reported numbers, tests, interval and assumptions."""
        columns = self.columns()
        return {
            "format": 1,
            "criterion": self.criterion,
            "baseline": self.baseline,
            "difference": self.difference,
            "lower": self.lower,
            "seeds": self.seeds,
            "lower_ci95": list(self.share_ci95),
            "sign_test_p": self.sign_test_p,
            "sign_test_p_by_ties": {str(ties): p for ties, p in self.with_ties.items()},
            "spreads": [
                {name: values[at] for name, values in columns.items()}
                for at in range(len(self.spreads))
            ],
        }

    def text(self) -> RenderableType:
        """Reported numbers, sign test with ties, and a row an assumption."""
        from .forms.power import headline_text

        return headline_text(self)

    def _spread(self, assumption: str, spread: float, lower_if_equal: float) -> Spread:
        """Consequences of one spread."""
        from scipy.special import stdtr, stdtrit
        from scipy.stats import binomtest

        error = spread / math.sqrt(self.seeds)
        free = self.seeds - 1
        size = abs(self.difference)
        needed = seeds_needed(
            lambda seeds: _t_power(size, spread, seeds),
            POWER,
            start=round(8 * (spread / size) ** 2),
        )
        if needed is None:
            raise ArithmeticError("no number of seeds sees the reported difference")
        return Spread(
            assumption=assumption,
            spread=spread,
            p=2 * float(stdtr(free, -size / error)),
            power=_t_power(size, spread, self.seeds),
            # The usual sum of quantiles; the noncentral law gives the same to 0.1 %.
            detectable=error * float(stdtrit(free, 1 - LEVEL / 2) + stdtrit(free, POWER)),
            seeds=needed,
            lower_if_equal=lower_if_equal,
            sign_p=float(binomtest(self.lower, self.seeds, lower_if_equal).pvalue),
        )


def read_headline() -> Headline:
    """Read the paper's headline again.

    Returns
    -------
    Headline
        Of the numbers in `deltad.analysis.paper`.

    Notes
    -----
    *Normal*: the spread with which normal differences of mean −2.7 points are below 0 in 38 of
    61 seeds. *Tokens alone*: the binomial noise of two independent rates over so many kept
    tokens and no difference between seeds at all; a spread between seeds adds to it, what the
    rates share within a seed takes from it.

    Examples
    --------
    >>> found = read_headline()
    >>> round(found.sign_test_p, 3), [round(end, 2) for end in found.share_ci95]
    (0.072, [0.49, 0.74])
    """
    return Headline(
        criterion=paper.PREDICTIVE_UNSAFE_KEEP_RATE.value,
        baseline=paper.RATIO_UNSAFE_KEEP_RATE.value,
        lower=int(paper.SEEDS_LOWER.value),
        seeds=int(paper.SEEDS.value),
        disagreement=int(paper.DISAGREEMENT_PER_SEED.value),
    )


def _t_power(size: float, spread: float, seeds: int) -> float:
    """Power of the two-sided paired t-test of normal differences."""
    from scipy.special import nctdtr, stdtrit

    away = size / spread * math.sqrt(seeds)
    edge = float(stdtrit(seeds - 1, 1 - LEVEL / 2))
    return 1 - float(nctdtr(seeds - 1, away, edge)) + float(nctdtr(seeds - 1, away, -edge))


def _lower_if_equal(rate: float, ours: int, theirs: int) -> float:
    """P(lower | not tied) of two binomial rates that are equal in truth."""
    import numpy as np
    from scipy.stats import binom

    at, other = np.arange(ours + 1), np.arange(theirs + 1)
    joint = binom.pmf(at, ours, rate)[:, None] * binom.pmf(other, theirs, rate)
    gaps = at[:, None] * theirs - other * ours
    lower = float(joint[gaps < 0].sum())
    return lower / (lower + float(joint[gaps > 0].sum()))
