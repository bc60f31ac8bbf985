"""What seeds say together: paired tests and bootstrap intervals over seeds.

The seed is the unit of repetition: tokens of one seed share a batch and an update and are
not independent. An undefined statistic is NaN, never an exception or a warning.
`scipy.stats` is imported by the tests alone, when there is something to test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES: Final = 10_000
"""Bootstrap resamples; the interval's ends then move by under 2 % of its width."""

METHOD: Final = "percentile"
"""Kind of bootstrap interval; its ends are always attainable shares."""

LEVEL: Final = 0.95

_BLOCK: Final = 1 << 21
"""Drawn seed indices held at once (16 MB)."""

Interval = tuple[float, float]
UNDEFINED: Final[Interval] = (float("nan"), float("nan"))


@dataclass(frozen=True)
class Paired:
    """Two rates compared seed by seed, over the seeds in which both exist.

    Attributes
    ----------
    seeds : int
        Seeds in which both rates exist.
    lower, tied, higher : int
        Seeds in which the criterion's rate is below, equal to, above the baseline's.
    difference : float
        Mean over the paired seeds of criterion − baseline; NaN without paired seeds.
    difference_ci95 : tuple of float
        Bootstrap over the paired seeds; NaN with fewer than two.
    sign_test_p, wilcoxon_p : float
        Two-sided; NaN where no paired seed differs.
    """

    seeds: int
    lower: int
    tied: int
    higher: int
    difference: float
    difference_ci95: Interval
    sign_test_p: float
    wilcoxon_p: float


def compare_paired(criterion: ArrayLike, baseline: ArrayLike, *, bootstrap_seed: int = 0) -> Paired:
    """Compare two rates seed by seed.

    Parameters
    ----------
    criterion, baseline : ArrayLike of float, shape (seed,)
        Rates in [0, 1]; NaN where a seed has none.
    bootstrap_seed : int
        Seed of the bootstrap's random numbers.

    Returns
    -------
    Paired
        All counts 0 and all numbers NaN where no seed has both rates.

    Examples
    --------
    >>> pair = compare_paired([0.2, 0.5, float("nan")], [0.4, 0.5, 0.1])
    >>> pair.seeds, pair.lower, pair.tied, pair.higher, round(pair.difference, 12)
    (2, 1, 1, 0, -0.1)
    """
    ours, theirs = _floats(criterion), _floats(baseline)
    both = ~(np.isnan(ours) | np.isnan(theirs))
    ours, theirs = ours[both], theirs[both]
    differences = ours - theirs
    lower = int(np.count_nonzero(ours < theirs))
    higher = int(np.count_nonzero(ours > theirs))
    return Paired(
        seeds=len(differences),
        lower=lower,
        tied=len(differences) - lower - higher,
        higher=higher,
        difference=mean(differences),
        difference_ci95=bootstrap_mean(differences, seed=bootstrap_seed),
        sign_test_p=sign_test(lower, higher),
        wilcoxon_p=wilcoxon_test(differences),
    )


def mean(values: ArrayLike) -> float:
    """Mean of the values that are not NaN.

    Parameters
    ----------
    values : ArrayLike of float, shape (seed,)
        One number a seed; NaN where it is undefined.

    Returns
    -------
    float
        NaN over no values.

    Examples
    --------
    >>> mean([1.0, float("nan"), 2.0])
    1.5
    """
    numbers = _floats(values)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else float("nan")


def sign_test(lower: int, higher: int) -> float:
    """Two-sided sign test that lower and higher are equally likely; ties are left out.

    Parameters
    ----------
    lower, higher : int
        Seeds on either side.

    Returns
    -------
    float
        p in (0, 1]; NaN where no seed differs.

    Notes
    -----
    The exact binomial test (`scipy.stats.binomtest`). The paper's 38 of 61 seeds, if none
    was tied:

    >>> round(sign_test(38, 23), 3)
    0.072
    """
    if lower + higher == 0:
        return float("nan")
    from scipy.stats import binomtest

    return float(binomtest(lower, lower + higher, 0.5).pvalue)


def wilcoxon_test(differences: ArrayLike) -> float:
    """Two-sided Wilcoxon signed-rank test of paired differences; zeros are left out.

    Parameters
    ----------
    differences : ArrayLike of float, shape (seed,)
        Criterion − baseline of the seeds in which both exist.

    Returns
    -------
    float
        p in (0, 1]; NaN where all differences are 0 or there are none.

    Notes
    -----
    `scipy.stats.wilcoxon`: exact up to 50 differences, with a normal approximation beyond or
    where absolute differences are tied (by permutation up to 13 of those).

    Examples
    --------
    >>> wilcoxon_test([0.1, 0.2, 0.3])
    0.25
    """
    # Rates are ratios of small counts: differences that are equal as fractions must tie, and
    # not be ranked by their last bit.
    numbers = np.round(_floats(differences), 12)
    numbers = numbers[numbers != 0]
    if not len(numbers):
        return float("nan")
    from scipy.stats import wilcoxon

    return float(wilcoxon(numbers).pvalue)


def bootstrap_mean(values: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """95 % percentile interval of a mean over seeds.

    Parameters
    ----------
    values : ArrayLike of float, shape (seed,)
        One number a seed; NaN takes no part.
    seed : int
        Seed of the random numbers.
    resamples : int
        How often the seeds are drawn anew.

    Returns
    -------
    tuple of float
        Lower and upper end; NaN both with fewer than two values, of no width where all are
        equal.

    Examples
    --------
    >>> bootstrap_mean([0.5, 0.5, 0.5]), bootstrap_mean([0.5])
    ((0.5, 0.5), (nan, nan))
    """
    numbers = _floats(values)
    numbers = numbers[~np.isnan(numbers)]
    return bootstrap_ratio(numbers, np.ones_like(numbers), seed=seed, resamples=resamples)


def bootstrap_ratio(
    numerator: ArrayLike, denominator: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """95 % percentile interval of a pooled ratio Σ numerator / Σ denominator over seeds.

    Seeds are drawn with their numerator and denominator together, so a seed weighs what it
    weighs in the ratio.

    Parameters
    ----------
    numerator, denominator : ArrayLike of float, shape (seed,)
        A seed's two counts; a seed of 0/0 takes part (as one that may be drawn).
    seed : int
        Seed of the random numbers.
    resamples : int
        How often the seeds are drawn anew.

    Returns
    -------
    tuple of float
        Lower and upper end; NaN both where fewer than two seeds have a denominator. A
        resample of empty seeds alone has no ratio and is left out.

    Examples
    --------
    >>> bootstrap_ratio([1, 2], [2, 4])
    (0.5, 0.5)
    """
    above, below = _floats(numerator), _floats(denominator)
    if np.count_nonzero(below) < 2:
        return UNDEFINED
    rng = np.random.default_rng(seed)
    count = len(above)
    step = max(1, _BLOCK // count)
    pooled: list[NDArray[np.float64]] = []
    for start in range(0, resamples, step):
        drawn = rng.integers(0, count, size=(min(step, resamples - start), count))
        total = below[drawn].sum(axis=1)
        some = total > 0
        pooled.append(above[drawn].sum(axis=1)[some] / total[some])
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(np.concatenate(pooled), [tail, 100 - tail])
    return float(low), float(high)


def _floats(values: ArrayLike) -> NDArray[np.float64]:
    """Values as a float64 vector."""
    return np.asarray(values, dtype=np.float64).reshape(-1)
