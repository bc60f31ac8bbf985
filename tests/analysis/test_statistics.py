"""Laws of the statistics over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis import paper
from deltad.analysis.statistics import (
    bootstrap_mean,
    bootstrap_ratio,
    compare_paired,
    mean,
    sign_test,
    wilcoxon_test,
)

NAN = math.nan
rates = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, NAN]), max_size=12)


@given(st.integers(0, 40), st.integers(0, 40))
def test_sign_test_is_the_exact_binomial_test(lower: int, higher: int) -> None:
    n = lower + higher
    p = sign_test(lower, higher)
    if not n:
        assert math.isnan(p)
        return
    tail = sum(math.comb(n, at) for at in range(min(lower, higher) + 1)) / 2**n
    assert p == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
    assert p == sign_test(higher, lower)


def test_the_papers_headline_is_suggestive_and_not_settled() -> None:
    lower, seeds = int(paper.SEEDS_LOWER.value), int(paper.SEEDS.value)
    assert round(sign_test(lower, seeds - lower), 3) == 0.072


def test_wilcoxon_agrees_with_all_signings_of_five_differences() -> None:
    differences = [0.1, -0.2, 0.3, 0.4, 0.5]
    ranks = range(1, 6)
    observed = abs(
        sum(rank if d > 0 else -rank for rank, d in zip(ranks, differences, strict=True))
    )
    sums = [
        abs(sum(rank if signs >> at & 1 else -rank for at, rank in enumerate(ranks)))
        for signs in range(32)
    ]
    expected = sum(total >= observed for total in sums) / 32
    assert wilcoxon_test(differences) == pytest.approx(expected)


def test_wilcoxon_ties_differences_that_are_equal_as_fractions() -> None:
    # 1/2 − 1/3 and 2/3 − 1/2 differ in their last bit alone.
    unequal = [1 / 2 - 1 / 3, -(2 / 3 - 1 / 2), 0.9]
    assert abs(unequal[0]) != abs(unequal[1])
    assert wilcoxon_test(unequal) == wilcoxon_test([0.25, -0.25, 0.9])


@given(rates, rates)
def test_paired_counts_partition_the_paired_seeds(ours: list[float], theirs: list[float]) -> None:
    size = min(len(ours), len(theirs))
    pair = compare_paired(ours[:size], theirs[:size])
    assert pair.lower + pair.tied + pair.higher == pair.seeds
    both = [
        a - b for a, b in zip(ours, theirs, strict=False) if not (math.isnan(a) or math.isnan(b))
    ]
    assert pair.seeds == len(both)
    assert math.isnan(pair.difference) == (not both)
    assert math.isnan(pair.sign_test_p) == (pair.lower + pair.higher == 0)
    assert math.isnan(pair.wilcoxon_p) == (pair.lower + pair.higher == 0)
    assert math.isnan(pair.difference_ci95[0]) == (len(both) < 2)
    swapped = compare_paired(theirs[:size], ours[:size])
    assert (swapped.lower, swapped.higher) == (pair.higher, pair.lower)


def test_bootstrap_interval_of_a_mean_is_that_of_the_normal_law_for_many_seeds() -> None:
    values = np.random.default_rng(5).normal(0.4, 0.1, size=400)
    low, high = bootstrap_mean(values)
    error = values.std() / math.sqrt(len(values))
    assert (low - values.mean()) / error == pytest.approx(-1.96, abs=0.1)
    assert (high - values.mean()) / error == pytest.approx(1.96, abs=0.1)


def test_bootstrap_leaves_out_nan_and_is_repeatable() -> None:
    values = [0.1, 0.5, NAN, 0.9]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean([0.1, 0.5, 0.9], seed=3)
    assert bootstrap_mean(values, seed=3, resamples=50) != bootstrap_mean(
        values, seed=4, resamples=50
    )


def test_bootstrap_draws_numerator_and_denominator_of_a_seed_together() -> None:
    # Every seed has the share 1/2, so every pooled share is 1/2 however seeds are drawn.
    assert bootstrap_ratio([1, 50, 3], [2, 100, 6]) == (0.5, 0.5)
    low, high = bootstrap_ratio([0, 100], [1, 100])
    assert (low, high) == (0.0, 1.0)


def test_bootstrap_of_a_ratio_takes_part_of_empty_seeds_and_leaves_out_empty_draws() -> None:
    # With an empty seed a draw may weigh the other two unequally, never divide by 0.
    low, high = bootstrap_ratio([1, 3, 0], [4, 4, 0])
    assert (low, high) == (0.25, 0.75)


def test_bootstrap_goes_on_in_blocks() -> None:
    counts = np.ones(30_000)
    assert bootstrap_ratio(counts, 2 * counts, resamples=200) == (0.5, 0.5)


@pytest.mark.parametrize("values", [[], [0.3], [NAN, NAN], [0.3, NAN]])
def test_fewer_than_two_seeds_have_no_interval(values: list[float]) -> None:
    assert all(math.isnan(end) for end in bootstrap_mean(values))
    assert all(math.isnan(end) for end in bootstrap_ratio([1, 0], [2, 0]))
    finite = [value for value in values if not math.isnan(value)]
    assert math.isnan(mean(values)) == (not finite)
