"""Pairs of criteria made of known ΔD: counts, pooled shares, seeds without a rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis import Question
from deltad.analysis.pairs import Estimate, Pair, pair_columns
from deltad.analysis.statistics import bootstrap_ratio
from deltad.tally import SETS, Judged, count_pair

Kept = tuple[list[float], list[float]]
"""ΔD of the disagreement tokens that the criterion keeps, and that the baseline does."""

deltas = st.lists(st.sampled_from([-0.5, 0.0, 0.25, math.nan]), max_size=6)


def pair_of(seeds: list[Kept], protocol: str = "shared:none") -> Pair:
    """A pair of these disagreement tokens, by seed."""
    counts = []
    for ours, theirs in seeds:
        keep = np.arange(len(ours) + len(theirs)) < len(ours)
        judged = Judged.of(np.array([*ours, *theirs], float))
        counts.append(count_pair(judged, keep, ~keep))
    return Pair(
        Question(protocol=protocol),
        tuple(range(len(seeds))),
        np.full(len(seeds), 10.0),
        np.zeros(len(seeds)),
        {name: np.array([each[name] for each in counts]).reshape(len(seeds), -1) for name in SETS},
    )


@given(st.lists(st.tuples(deltas, deltas), min_size=1, max_size=5))
def test_the_two_criteria_predict_each_disagreement_token_one_or_the_other(
    seeds: list[Kept],
) -> None:
    pair = pair_of(seeds)
    ours, theirs = (pair.accuracy(side, "disagreement") for side in ("criterion", "baseline"))
    known = [delta for kept in seeds for some in kept for delta in some if not math.isnan(delta)]
    assert ours.part + theirs.part == ours.whole == theirs.whole == len(known)
    right = sum(sum(d <= 0 for d in kept[0]) + sum(d > 0 for d in kept[1]) for kept in seeds)
    assert ours.part == right
    assert pair_of(seeds, "own").accuracy("criterion").whole == 0
    if known:
        most = max(sum(d > 0 for d in known), sum(d <= 0 for d in known))
        assert pair.disagreement.constant_guess == pytest.approx(most / len(known))


def test_the_contracting_fraction_is_pooled_and_the_rate_is_a_mean_over_seeds() -> None:
    pair = pair_of([([0.25], [0.25]), ([-0.5, 0.0, 0.0], [-0.5, -0.5])])
    assert pair.criterion.unsafe_keep_rate == (1 + 0) / 2
    assert pair.criterion.contracting_fraction == 1 / 4
    assert (pair.baseline.unsafe_keep_rate, pair.baseline.contracting_fraction) == (0.5, 2 / 3)
    assert pair.criterion.of("unsafe") == "1 / 4"


def test_a_seed_without_a_rate_is_in_no_mean_and_in_no_pair() -> None:
    pair = pair_of([([0.25, -0.5], [0.25]), ([], [-0.5]), ([math.nan], [0.25]), ([-0.5], [0.25])])
    assert np.array_equal(pair.criterion.rates, [0.5, math.nan, math.nan, 0], equal_nan=True)
    assert (pair.criterion.seeds, pair.criterion.unsafe_keep_rate) == (2, 0.25)
    assert (pair.paired.seeds, pair.paired.lower, pair.paired.higher) == (2, 2, 0)
    assert pair.paired.difference == pytest.approx(-0.75)
    assert [each.seeds for each in pair.by_seed] == [(0,), (1,), (2,), (3,)]
    assert [each.criterion.kept for each in pair.by_seed] == [2, 0, 1, 1]


def test_pooled_differences_are_those_of_all_kept_tokens() -> None:
    pair = pair_of([([0.25, -0.5], [0.25]), ([], [-0.5, 0.25]), ([-0.5, 0.0], [-0.5])])
    assert pair.pooled_unsafe.difference == pytest.approx(1 / 4 - 2 / 4)
    assert pair.pooled_contracting.difference == pytest.approx(2 / 4 - 2 / 4)
    assert (pair.pooled_unsafe.clusters, pair.pooled_unsafe.degrees) == (3, 1)


def test_an_estimate_is_pooled_and_its_interval_is_over_seeds() -> None:
    share = Estimate.of([1, 0, 3], [2, 0, 4], 7)
    assert (share.part, share.whole, share.value) == (4, 6, 4 / 6)
    assert share.ci95 == bootstrap_ratio([1, 0, 3], [2, 0, 4], seed=7)
    assert np.array_equal(share.by_seed, [0.5, math.nan, 0.75], equal_nan=True)


@pytest.mark.parametrize("wholes", [[], [0, 0, 0], [2, math.nan, 4]])
def test_an_estimate_of_nothing_or_of_what_is_not_known_is_undefined(wholes: list[float]) -> None:
    share = Estimate.of(np.zeros(len(wholes)), wholes)
    assert all(math.isnan(each) for each in (share.value, *share.ci95))
    assert len(share.by_seed) == len(wholes)


def test_columns_have_names_of_their_own_and_meanings() -> None:
    columns = pair_columns(lambda pair: pair)
    assert len({each.name for each in columns}) == len(columns)
    assert all(each.meaning for each in columns)
    pair = pair_of([([0.25], [-0.5])])
    found = {each.name: each.value(pair) for each in columns}
    assert (found["criterion_unsafe"], found["baseline_contracting"], found["lower"]) == (1, 1, 0)
