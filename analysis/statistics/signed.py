"""Two-sided tests of paired differences, a number a seed.

All three leave out seeds that differ by nothing, and are exact given the sizes of the others,
ties among them included: each asks how many of the 2ⁿ ways to give those sizes signs would be
as far from even as the data (the sign test looks at the number of signs alone, Wilcoxon's at
ranks, the permutation test at the sum). They hold their level where a difference is as likely
to have either sign, size by size.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .seeds import floats

FLIPS: Final = 100_000
"""Random sign flips where there are too many to try them all; a p of 0.05 is then known to
0.0007 (one standard error)."""

EXACT_FLIPS: Final = 34
"""Differences up to which all flips are tried, half against half: 2¹⁷ sums a half."""

EXACT_RANKS: Final = 200
"""Differences up to which Wilcoxon's distribution is counted; beyond it is normal to 1e-3."""

_DIGITS: Final = 12
"""Rates are ratios of small counts: differences that are equal as fractions must tie, and not
be told apart by their last bit."""

_BLOCK: Final = 1 << 21


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
    The exact binomial test. The paper's 38 of 61 seeds, if none was tied:

    >>> round(sign_test(38, 23), 3)
    0.072
    """
    count = lower + higher
    if count == 0:
        return math.nan
    ways = 1
    tail = 1
    for at in range(min(lower, higher)):
        ways = ways * (count - at) // (at + 1)
        tail += ways
    return min(1.0, float(tail / 2 ** (count - 1)))


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
    Equal sizes share their mean rank. The distribution of the rank sum over all signs is
    counted, ties or none, up to 200 differences; beyond it is taken as normal with variance
    Σ rank² / 4 and a continuity correction of half a step.

    Examples
    --------
    >>> wilcoxon_test([0.1, 0.2, 0.3])
    0.25
    """
    numbers = _nonzero(differences)
    if not len(numbers):
        return math.nan
    _, where, sizes = np.unique(np.abs(numbers), return_inverse=True, return_counts=True)
    # Twice the mean rank is a whole number, so sums of them can be counted.
    doubled = (2 * np.cumsum(sizes) - sizes + 1)[where]
    total = int(doubled.sum())
    smaller = min(int(doubled[numbers > 0].sum()), int(doubled[numbers < 0].sum()))
    if len(numbers) > EXACT_RANKS:
        spread = math.sqrt(float(np.square(doubled.astype(np.float64)).sum()))
        away = max(0.0, total - 2 * smaller - 2.0)
        return math.erfc(away / spread / math.sqrt(2))
    shares = np.zeros(total + 1)
    shares[0] = 1.0
    for rank in doubled:
        shares[rank:] = (shares[rank:] + shares[:-rank]) / 2
        shares[:rank] /= 2
    return min(1.0, 2 * float(shares[: smaller + 1].sum()))


def permutation_test(differences: ArrayLike, *, seed: int = 0, flips: int = FLIPS) -> float:
    """Two-sided test of a mean difference by flipping the signs of the seeds' differences.

    Parameters
    ----------
    differences : ArrayLike of float, shape (seed,)
        Criterion − baseline of the seeds in which both exist. Their order does not matter.
    seed : int
        Seed of the random numbers, where flips are drawn.
    flips : int
        How many are drawn.

    Returns
    -------
    float
        p in (0, 1]; NaN where all differences are 0 or there are none.

    Notes
    -----
    p is the share of all 2ⁿ flips whose mean is at least as far from 0 as the data's, up to 34
    differences. Beyond, of B random flips, (1 + as far) / (1 + B): the data count as one of
    them, so that p is never 0 and the test never rejects too often (Phipson and Smyth 2010).

    Examples
    --------
    >>> permutation_test([0.1, 0.2, 0.3]), permutation_test([0.1, -0.1, 0.0])
    (0.25, 1.0)
    """
    numbers = _nonzero(differences)
    if not len(numbers):
        return math.nan
    sizes = np.sort(np.abs(numbers))
    reached = abs(float(numbers.sum()))
    least = reached - 10.0**-_DIGITS * len(sizes)
    if least <= 0:
        return 1.0
    if permutation_is_exact(len(sizes)):
        half = len(sizes) // 2
        first, second = (_signed_sums(part) for part in (sizes[:half], sizes[half:]))
        first.sort()
        # Flips come in pairs of opposite sums.
        far = len(first) * len(second) - int(np.searchsorted(first, least - second).sum())
        return min(1.0, float(far / 2 ** (len(sizes) - 1)))
    rng = np.random.default_rng(seed)
    far = 0
    step = max(1, _BLOCK // len(sizes))
    for start in range(0, flips, step):
        signs = rng.integers(0, 2, size=(min(step, flips - start), len(sizes)), dtype=np.int8)
        far += int(np.count_nonzero(np.abs(2 * (signs @ sizes) - sizes.sum()) >= least))
    return (1 + far) / (1 + flips)


def permutation_is_exact(differing: int) -> bool:
    """Whether `permutation_test` tries all flips of so many differences that are not 0."""
    return differing <= EXACT_FLIPS


def permutation_flips(differing: int) -> int:
    """How many flips `permutation_test` looks at by default, given the differences not 0."""
    return 2**differing if permutation_is_exact(differing) else FLIPS


def _signed_sums(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums under all signs, shape (2 ** len(sizes),)."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums + size, sums - size])
    return sums


def _nonzero(differences: ArrayLike) -> NDArray[np.float64]:
    """The differences that are not 0, rounded so that equal fractions are equal."""
    numbers = np.round(floats(differences), _DIGITS)
    different: NDArray[np.float64] = numbers[numbers != 0]
    return different
