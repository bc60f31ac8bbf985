"""The difference of two pooled ratios, with seeds as clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .seeds import LEVEL, UNDEFINED, Interval, floats

CLUSTER_METHOD: Final = "jackknife over seeds, Student's t"
"""How the interval of a pooled difference is made."""


@dataclass(frozen=True)
class PooledDifference:
    """Two ratios pooled over seeds, and how far they are apart.

    Attributes
    ----------
    criterion, baseline : float
        Σ numerator / Σ denominator of each; NaN where the denominator is 0.
    difference : float
        criterion − baseline; NaN where one of them is.
    difference_ci95 : tuple of float
        Cluster-robust; NaN where fewer than two seeds have tokens of either side.
    p : float
        Two-sided, of the same law; NaN where the interval is, or has no width.
    clusters : int
        Seeds that have tokens of either side.
    degrees : int
        Degrees of freedom of Student's law.
    """

    criterion: float
    baseline: float
    difference: float
    difference_ci95: Interval
    p: float
    clusters: int
    degrees: int


def pooled_difference(
    criterion: tuple[ArrayLike, ArrayLike], baseline: tuple[ArrayLike, ArrayLike]
) -> PooledDifference:
    """Difference of two ratios pooled over seeds, with a cluster-robust interval.

    Parameters
    ----------
    criterion, baseline : pair of ArrayLike of float, shape (seed,)
        A seed's numerators and denominators, such as unsafe and kept tokens; 0/0 where a seed
        has no token of that side.

    Returns
    -------
    PooledDifference
        See there for what is undefined when.

    Notes
    -----
    θ = Σa/Σn − Σb/Σm. Tokens of a seed share a batch and an update: the variance is that of
    the jackknife over the S seeds that hold tokens of either side,
    (S − 1)/S Σ (θ₍₋ₛ₎ − mean θ₍₋ₛ₎)², and the interval θ ± t √variance, clipped to [−1, 1],
    with t Student's quantile. Its degrees of freedom are one less than the seeds of the side
    that has tokens in fewer of them, since that side's ratio makes most of the variance. The
    jackknife is the cluster-robust variance that errs on the wide side with few, unequal
    clusters (CR3 in the literature); it was chosen over the linearised one by its coverage
    (docs/statistics.md).

    Examples
    --------
    >>> found = pooled_difference(([1, 2, 0], [4, 4, 0]), ([3, 2, 1], [4, 4, 2]))
    >>> round(found.difference, 3), found.clusters, found.degrees
    (-0.225, 3, 1)
    """
    above, below = (floats(each) for each in criterion)
    other_above, other_below = (floats(each) for each in baseline)
    ours, theirs = _ratio(above, below), _ratio(other_above, other_below)
    clusters = int(np.count_nonzero((below > 0) | (other_below > 0)))
    fewest = min(int(np.count_nonzero(each > 0)) for each in (below, other_below))
    degrees = max(0, fewest - 1)
    difference = ours - theirs
    if not degrees:
        return PooledDifference(ours, theirs, difference, UNDEFINED, math.nan, clusters, degrees)
    held = (below > 0) | (other_below > 0)
    without = (_without(above, below) - _without(other_above, other_below))[held]
    gaps = without - without.mean()
    error = math.sqrt((clusters - 1) / clusters * float(np.square(gaps).sum()))
    if error < 1e-12:  # all seeds say the same, to the last bit
        error = 0.0
    from scipy.special import stdtr, stdtrit

    reach = float(stdtrit(degrees, (1 + LEVEL) / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(difference) / error)) if error else math.nan
    ends = (max(-1.0, difference - reach), min(1.0, difference + reach))
    return PooledDifference(ours, theirs, difference, ends, p, clusters, degrees)


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """The pooled ratio, or NaN over nothing."""
    total = float(below.sum())
    return float(above.sum()) / total if total else math.nan


def _without(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """The pooled ratio without each seed in turn; at least two have a denominator."""
    left: NDArray[np.float64] = (above.sum() - above) / (below.sum() - below)
    return left
