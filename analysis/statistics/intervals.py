"""Bootstrap intervals over seeds, of means and of pooled ratios.

Seeds are drawn anew with all that they hold, so a seed's tokens stay together. Of the four
kinds, `METHOD` is the one that tables print: `docs/statistics.md` has the measured coverage
of each, by which it was chosen.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .seeds import LEVEL, UNDEFINED, Interval, floats

if TYPE_CHECKING:
    from statistics import NormalDist

RESAMPLES: Final = 10_000
"""Bootstrap resamples; the interval's ends then move by under 2 % of its width."""

METHODS: Final = ("percentile", "bca", "bca-expanded", "studentised")
"""Kinds of bootstrap interval."""

METHOD: Final = "bca-expanded"
"""The kind that is printed: ends that are attainable shares, and the best coverage with few
seeds."""

_BLOCK: Final = 1 << 21
"""Drawn seed indices held at once (16 MB)."""

_ROUNDING: Final = 1e-12
"""Shares closer than this are equal: they are ratios of small counts."""


def bootstrap_mean(
    values: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES, method: str = METHOD
) -> Interval:
    """95 % bootstrap interval of a mean over seeds.

    Parameters
    ----------
    values : ArrayLike of float, shape (seed,)
        One number a seed; NaN takes no part. Their order does not matter.
    seed : int
        Seed of the random numbers.
    resamples : int
        How often the seeds are drawn anew.
    method : {"percentile", "bca", "bca-expanded", "studentised"}
        See `bootstrap_ratio`.

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
    numbers = floats(values)
    numbers = numbers[~np.isnan(numbers)]
    return bootstrap_ratio(
        numbers, np.ones_like(numbers), seed=seed, resamples=resamples, method=method
    )


def bootstrap_ratio(
    numerator: ArrayLike,
    denominator: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    method: str = METHOD,
) -> Interval:
    """95 % bootstrap interval of a pooled ratio Σ numerator / Σ denominator over seeds.

    Seeds are drawn with their numerator and denominator together, so a seed weighs what it
    weighs in the ratio.

    Parameters
    ----------
    numerator, denominator : ArrayLike of float, shape (seed,)
        A seed's two counts; a seed of 0/0 takes part (as one that may be drawn). The order of
        the seeds does not matter.
    seed : int
        Seed of the random numbers.
    resamples : int
        How often the seeds are drawn anew.
    method : {"percentile", "bca", "bca-expanded", "studentised"}
        Kind of interval; see Notes.

    Returns
    -------
    tuple of float
        Lower and upper end; NaN both where fewer than two seeds have a denominator; of no
        width where all seeds that have one share the same ratio. A resample of empty seeds
        alone has no ratio and is left out.

    Raises
    ------
    ValueError
        An unknown method.

    Notes
    -----
    With θ the ratio, θ* those of the resamples, F their distribution, z = ±1.96:

    - `percentile`: F⁻¹(Φ(z)).
    - `bca` (Efron 1987): F⁻¹(Φ(b + (b + z) / (1 − a (b + z)))) with the bias b = Φ⁻¹(F(θ)),
      ties counted by half, and the acceleration a = Σd³ / 6(Σd²)^1.5 of the jackknife's
      deviations d.
    - `bca-expanded`: `bca` with z = ±√(k/(k − 1)) t, t Student's quantile with k − 1 degrees
      of freedom and k the seeds that have a denominator: what the other two leave out, that
      few seeds understate their own spread (Hesterberg 2015, section 4.3).
    - `studentised`: θ − q s, q the quantiles of (θ* − θ)/s*, s the linearised standard error.
      Its ends may leave [0, 1]; resamples without spread are left out of it.

    Examples
    --------
    >>> bootstrap_ratio([1, 2], [2, 4])
    (0.5, 0.5)
    """
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}")
    above, below = floats(numerator), floats(denominator)
    order = np.lexsort((above, below))
    above, below = above[order], below[order]
    having = int(np.count_nonzero(below))
    if having < 2:
        return UNDEFINED
    ratio = float(above.sum() / below.sum())
    if np.all(np.abs(above - ratio * below) <= _ROUNDING * below.max()):
        return ratio, ratio
    drawn, errors = _resampled(above, below, seed, resamples, errors=method == "studentised")
    if method == "studentised":
        return _studentised(ratio, float(_error(above, below, np.array(ratio))), drawn, errors)
    reach = _normal().inv_cdf((1 + LEVEL) / 2)
    if method == "bca-expanded":
        from scipy.special import stdtrit

        reach = math.sqrt(having / (having - 1)) * float(stdtrit(having - 1, (1 + LEVEL) / 2))
    bias, acceleration = 0.0, 0.0
    if method != "percentile":
        bias, acceleration = _bias(ratio, drawn), _acceleration(above, below)
    shares = [_corrected(z, bias, acceleration) for z in (-reach, reach)]
    low, high = np.quantile(drawn, shares)
    return float(low), float(high)


def _resampled(
    above: NDArray[np.float64],
    below: NDArray[np.float64],
    seed: int,
    resamples: int,
    *,
    errors: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ratios of resamples, and their standard errors where asked for."""
    rng = np.random.default_rng(seed)
    count = len(above)
    step = max(1, _BLOCK // count)
    ratios: list[NDArray[np.float64]] = []
    spreads: list[NDArray[np.float64]] = [np.empty(0)]
    for start in range(0, resamples, step):
        drawn = rng.integers(0, count, size=(min(step, resamples - start), count))
        total = below[drawn].sum(axis=1)
        drawn, total = drawn[total > 0], total[total > 0]
        ratios.append(above[drawn].sum(axis=1) / total)
        if errors:
            spreads.append(_error(above[drawn], below[drawn], ratios[-1]))
    return np.concatenate(ratios), np.concatenate(spreads)


def _error(
    above: NDArray[np.float64], below: NDArray[np.float64], ratio: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Linearised standard error of ratios, seeds along the last axis."""
    count = above.shape[-1]
    squares = np.square(above - ratio[..., None] * below).sum(axis=-1)
    error: NDArray[np.float64] = np.sqrt(count / (count - 1) * squares) / below.sum(axis=-1)
    return error


def _studentised(
    ratio: float, error: float, drawn: NDArray[np.float64], errors: NDArray[np.float64]
) -> Interval:
    """Interval from the distribution of the studentised ratio."""
    spread = errors > _ROUNDING
    if not spread.any():
        return UNDEFINED
    scores = (drawn[spread] - ratio) / errors[spread]
    low, high = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return ratio - float(high) * error, ratio - float(low) * error


def _bias(ratio: float, drawn: NDArray[np.float64]) -> float:
    """Median bias of the resamples on the normal scale; ties count by half."""
    gap = drawn - ratio
    tied = np.abs(gap) <= _ROUNDING
    below = (np.count_nonzero((gap < 0) & ~tied) + np.count_nonzero(tied) / 2) / len(drawn)
    edge = 0.5 / len(drawn)
    return _normal().inv_cdf(min(max(below, edge), 1 - edge))


def _acceleration(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """A sixth of the skewness of the jackknife over seeds."""
    without = (above.sum() - above) / (below.sum() - below)  # two seeds have a denominator
    gaps = without.mean() - without
    squares = float(np.square(gaps).sum())
    return float((gaps**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0


def _corrected(z: float, bias: float, acceleration: float) -> float:
    """The share of resamples below an end of the interval."""
    reach = bias + z
    room = 1 - acceleration * reach
    if room <= 0:  # so far out that the correction has turned over: the outermost resample
        return float(reach > 0)
    return _normal().cdf(bias + reach / room)


@cache
def _normal() -> NormalDist:
    """The standard normal distribution; its module is slow to import."""
    from statistics import NormalDist

    return NormalDist()
