"""The pooled difference against an oracle that recounts every jackknife sample."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis.statistics import PooledDifference, pooled_difference

side = st.integers(0, 5).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
seeds = st.lists(st.tuples(side, side), max_size=8)
Seeds = list[tuple[tuple[int, int], tuple[int, int]]]


def found(seeds: Seeds) -> PooledDifference:
    ours, theirs = (np.array([seed[at] for seed in seeds]).reshape(-1, 2).T for at in (0, 1))
    return pooled_difference((ours[0], ours[1]), (theirs[0], theirs[1]))


def pooled(seeds: Seeds) -> Fraction:
    """criterion − baseline."""
    first, second = (
        Fraction(sum(seed[at][0] for seed in seeds), sum(seed[at][1] for seed in seeds))
        for at in (0, 1)
    )
    return first - second


@settings(max_examples=60)
@given(seeds)
def test_the_interval_is_that_of_leaving_out_a_seed_at_a_time(seeds: Seeds) -> None:
    result = found(seeds)
    held = [seed for seed in seeds if seed[0][1] or seed[1][1]]
    fewest = min(sum(seed[at][1] > 0 for seed in seeds) for at in (0, 1))
    assert result.clusters == len(held)
    assert result.degrees == max(0, fewest - 1)
    if fewest < 2:
        assert all(math.isnan(end) for end in (*result.difference_ci95, result.p))
        assert math.isnan(result.difference) == (fewest == 0)
        return
    difference = float(pooled(seeds))
    assert result.difference == pytest.approx(difference, abs=1e-12)
    assert result.difference == pytest.approx(result.criterion - result.baseline, abs=1e-12)
    without = [pooled(held[:at] + held[at + 1 :]) for at in range(len(held))]
    centre = sum(without) / len(without)
    squares = sum((each - centre) ** 2 for each in without)
    error = math.sqrt(squares * (len(held) - 1) / len(held))
    edge = scipy.stats.t.ppf(0.975, fewest - 1)
    expected = (max(-1, difference - edge * error), min(1, difference + edge * error))
    assert result.difference_ci95 == pytest.approx(expected, abs=1e-9)
    if error:
        p = 2 * scipy.stats.t.sf(abs(difference) / error, fewest - 1)
        assert result.p == pytest.approx(p, abs=1e-6)
        assert (result.p < 0.05) == (not expected[0] <= 0 <= expected[1]) or p == pytest.approx(
            0.05
        )
    else:
        assert math.isnan(result.p)


@settings(max_examples=60)
@given(seeds, st.integers(0, 4))
def test_order_of_seeds_and_of_sides(seeds: Seeds, seed: int) -> None:
    result = found(seeds)
    order = np.random.default_rng(seed).permutation(len(seeds))
    shuffled = found([seeds[at] for at in order])
    swapped = found([(theirs, ours) for ours, theirs in seeds])
    low, high = result.difference_ci95
    np.testing.assert_allclose(shuffled.difference_ci95, (low, high), atol=1e-12)
    np.testing.assert_allclose(swapped.difference_ci95, (-high, -low), atol=1e-12)


def test_one_seed_that_holds_all_tokens_of_a_side_leaves_no_interval() -> None:
    result = found([((1, 3), (1, 2)), ((0, 0), (1, 4)), ((0, 0), (2, 4))])
    assert result.difference == pytest.approx(1 / 3 - 4 / 10)
    assert math.isnan(result.difference_ci95[0])
    assert result.clusters == 3


def test_seeds_that_all_say_the_same_have_an_interval_of_no_width() -> None:
    result = found([((1, 2), (1, 4)), ((2, 4), (3, 12)), ((0, 0), (1, 4))])
    assert result.difference_ci95 == (0.25, 0.25)
    assert math.isnan(result.p)


def test_for_many_equal_clusters_it_is_the_paired_t_interval() -> None:
    rng = np.random.default_rng(0)
    size = np.full(40, 10)
    ours, theirs = rng.binomial(size, 0.3), rng.binomial(size, 0.4)
    result = pooled_difference((ours, size), (theirs, size))
    expected = scipy.stats.ttest_1samp((ours - theirs) / 10, 0).confidence_interval()
    assert result.difference_ci95 == pytest.approx((expected.low, expected.high), rel=1e-9)
