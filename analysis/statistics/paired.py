"""Two rates compared seed by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .intervals import bootstrap_mean
from .seeds import Interval, floats, mean


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
    ours, theirs = floats(criterion), floats(baseline)
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
    numbers = np.round(floats(differences), 12)
    numbers = numbers[numbers != 0]
    if not len(numbers):
        return float("nan")
    from scipy.stats import wilcoxon

    return float(wilcoxon(numbers).pvalue)
