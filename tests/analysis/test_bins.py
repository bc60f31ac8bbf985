"""Bins by quantile, with ties."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis.bins import UNKNOWN, bin_of, interval_label, quantile_edges

numbers = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, -1.0, math.inf, math.nan]), st.floats(-5, 5)), max_size=30
)


@settings(max_examples=60)
@given(numbers, st.integers(1, 9))
def test_every_number_is_in_one_bin_and_no_bin_is_empty(values: list[float], bins: int) -> None:
    edges = quantile_edges(values, bins)
    places = bin_of(values, edges)
    known = [value for value in values if not math.isnan(value)]
    assert [place == UNKNOWN for place in places] == [math.isnan(value) for value in values]
    if not known:
        assert len(edges) == 0
        return
    assert edges[0] == min(known)
    assert edges[-1] == max(known)
    assert 1 <= len(edges) - 1 <= min(bins, len(set(known)))
    assert set(places) - {UNKNOWN} == set(range(len(edges) - 1))
    for value, place in zip(values, places, strict=True):
        if place != UNKNOWN:
            low, high = edges[place], edges[place + 1]
            assert low < value <= high or (place == 0 and low <= value <= high)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60, unique=True), st.integers(1, 9))
def test_bins_of_distinct_numbers_are_as_equal_as_they_can_be(values: list[int], bins: int) -> None:
    places = bin_of(values, quantile_edges(values, bins))
    sizes = np.bincount(places)
    assert len(sizes) == min(bins, len(values))
    assert sizes.max() - sizes.min() <= 1


def test_labels_say_which_end_belongs_to_a_bin() -> None:
    assert interval_label(0, 3, first=True) == "[0, 3]"
    assert interval_label(0.123456, 1234.5, first=False) == "(0.123, 1.23e+03]"
    assert interval_label(-1.0, math.inf, first=False) == "(−1, inf]"
    assert interval_label(2.0, 2.0, first=True) == "2"
