"""Columns as text: nothing is lost but what is meant to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltad.analysis.report.encode import BEYOND, QUANTUM, TYPES, UNKNOWN, decode, encode, quantised


@given(
    st.sampled_from(sorted(TYPES)).flatmap(lambda name: arrays(np.dtype(name), st.integers(0, 40)))
)
def test_a_column_comes_back_to_the_last_bit(values: Any) -> None:
    back = decode(encode(values), values.dtype.name)
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes()


def test_rows_of_lists_lie_one_after_another() -> None:
    lists = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert decode(encode(lists), "uint16").tolist() == list(range(12))


def test_big_endian_numbers_are_written_as_any_others() -> None:
    values = np.array([0.15, -2.0])
    assert encode(values.astype(">f8")) == encode(values)


def test_a_type_that_no_page_holds_is_refused() -> None:
    with pytest.raises(KeyError):
        encode(np.zeros(2, dtype=np.int64))


@given(st.floats(0, 31.9))
def test_a_quantised_log_prob_is_off_by_half_a_step_at_most(nats: float) -> None:
    steps = int(quantised(np.array([nats]))[0])
    assert abs(steps * QUANTUM - nats) <= QUANTUM / 2


def test_what_cannot_be_quantised_has_signs_of_its_own() -> None:
    found = quantised(np.array([-1e-5, 40.0, np.inf, np.nan]))
    assert found.tolist() == [0, BEYOND, BEYOND, UNKNOWN]
