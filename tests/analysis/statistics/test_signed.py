"""The tests of signed differences against brute enumeration, laws and scipy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis import paper
from deltad.analysis.statistics import (
    EXACT_FLIPS,
    EXACT_RANKS,
    permutation_test,
    sign_test,
    wilcoxon_test,
)

STATS: Any = scipy.stats
steps = st.lists(st.integers(-4, 4), max_size=9)


def enumerated(differences: list[int]) -> tuple[float, float, float]:
    """p of sign test, Wilcoxon's and the permutation test over every way to give signs."""
    sizes = [abs(each) for each in differences if each]
    if not sizes:
        return (math.nan,) * 3
    ranks = scipy.stats.rankdata(sizes)
    data = [1 if each > 0 else -1 for each in differences if each]
    far = np.zeros(3)
    for signs in itertools.product((1, -1), repeat=len(sizes)):
        for at, weights in enumerate((np.ones(len(sizes)), ranks, np.array(sizes, float))):
            far[at] += abs(weights @ signs) >= abs(weights @ data) - 1e-9
    p_values = far / 2 ** len(sizes)
    return float(p_values[0]), float(p_values[1]), float(p_values[2])


@settings(max_examples=40, deadline=None)
@given(steps)
def test_each_test_counts_the_signings_as_far_from_even_as_the_data(steps: list[int]) -> None:
    lower, higher = sum(each < 0 for each in steps), sum(each > 0 for each in steps)
    differences = np.array(steps) / 7
    found = (sign_test(lower, higher), wilcoxon_test(differences), permutation_test(differences))
    np.testing.assert_allclose(found, enumerated(steps), rtol=1e-12)


@given(st.integers(0, 60), st.integers(0, 60))
def test_sign_test_is_the_exact_binomial_test(lower: int, higher: int) -> None:
    p = sign_test(lower, higher)
    assert p == sign_test(higher, lower) or math.isnan(p)
    if lower + higher:
        expected = scipy.stats.binomtest(lower, lower + higher).pvalue
        assert p == pytest.approx(expected, rel=1e-9)
    else:
        assert math.isnan(p)


def test_sign_test_of_very_many_seeds_does_not_overflow() -> None:
    assert sign_test(3000, 3000) == 1.0
    assert sign_test(0, 5000) == 0.0  # below the smallest float
    assert 0 < sign_test(2400, 2600) < 0.01


def test_the_papers_headline_is_suggestive_and_not_settled() -> None:
    assert round(sign_test(paper.SEEDS_LOWER, paper.SEEDS - paper.SEEDS_LOWER), 3) == 0.072


@pytest.mark.parametrize("size", [1, 5, 12, 30, 50])
def test_without_ties_wilcoxon_is_scipys_exact_one(size: int) -> None:
    values = np.random.default_rng(size).normal(0.3, 1, size)
    expected = scipy.stats.wilcoxon(values, method="exact").pvalue
    assert wilcoxon_test(values) == pytest.approx(expected, rel=1e-9)


def test_exact_and_normal_wilcoxon_meet() -> None:
    rng = np.random.default_rng(1)
    values = np.round(rng.normal(0.1, 1, EXACT_RANKS + 1), 1)
    values[values == 0] = 0.1
    few, many = values[:EXACT_RANKS], values
    exact = scipy.stats.wilcoxon(few, method="approx", correction=True).pvalue
    assert wilcoxon_test(few) == pytest.approx(exact, abs=2e-3)
    normal = scipy.stats.wilcoxon(many, method="approx", correction=True).pvalue
    assert wilcoxon_test(many) == pytest.approx(normal, rel=1e-9)


def test_differences_that_are_equal_as_fractions_tie() -> None:
    # 1/2 − 1/3 and 2/3 − 1/2 differ in their last bit alone.
    unequal = [1 / 2 - 1 / 3, -(2 / 3 - 1 / 2), 0.9]
    assert abs(unequal[0]) != abs(unequal[1])
    assert wilcoxon_test(unequal) == wilcoxon_test([0.25, -0.25, 0.9])
    assert permutation_test([0.1 + 0.2, -0.3]) == 1.0
    assert wilcoxon_test([0.1 + 0.2 - 0.3, 0.0]) != wilcoxon_test([1.0])
    assert math.isnan(permutation_test([0.1 + 0.2 - 0.3, 0.0]))


@pytest.mark.parametrize("size", [11, 14])
def test_permutation_test_is_scipys(size: int) -> None:
    values = np.round(np.random.default_rng(size).normal(0.3, 1, size), 2)
    expected = STATS.permutation_test(
        (values,), lambda each, axis: each.mean(axis), permutation_type="samples",
        vectorized=True, n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert permutation_test(values) == pytest.approx(expected, rel=1e-9)


def test_random_flips_come_near_to_all_flips() -> None:
    values = np.random.default_rng(4).normal(0.25, 1, EXACT_FLIPS + 1)
    drawn = permutation_test(values)
    # Split one seed's difference by its sign: the exact test over the others, twice.
    others, last = values[:-1], abs(values[-1])
    reached = abs(values.sum())
    sums = np.zeros(1)
    for half in (others[:17], others[17:]):
        sides = np.zeros(1)
        for each in half:
            sides = np.concatenate([sides + each, sides - each])
        sums = np.sort(sides) if len(sums) == 1 else np.stack([sums, np.sort(sides)])
    far = sum(
        2 ** len(others) - np.searchsorted(sums[0], reached - last * sign - sums[1]).sum()
        for sign in (1, -1)
    )
    exact = 2 * far / 2 ** len(values)
    assert drawn == pytest.approx(exact, abs=5 * math.sqrt(exact / 100_000))


def test_no_p_of_random_flips_is_0() -> None:
    assert permutation_test(np.ones(60), flips=99) == 1 / 100


@settings(max_examples=40, deadline=None)
@given(steps, st.integers(0, 5), st.floats(0.1, 9))
def test_order_sign_and_scale_do_not_matter(steps: list[int], seed: int, factor: float) -> None:
    differences = np.array(steps, float)
    shuffled = np.random.default_rng(seed).permutation(differences)
    for test in (wilcoxon_test, permutation_test):
        p = test(differences)
        for other in (shuffled, -differences, factor * differences):
            np.testing.assert_allclose(test(other), p, rtol=1e-12)


def test_order_does_not_matter_to_random_flips_either() -> None:
    values = np.random.default_rng(0).normal(0.2, 1, 50)
    assert permutation_test(values) == permutation_test(values[::-1])
    assert permutation_test(values, flips=500) != permutation_test(values, flips=500, seed=1)


@given(steps)
def test_seeds_that_differ_by_nothing_take_no_part(steps: list[int]) -> None:
    with_zeros = np.array([value for each in steps for value in (0, each)], float)
    for test in (wilcoxon_test, permutation_test):
        np.testing.assert_equal(test(with_zeros), test(np.array(steps, float)))
