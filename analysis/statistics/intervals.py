"""Bootstrap intervals over seeds, of means and of pooled ratios."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .seeds import LEVEL, UNDEFINED, Interval, floats

RESAMPLES: Final = 10_000
"""Bootstrap resamples; the interval's ends then move by under 2 % of its width."""

METHOD: Final = "percentile"
"""Kind of bootstrap interval; its ends are always attainable shares."""

_BLOCK: Final = 1 << 21
"""Drawn seed indices held at once (16 MB)."""


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
    numbers = floats(values)
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
    above, below = floats(numerator), floats(denominator)
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
