"""What a number of seeds can see: the power of the paired tests, from counts by seed.

A model of one more seed is made from the seeds at hand: one of them, drawn with equal chance,
with the criterion's numerators thinned so that the mean difference is what is asked about.
Seeds without a rate, ties, unequal counts and the spread between seeds stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .seeds import floats

Floats = NDArray[np.float64]

TESTS: Final = ("sign test", "Wilcoxon", "paired t")
"""Whose power is simulated. The permutation test of the mean rejects as the paired t-test does,
to within a few per cent of its level."""

TIMES: Final = 4000
"""Dumps simulated for one power, which is then known to 0.006 (one standard error) near 0.8."""

MOST_SEEDS: Final = 1_000_000
"""Where the search for a number of seeds ends."""

FINEST: Final = 0.001
"""To which a detectable difference is found."""

_ROUNDED: Final = 12  # digits; differences that are equal as fractions must tie


@dataclass(frozen=True, eq=False)
class SeedModel:
    """The law of one seed's paired difference criterion − baseline.

    Attributes
    ----------
    values : ndarray of float64, shape (value,)
        Its possible values, ascending.
    shares : ndarray of float64, shape (value,)
        Their probabilities, which sum up to 1 − `empty`.
    empty : float
        Probability that a seed has no pair of rates.
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


def seed_model(
    criterion: tuple[ArrayLike, ArrayLike],
    baseline: tuple[ArrayLike, ArrayLike],
    difference: float,
) -> SeedModel | None:
    """The law of a seed's paired difference where its mean is what is asked about.

    Parameters
    ----------
    criterion, baseline : pair of ArrayLike of int, shape (seed,)
        A seed's numerators and denominators, such as unsafe and kept tokens; 0/0 where a seed
        has none.
    difference : float
        Mean over paired seeds of criterion − baseline, in [−1, 1].

    Returns
    -------
    SeedModel or None
        None where fewer than two seeds have both rates, or where the criterion's mean rate
        would have to leave [0, 1].

    Notes
    -----
    With r the criterion's mean rate over the paired seeds and g = (the baseline's) +
    `difference` its goal: each of the criterion's unsafe tokens becomes safe with probability
    1 − g/r where g ≤ r, else each safe one unsafe with (g − r)/(1 − r). The mean is then
    exact, whatever the counts.

    Examples
    --------
    >>> model = seed_model(([1, 2, 0], [2, 2, 0]), ([2, 2, 1], [4, 4, 1]), difference=-0.1)
    >>> round(model.mean, 12), round(model.empty, 3)
    (-0.1, 0.333)
    """
    above, below = (floats(each) for each in criterion)
    other_above, other_below = (floats(each) for each in baseline)
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
    differences = np.round(steps / below[:, None] - theirs[:, None], _ROUNDED)
    possible = shares > 0
    values, where = np.unique(differences[possible], return_inverse=True)
    return SeedModel(
        values=values,
        shares=np.bincount(where, weights=shares[possible]) / seeds,
        empty=1 - len(below) / seeds,
    )


def rejections(
    model: SeedModel, seeds: int, *, level: float = 0.05, times: int = TIMES, seed: int = 0
) -> dict[str, float]:
    """Share of simulated dumps in which each test rejects: its power, by simulation.

    Parameters
    ----------
    model : SeedModel
        The law of a seed's difference.
    seeds : int
        Seeds of a dump, those without a pair of rates among them.
    level : float
        Of the two-sided tests.
    times : int
        Dumps; a share p has the standard error √(p (1 − p) / times).
    seed : int
        Of the random numbers.

    Returns
    -------
    dict of str to float
        By name of `TESTS`. The sign test is exact; Wilcoxon's has the normal law with a
        continuity correction; where all seeds differ by the same, the t-test has the p of the
        permutation test. A test that is undefined does not reject.
    """
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
    spread = error > 10.0**-_ROUNDED
    scores = np.abs(mean) / np.where(spread, error, 1)
    p_values = 2 * stdtr(np.maximum(pairs - 1, 1), -scores)
    alike = np.where(mean == 0, 1.0, 2.0 ** (1.0 - pairs))  # all differ by the same: all flips
    student = (pairs > 1) & (np.where(spread, p_values, alike) <= level)
    shares = (float(rejected.mean()) for rejected in (sign, wilcoxon, student))
    return dict(zip(TESTS, shares, strict=True))


def seeds_needed(power: Callable[[int], float], goal: float, *, start: int) -> int | None:
    """The smallest number of seeds with some power.

    Parameters
    ----------
    power : callable
        Power with a number of seeds; nearly monotone.
    goal : float
        The power asked for, in (0, 1).
    start : int
        Where to look first.

    Returns
    -------
    int or None
        At least 2, and to 1 %, which is less than a simulated power can tell apart; None beyond
        a million.

    Examples
    --------
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
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def detectable_difference(power: Callable[[float], float], goal: float, most: float) -> float:
    """The smallest difference with some power.

    Parameters
    ----------
    power : callable
        Power at a difference > 0; nearly monotone.
    goal : float
        The power asked for, in (0, 1).
    most : float
        The largest difference that there can be.

    Returns
    -------
    float
        To 0.001; NaN where the largest has less power.

    Examples
    --------
    >>> detectable_difference(lambda difference: 4 * difference, 0.8, 1.0)
    0.2
    """
    steps = math.floor(most / FINEST + 1e-9)
    low, high = 0, steps
    if steps < 1 or power(steps * FINEST) < goal:
        return math.nan
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle * FINEST) < goal:
            low = middle
        else:
            high = middle
    return round(high * FINEST, 6)
