"""What seeds say together: intervals over seeds, paired tests, several tests at once.

The seed is the unit of repetition: tokens of one seed share a batch and an update and are not
independent. An undefined statistic is NaN, never an exception or a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL: Final = 0.95
"""Of every interval."""

RESAMPLES: Final = 10_000
"""Bootstrap resamples; the interval's ends then move by under 2 % of its width."""

METHOD: Final = "bca-expanded"
"""The kind of bootstrap interval: its ends are attainable shares, and of the four kinds in
docs/statistics.md it has the best coverage with few seeds."""

CLUSTER_METHOD: Final = "jackknife over seeds, Student's t"
"""How the interval of a pooled difference is made."""

FLIPS: Final = 100_000
"""Random sign flips where there are too many to try them all; a p of 0.05 is then known to
0.0007 (one standard error)."""

EXACT_FLIPS: Final = 34
"""Differences up to which all flips are tried, half against half: 2¹⁷ sums per half."""

EXACT_RANKS: Final = 200
"""Differences up to which Wilcoxon's distribution is counted; beyond it is normal to 1e-3."""

_BLOCK: Final = 1 << 21
"""Random numbers held at once (16 MB)."""

_DIGITS: Final = 12
"""Rates are ratios of small counts: those that are equal as fractions must tie, and not be told
apart by their last bit."""

Floats = NDArray[np.float64]
Interval = tuple[float, float]
UNDEFINED: Final[Interval] = (float("nan"), float("nan"))


def mean(values: ArrayLike) -> float:
    """Mean of the values that are not NaN; NaN over none.

    Examples
    --------
    >>> mean([1.0, float("nan"), 2.0])
    1.5
    """
    numbers = _known(values)
    return float(numbers.mean()) if len(numbers) else math.nan


