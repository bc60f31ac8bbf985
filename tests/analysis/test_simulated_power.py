"""The model of one more seed, and what is simulated from it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis.statistics import sign_test
from deltad.analysis.tables.power import (
    TESTS,
    SeedModel,
    detectable_difference,
    rejections,
    seed_model,
    seeds_needed,
)

side = st.integers(0, 5).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
seeds = st.lists(st.tuples(side, side), min_size=2, max_size=6)


@settings(max_examples=60)
@given(seeds, st.floats(-0.5, 0.5))
def test_the_model_has_the_mean_and_the_empty_seeds_that_it_was_asked_for(
    seeds: list[tuple[tuple[int, int], tuple[int, int]]], difference: float
) -> None:
    ours, theirs = (np.array([seed[at] for seed in seeds]).T for at in (0, 1))
    model = seed_model((ours[0], ours[1]), (theirs[0], theirs[1]), difference)
    both = (ours[1] > 0) & (theirs[1] > 0)
    if both.sum() < 2:
        assert model is None
        return
    baseline = (theirs[0][both] / theirs[1][both]).mean()
    if not 0 <= baseline + difference <= 1:
        assert model is None or baseline + difference == pytest.approx(round(baseline + difference))
        return
    assert model is not None
    assert model.mean == pytest.approx(difference, abs=1e-9)
    assert model.empty == pytest.approx(1 - both.mean())
    assert model.shares.sum() == pytest.approx(both.mean())
    assert np.all(np.diff(model.values) > 0)


def test_thinning_is_token_by_token() -> None:
    # Rates 1 and 1/2 against 1/2 and 1/2: to a mean of 3/8, each unsafe token stays so with 1/2.
    model = seed_model(([2, 1], [2, 2]), ([1, 2], [2, 4]), -0.125)
    assert model is not None
    expected = {-0.5: 0.25 + 0.5, 0.0: 0.5 + 0.5, 0.5: 0.25 + 0.0}
    assert dict(zip(model.values, 2 * model.shares, strict=True)) == pytest.approx(expected)


def test_the_spread_is_that_of_the_paired_seeds() -> None:
    model = SeedModel(np.array([-0.5, 0.0, 0.5]), np.array([0.25, 0.25, 0.25]), empty=0.25)
    assert model.mean == 0
    assert model.spread == pytest.approx(math.sqrt(1 / 6))


def test_what_is_rejected_is_what_the_tests_reject_in_every_possible_dump() -> None:
    """All dumps of seven seeds, enumerated with their probabilities."""
    model = SeedModel(np.array([-0.5, 0.0, 0.25]), np.array([0.5, 0.1, 0.3]), empty=0.1)
    chances = np.append(model.shares, model.empty)
    expected = np.zeros(3)
    for counts in itertools.product(range(8), repeat=4):
        if sum(counts) != 7:
            continue
        chance = scipy.stats.multinomial.pmf(counts, 7, chances)
        values = np.repeat(model.values, counts[:3])
        rejected: list[Any] = [False, False, False]
        if np.any(values):
            rejected[0] = sign_test(counts[0], counts[2]) <= 0.05
            different = values[values != 0]
            ranks = scipy.stats.rankdata(np.abs(different))
            away = abs(np.sum(np.sign(different) * ranks)) - 1
            rejected[1] = away >= 1.959964 * math.sqrt(np.sum(ranks**2))
        if len(set(values)) > 1:
            rejected[2] = scipy.stats.ttest_1samp(values, 0).pvalue <= 0.05
        elif np.any(values):
            rejected[2] = 2 / 2 ** len(values) <= 0.05
        expected += chance * np.array(rejected)
    found = rejections(model, 7, times=40_000)
    np.testing.assert_allclose([found[name] for name in TESTS], expected, atol=0.01)


def test_a_dump_without_pairs_rejects_nothing() -> None:
    model = SeedModel(np.array([0.0]), np.array([0.5]), empty=0.5)
    assert set(rejections(model, 5, times=50).values()) == {0.0}


@pytest.mark.parametrize("start", [1, 2, 77, 500, 2_000_000])
@pytest.mark.parametrize("true", [2, 3, 80, 1234])
def test_the_smallest_number_is_found_from_anywhere(true: int, start: int) -> None:
    found = seeds_needed(lambda seeds: float(seeds >= true), 0.8, start=start)
    assert found is not None
    assert true <= found <= true + max(0, true // 100)


def test_no_number_of_seeds_is_none() -> None:
    assert seeds_needed(lambda seeds: 0.5, 0.8, start=10) is None


def test_no_detectable_difference_is_nan() -> None:
    assert math.isnan(detectable_difference(lambda difference: 0.1, 0.8, 0.5))
    assert math.isnan(detectable_difference(lambda difference: 1.0, 0.8, 0.0))
    assert detectable_difference(lambda difference: 1.0, 0.8, 0.5) == 0.001
