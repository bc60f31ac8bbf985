"""Laws of Holm's correction."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis.statistics import holm

shares = st.floats(0, 1)


def step_down(p_values: list[float], level: float) -> set[int]:
    """Which hypotheses Holm's procedure rejects, step by step as he wrote it."""
    rejected: set[int] = set()
    left = list(range(len(p_values)))
    while left:
        smallest = min(left, key=lambda at: p_values[at])
        if p_values[smallest] > level / len(left):
            break
        rejected.add(smallest)
        left.remove(smallest)
    return rejected


@given(st.lists(shares, max_size=6), st.floats(0.001, 0.999))
def test_what_is_rejected_is_what_the_procedure_rejects(p: list[float], level: float) -> None:
    corrected = holm(p)
    # Too near to the level to compare where rounding may decide.
    if any(abs(value - level) < 1e-9 for value in corrected):
        return
    assert set(np.flatnonzero(corrected <= level)) == step_down(p, level)


@given(st.lists(shares, max_size=6))
def test_the_order_of_the_tests_does_not_matter(p: list[float]) -> None:
    order = np.argsort(np.random.default_rng(len(p)).random(len(p)))
    np.testing.assert_array_equal(holm(np.array(p)[order]), holm(p)[order])


@given(st.lists(shares, max_size=6))
def test_a_test_that_could_not_be_made_takes_no_part(p: list[float]) -> None:
    with_gaps = [value for each in p for value in (math.nan, each)]
    corrected = holm(with_gaps)
    assert np.isnan(corrected[::2]).all()
    np.testing.assert_array_equal(corrected[1::2], holm(p))
    assert np.all(corrected[1::2] >= np.array(p))
    assert np.all(corrected[1::2] <= 1)


@pytest.mark.parametrize("p", [-0.01, 1.5, math.inf])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        holm([0.5, p])