def t_band(values: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Mean over seeds at every point of a curve, and the ends of its 95 % t-interval.

    Parameters
    ----------
    values : ArrayLike of float, shape (seed, point)
        NaN is left out.

    Returns
    -------
    mean, low, high : ndarray of float64, shape (point,)
        mean ± t s/√n with n − 1 degrees of freedom; all three the value itself where there is
        only one, NaN where there is none.

    Examples
    --------
    >>> mean, low, high = t_band([[1.0], [3.0]])
    >>> float(mean[0]), round(float(high[0] - mean[0]), 3)
    (2.0, 12.706)
    """
    from scipy.special import stdtrit

    numbers = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(numbers)
    size = known.sum(axis=0)
    with np.errstate(invalid="ignore"):  # over nothing
        middle = np.where(known, numbers, 0.0).sum(axis=0) / size
    squares = np.where(known, numbers - middle, 0.0) ** 2
    free = np.maximum(size - 1, 1)
    reach = stdtrit(free, 0.975) * np.sqrt(squares.sum(axis=0) / free / np.maximum(size, 1))
    return middle, middle - reach, middle + reach


def bootstrap_mean(values: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """95 % bootstrap interval of a mean over seeds, as `bootstrap_ratio` makes it.

    Parameters
    ----------
    values : ArrayLike of float, shape (seed,)
        One number per seed; NaN is left out.

    Examples
    --------
    >>> bootstrap_mean([0.5, 0.5, 0.5]), bootstrap_mean([0.5])
    ((0.5, 0.5), (nan, nan))
    """
    numbers = _known(values)
    return bootstrap_ratio(numbers, np.ones_like(numbers), seed=seed, resamples=resamples)


def bootstrap_ratio(
    numerator: ArrayLike, denominator: ArrayLike, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """95 % bootstrap interval of a pooled ratio Σ numerator / Σ denominator over seeds.

    Seeds are drawn with their numerator and denominator together, so a seed weighs what it
    weighs in the ratio.

    Parameters
    ----------
    numerator, denominator : ArrayLike of float, shape (seed,)
        A seed's two counts; a seed of 0/0 may be drawn. The order does not matter.
    seed : int
        Seed of the random numbers.
    resamples : int
        How often the seeds are drawn anew.

    Returns
    -------
    tuple of float
        Lower and upper end; both NaN where fewer than two seeds have a denominator; of no width
        where all seeds that have one share the same ratio. A resample of empty seeds alone has no
        ratio and is left out.

    Notes
    -----
    With θ the ratio and F the distribution of the resamples' ratios, the ends are
    F⁻¹(Φ(b + (b + z) / (1 − a (b + z)))) with the bias b = Φ⁻¹(F(θ)), ties counted by half, and
    the acceleration a = Σd³ / 6(Σd²)^1.5 of the jackknife's deviations d (Efron 1987). Few seeds
    understate their own spread, so z = ±√(k/(k − 1)) t, with t Student's quantile with k − 1
    degrees of freedom and k the seeds that have a denominator (Hesterberg 2015, section 4.3).

    Examples
    --------
    >>> bootstrap_ratio([1, 2], [2, 4])
    (0.5, 0.5)
    """
    above, below = _floats(numerator), _floats(denominator)
    order = np.lexsort((above, below))
    above, below = above[order], below[order]
    having = int(np.count_nonzero(below))
    if having < 2:
        return UNDEFINED
    ratio, rounding = float(above.sum() / below.sum()), 10.0**-_DIGITS
    if np.all(np.abs(above - ratio * below) <= rounding * below.max()):
        return ratio, ratio
    rng = np.random.default_rng(seed)
    ratios = []
    for size in _blocks(resamples, len(above)):
        places = rng.integers(0, len(above), size=(size, len(above)))
        total = below[places].sum(axis=1)
        ratios.append(above[places[total > 0]].sum(axis=1) / total[total > 0])
    drawn = np.concatenate(ratios)
    gaps = drawn - ratio
    tied = np.abs(gaps) <= rounding
    share = (np.count_nonzero((gaps < 0) & ~tied) + np.count_nonzero(tied) / 2) / len(drawn)
    from statistics import NormalDist  # slow to import, as scipy is

    from scipy.special import stdtrit

    normal, edge = NormalDist(), 0.5 / len(drawn)
    bias = normal.inv_cdf(min(max(share, edge), 1 - edge))
    left = _without(above, below)
    left = left.mean() - left
    squares = float(np.square(left).sum())
    acceleration = float((left**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0
    reach = math.sqrt(having / (having - 1)) * float(stdtrit(having - 1, (1 + LEVEL) / 2))
    shares = []
    for z in (bias - reach, bias + reach):
        room = 1 - acceleration * z
        # Where the correction has turned over, so far out, it is the outermost resample.
        shares.append(normal.cdf(bias + z / room) if room > 0 else float(z > 0))
    low, high = np.quantile(drawn, shares)
    return float(low), float(high)


@dataclass(frozen=True)
class PooledDifference:
    """Two ratios pooled over seeds, and how far they are apart.

    Attributes
    ----------
    criterion, baseline, difference : float
        Σ numerator / Σ denominator of each, NaN over nothing; criterion − baseline.
    difference_ci95 : tuple of float
        Cluster-robust; NaN where fewer than two seeds have tokens of either side.
    p : float
        Two-sided, of the same law; NaN where the interval is, or has no width.
    clusters, degrees : int
        Seeds that have tokens of either side; degrees of freedom of Student's law.
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
    θ = Σa/Σn − Σb/Σm. Tokens of a seed share a batch and an update: the variance is that of the
    jackknife over the S seeds that hold tokens of either side,
    (S − 1)/S Σ (θ₍₋ₛ₎ − mean θ₍₋ₛ₎)², and the interval θ ± t √variance, clipped to [−1, 1], with
    t Student's quantile. Its degrees of freedom are one less than the seeds of the side that has
    tokens in fewer of them, since that side's ratio makes most of the variance. The jackknife is
    the cluster-robust variance that errs on the wide side with few, unequal clusters (CR3 in the
    literature); it was chosen over the linearised one by its coverage (docs/statistics.md).

    Examples
    --------
    >>> found = pooled_difference(([1, 2, 0], [4, 4, 0]), ([3, 2, 1], [4, 4, 2]))
    >>> round(found.difference, 3), found.clusters, found.degrees
    (-0.225, 3, 1)
    """
    above, below = (_floats(each) for each in criterion)
    other_above, other_below = (_floats(each) for each in baseline)
    ours, theirs = (
        float(part.sum()) / total if (total := float(whole.sum())) else math.nan
        for part, whole in ((above, below), (other_above, other_below))
    )
    held = (below > 0) | (other_below > 0)
    clusters = int(np.count_nonzero(held))
    degrees = max(0, min(int(np.count_nonzero(each > 0)) for each in (below, other_below)) - 1)
    difference = ours - theirs
    if not degrees:
        return PooledDifference(ours, theirs, difference, UNDEFINED, math.nan, clusters, degrees)
    without = (_without(above, below) - _without(other_above, other_below))[held]
    gaps = without - without.mean()
    error = math.sqrt((clusters - 1) / clusters * float(np.square(gaps).sum()))
    if error < 10.0**-_DIGITS:  # all seeds say the same, to the last bit
        error = 0.0
    from scipy.special import stdtr, stdtrit

    reach = float(stdtrit(degrees, (1 + LEVEL) / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(difference) / error)) if error else math.nan
    ends = (max(-1.0, difference - reach), min(1.0, difference + reach))
    return PooledDifference(ours, theirs, difference, ends, p, clusters, degrees)


def _without(above: Floats, below: Floats) -> Floats:
    """The pooled ratio without each seed in turn; at least two have a denominator."""
    return np.asarray((above.sum() - above) / (below.sum() - below))


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
    sign_test_p, wilcoxon_p, permutation_p : float
        Two-sided; NaN where no paired seed differs.
    permutation_flips : int
        Sign flips that the permutation test looked at.
    """

    seeds: int
    lower: int
    tied: int
    higher: int
    difference: float
    difference_ci95: Interval
    sign_test_p: float
    wilcoxon_p: float
    permutation_p: float
    permutation_flips: int

    @property
    def permutation_exact(self) -> bool:
        """Whether the permutation test looked at every sign flip, or at a random sample."""
        return self.lower + self.higher <= EXACT_FLIPS


def compare_paired(criterion: ArrayLike, baseline: ArrayLike, *, bootstrap_seed: int = 0) -> Paired:
    """Compare two rates seed by seed.

    Parameters
    ----------
    criterion, baseline : ArrayLike of float, shape (seed,)
        Rates in [0, 1]; NaN where a seed has none.
    bootstrap_seed : int
        Seed of the random numbers of the bootstrap, and of the permutation test where it draws.

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
    differing = lower + higher
    return Paired(
        seeds=len(differences),
        lower=lower,
        tied=len(differences) - differing,
        higher=higher,
        difference=mean(differences),
        difference_ci95=bootstrap_mean(differences, seed=bootstrap_seed),
        sign_test_p=sign_test(lower, higher),
        wilcoxon_p=wilcoxon_test(differences),
        permutation_p=permutation_test(differences, seed=bootstrap_seed),
        permutation_flips=2**differing if differing <= EXACT_FLIPS else FLIPS,
    )


# The three tests leave out seeds that differ by nothing, and are exact given the sizes of the
# others, ties among them included: each asks how many of the 2ⁿ ways to give those sizes signs
# would be as far from even as the data. They hold their level where a difference is as likely to
# have either sign, size by size.


def sign_test(lower: int, higher: int) -> float:
    """Two-sided exact binomial test that lower and higher are equally likely; ties are left out.

    Parameters
    ----------
    lower, higher : int
        Seeds on either side.

    Returns
    -------
    float
        p in (0, 1]; NaN where no seed differs. The paper's 38 of 61 seeds, if none was tied:

    >>> round(sign_test(38, 23), 3)
    0.072
    """
    count = lower + higher
    if count == 0:
        return math.nan
    tail = sum(math.comb(count, at) for at in range(min(lower, higher) + 1))
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
    if len(sizes) <= EXACT_FLIPS:
        half = len(sizes) // 2
        first, second = (_signed_sums(part) for part in (sizes[:half], sizes[half:]))
        first.sort()
        # Flips come in pairs of opposite sums.
        far = len(first) * len(second) - int(np.searchsorted(first, least - second).sum())
        return min(1.0, float(far / 2 ** (len(sizes) - 1)))
    rng = np.random.default_rng(seed)
    far = 0
    for size in _blocks(flips, len(sizes)):
        signs = rng.integers(0, 2, size=(size, len(sizes)), dtype=np.int8)
        far += int(np.count_nonzero(np.abs(2 * (signs @ sizes) - sizes.sum()) >= least))
    return (1 + far) / (1 + flips)


def _blocks(draws: int, width: int) -> Iterator[int]:
    """Sizes of the blocks in which so many draws, each of some random numbers, are made."""
    step = max(1, _BLOCK // width)
    return (min(step, draws - start) for start in range(0, draws, step))


def _signed_sums(sizes: Floats) -> Floats:
    """The sums under all signs, shape (2 ** len(sizes),)."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums + size, sums - size])
    return sums


def holm(p_values: ArrayLike) -> Floats:
    """p-values corrected for being several, by Holm's step-down rule.

    A corrected value of at most α may be called significant: the chance that any true null
    among them is then called so is at most α, however the tests depend on each other.

    Parameters
    ----------
    p_values : ArrayLike of float, shape (test,)
        In [0, 1]; NaN where a test could not be made.

    Returns
    -------
    ndarray of float64, shape (test,)
        In the same order, each at least what it was; NaN stays NaN and is left out: m below is
        the number of the others.

    Raises
    ------
    ValueError
        A value outside [0, 1].

    Notes
    -----
    With p₍₁₎ ≤ … ≤ p₍ₘ₎: max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎) (Holm 1979).

    Examples
    --------
    >>> [round(float(p), 3) for p in holm([0.04, 0.01, float("nan"), 0.03])]
    [0.06, 0.03, nan, 0.06]
    """
    numbers = _floats(p_values)
    tested = np.flatnonzero(~np.isnan(numbers))
    if np.any((numbers[tested] < 0) | (numbers[tested] > 1)):
        raise ValueError(f"p-values must lie in [0, 1], got {numbers[tested]}")
    order = tested[np.argsort(numbers[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    corrected = np.full(len(numbers), np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * numbers[order]))
    return corrected


def _floats(values: ArrayLike) -> Floats:
    """Values as a float64 vector."""
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _known(values: ArrayLike) -> Floats:
    """The values that are not NaN."""
    numbers = _floats(values)
    return np.asarray(numbers[~np.isnan(numbers)])


def _nonzero(differences: ArrayLike) -> Floats:
    """The differences that are not 0, rounded so that equal fractions are equal."""
    numbers = np.round(_floats(differences), _DIGITS)
    return np.asarray(numbers[numbers != 0])
