"""From one list a token to a response."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deltad.probes.engines import EngineError
from deltad.probes.engines.assemble import (
    Position,
    assemble,
    brief,
    field_of,
    logprob_or_reason,
    whole,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-1.5, (-1.5, None)),
        (0, (0.0, None)),
        (np.float32(-1.5), (-1.5, None)),
        (-math.inf, (-math.inf, None)),
        (None, (None, "null")),
        (math.nan, (None, "nan")),
        (-9999.0, (None, "sentinel")),
        (float(np.finfo(np.float32).min), (None, "sentinel")),
        (-9998.0, (-9998.0, None)),
    ],
)
def test_a_log_prob_is_told_from_what_stands_for_none(
    value: object, expected: tuple[float | None, str | None]
) -> None:
    assert logprob_or_reason("x", value, None, None) == expected


@pytest.mark.parametrize("value", ["-1", True, b"1", [1], {}])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(EngineError, match="must be a number or null"):
        logprob_or_reason("x", value, None, None)


def test_ids_are_whole_numbers_or_their_digits() -> None:
    assert [whole("x", v, "id", None, None) for v in (3, "3", np.int32(3))] == [3, 3, 3]
    for value in (-1, "-1", "3.0", 3.0, True, None, "²"):
        with pytest.raises(EngineError, match="whole number of at least 0"):
            whole("x", value, "id", None, None)


def test_lists_are_sorted_cut_and_padded() -> None:
    made = assemble(
        "x",
        [Position(4, -2.0, [4, 9, 7], [-2.0, -1.0, -3.0]), Position(9, -0.5, [9], [-0.5])],
        sampling={},
        width=2,
    )
    assert made.topk_ids.tolist() == [[9, 4], [9, -1]]
    assert made.texts is None


def test_one_id_twice_is_one_entry_if_its_log_probs_agree() -> None:
    made = assemble("x", [Position(4, -2.0, [4, 4], [-2.0, -2.0])], sampling={})
    assert made.topk_ids.tolist() == [[4]]
    with pytest.raises(EngineError, match="position 0: id 4 is listed twice, with log-probs -2"):
        assemble("x", [Position(4, -2.0, [4, 4], [-2.0, -2.5])], sampling={})


def test_a_list_must_have_a_log_prob_an_id() -> None:
    with pytest.raises(EngineError, match="as many log-probs as ids, got 1 and 2"):
        assemble("x", [Position(4, -2.0, [4, 5], [-2.0])], sampling={})


def test_fields_of_objects_and_mappings() -> None:
    assert field_of({"a": 1}, "a") == field_of(type("O", (), {"a": 1})(), "a") == 1
    assert field_of({}, "a", 2) == field_of(None, "a", 2) == 2
    assert brief("x" * 90).endswith("...")
