"""Laws of the bootstrap intervals, and their agreement with scipy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltad.analysis.statistics import bootstrap_mean, bootstrap_ratio, mean
from tests.analysis.statistics.coverage import METHODS, interval

NAN = math.nan
STATS: Any = scipy.stats  # its overloads know no axis of a pooled ratio
shares = st.lists(st.sampled_from([0.0, 0.2, 0.25, 0.5, 1.0]), min_size=2, max_size=9)
counts = st.lists(
    st.integers(0, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    min_size=2,
    max_size=9,
)


def _expanded(values: NDArray[np.float64]) -> float:
    """The level whose BCa interval is the expanded one at the usual level."""
    n = len(values)
    reach = math.sqrt(n / (n - 1)) * scipy.stats.t.ppf(0.975, n - 1)
    return float(1 - 2 * scipy.stats.norm.cdf(-reach))


@pytest.mark.parametrize("size", [7, 20, 61])
def test_the_mean_has_the_interval_of_scipy(size: int) -> None:
    values = np.random.default_rng(size).gamma(1.0, 0.2, size)
    found = bootstrap_mean(values, resamples=20_000)
    result = STATS.bootstrap(
        (values,), np.mean, confidence_level=_expanded(values), method="BCa", n_resamples=20_000,
        rng=1,
    )  # fmt: skip
    width = result.confidence_interval.high - result.confidence_interval.low
    np.testing.assert_allclose(found, result.confidence_interval, atol=0.04 * width)


@pytest.mark.parametrize(("method", "theirs"), [("percentile", "percentile"), ("bca", "BCa")])
def test_a_pooled_ratio_has_the_interval_of_scipy(method: str, theirs: str) -> None:
    rng = np.random.default_rng(2)
    below = rng.integers(1, 20, 25).astype(float)
    above = rng.binomial(below.astype(int), 0.3).astype(float)
    found = interval(above, below, method, resamples=20_000)
    result = STATS.bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True,
        vectorized=True, method=theirs, n_resamples=20_000, rng=1,
    )  # fmt: skip
    width = result.confidence_interval.high - result.confidence_interval.low
    np.testing.assert_allclose(found, result.confidence_interval, atol=0.04 * width)


def test_the_interval_of_a_mean_is_that_of_the_normal_law_for_many_seeds() -> None:
    values = np.random.default_rng(5).normal(0.4, 0.1, size=400)
    error = values.std() / math.sqrt(len(values))
    for method in METHODS:
        low, high = interval(values, np.ones(400), method, resamples=10_000)
        assert (low - values.mean()) / error == pytest.approx(-1.96, abs=0.15)
        assert (high - values.mean()) / error == pytest.approx(1.96, abs=0.15)


@settings(max_examples=25)
@given(counts, st.integers(0, 3))
def test_the_order_of_the_seeds_does_not_matter(pairs: list[tuple[int, int]], seed: int) -> None:
    above, below = np.array(pairs).T
    order = np.random.default_rng(seed).permutation(len(pairs))
    np.testing.assert_array_equal(
        bootstrap_ratio(above, below, resamples=200),
        bootstrap_ratio(above[order], below[order], resamples=200),
    )


@settings(max_examples=25)
@given(shares, st.floats(0.01, 50))
def test_scaling_the_values_scales_the_interval(values: list[float], factor: float) -> None:
    found = np.array(bootstrap_mean(values, resamples=200))
    scaled = bootstrap_mean(factor * np.array(values), resamples=200)
    np.testing.assert_allclose(scaled, factor * found, rtol=1e-6, atol=1e-9)


@settings(max_examples=25)
@given(counts)
def test_the_ends_are_attainable_shares(pairs: list[tuple[int, int]]) -> None:
    above, below = np.array(pairs).T
    low, high = bootstrap_ratio(above, below, resamples=200)
    held = below > 0
    if held.sum() < 2:
        assert math.isnan(low)
        assert math.isnan(high)
        return
    ratios = above[held] / below[held]
    assert ratios.min() - 1e-12 <= low <= high <= ratios.max() + 1e-12


@settings(max_examples=25)
@given(counts)
def test_shares_and_their_complements_have_mirrored_intervals(
    pairs: list[tuple[int, int]],
) -> None:
    """To what drawing leaves open: the seeds are drawn in another order."""
    above, below = np.array(pairs).T
    if (below > 0).sum() < 4:
        return
    low, high = bootstrap_ratio(above, below, resamples=4000)
    other = bootstrap_ratio(below - above, below, resamples=4000)
    np.testing.assert_allclose((1 - other[1], 1 - other[0]), (low, high), atol=0.2)


def test_degenerate_seeds_have_defined_answers() -> None:
    np.testing.assert_allclose(bootstrap_mean([0.1, 0.1, 0.1]), 0.1)
    assert bootstrap_ratio([1, 50, 3, 0], [2, 100, 6, 0]) == (0.5, 0.5)
    assert bootstrap_ratio([0, 0], [3, 4]) == (0.0, 0.0)
    for above, below in (([], []), ([1], [2]), ([0, 0], [0, 0]), ([1, 0], [2, 0])):
        assert all(math.isnan(end) for end in bootstrap_ratio(above, below))
    low, high = bootstrap_ratio([0, 3], [3, 3])
    assert low <= 0.5 <= high


def test_few_seeds_widen_the_printed_interval_to_all_that_they_show() -> None:
    assert bootstrap_mean([0.2, 0.6]) == (0.2, 0.6)
    narrow = interval([0.1, 0.2, 0.4, 0.5, 0.9, 0.8], np.ones(6), "bca", resamples=10_000)
    wide = bootstrap_mean([0.1, 0.2, 0.4, 0.5, 0.9, 0.8])
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_an_extreme_correction_ends_at_the_outermost_resample() -> None:
    # One heavy seed among light ones turns the correction over.
    low, high = bootstrap_ratio([0, 0, 90], [1, 1, 100])
    assert 0 <= low <= high <= 0.9


def test_nan_takes_no_part_and_numbers_are_repeatable() -> None:
    values = [0.1, 0.5, NAN, 0.9]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean([0.1, 0.5, 0.9], seed=3)
    many = np.linspace(0, 1, 30)
    first = bootstrap_mean(many, seed=3, resamples=50)
    assert first != bootstrap_mean(many, seed=4, resamples=50)
    assert first == bootstrap_mean(many, seed=3, resamples=50)


def test_numerator_and_denominator_of_a_seed_are_drawn_together() -> None:
    low, high = bootstrap_ratio([0, 100], [1, 100])
    assert (low, high) == (0.0, 1.0)


def test_an_empty_seed_may_be_drawn_and_empty_draws_are_left_out() -> None:
    # With an empty seed a draw may weigh the other two unequally, never divide by 0.
    low, high = bootstrap_ratio([1, 3, 0], [4, 4, 0])
    assert (low, high) == (0.25, 0.75)


def test_bootstrap_goes_on_in_blocks() -> None:
    above = np.concatenate([np.zeros(15_000), np.ones(15_000)])
    low, high = bootstrap_ratio(above, np.ones(30_000), resamples=200)
    assert 0.48 < low < 0.5 < high < 0.52


@pytest.mark.parametrize("values", [[], [0.3], [NAN, NAN], [0.3, NAN]])
def test_fewer_than_two_seeds_have_no_interval(values: list[float]) -> None:
    assert all(math.isnan(end) for end in bootstrap_mean(values))
    finite = [value for value in values if not math.isnan(value)]
    assert math.isnan(mean(values)) == (not finite)
