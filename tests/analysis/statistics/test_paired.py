"""Two rates compared seed by seed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis.statistics import compare_paired

NAN = math.nan
rates = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, NAN]), max_size=12)


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
    for p in (pair.sign_test_p, pair.wilcoxon_p, pair.permutation_p):
        assert math.isnan(p) == (pair.lower + pair.higher == 0)
    assert math.isnan(pair.difference_ci95[0]) == (len(both) < 2)
    swapped = compare_paired(theirs[:size], ours[:size])
    assert (swapped.lower, swapped.higher) == (pair.higher, pair.lower)


def test_a_seed_without_a_rate_is_no_tie() -> None:
    pair = compare_paired([0.5, NAN, 0.25, NAN], [0.5, 0.5, NAN, NAN])
    assert (pair.seeds, pair.lower, pair.tied, pair.higher) == (1, 0, 1, 0)


def test_how_many_flips_were_tried_is_told() -> None:
    few = compare_paired([0.0, 0.5, 0.25], [0.5, 0.5, 0.0])
    assert (few.permutation_exact, few.permutation_flips) == (True, 4)
    many = compare_paired([0.0] * 40, [0.5] * 40)
    assert (many.permutation_exact, many.permutation_flips) == (False, 100_000)
    assert many.permutation_p == 1 / 100_001
