"""Shared states, against every pair of siblings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis.responses import (
    OWN_STATE,
    SHARED_STATE,
    UNKNOWN_STATE,
    Responses,
    read_responses,
)
from deltad.dumps import Dump
from tests.dumps.factory import Columns, make_dump

response = st.tuples(
    st.integers(0, 1), st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=5)
)


def brute(responses: list[tuple[int, int, list[int]]], at: int, position: int) -> int:
    """Whether some other response of the group begins with the same tokens."""
    step, group, tokens = responses[at]
    siblings = [
        other
        for place, (s, g, other) in enumerate(responses)
        if place != at and (s, g) == (step, group)
    ]
    shared = any(other[:position] == tokens[:position] for other in siblings)
    return SHARED_STATE if shared or position == 0 else OWN_STATE


def table(responses: list[tuple[int, int, list[int]]]) -> list[tuple[int, ...]]:
    """Rows of step, group, sequence, position, token."""
    return [
        (step, group, sequence, position, token)
        for sequence, (step, group, tokens) in enumerate(responses)
        for position, token in enumerate(tokens)
    ]


@settings(max_examples=50)
@given(st.lists(response, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_a_state_is_shared_where_a_sibling_had_the_same_tokens(
    responses: list[tuple[int, int, list[int]]], random: Any
) -> None:
    rows = table(responses)
    shuffled = list(rows)
    random.shuffle(shuffled)
    known = Responses(np.array(shuffled, dtype=np.int64), whole=True)
    columns = np.array(rows)
    found = known.state(columns[:, 0], columns[:, 2], columns[:, 3])
    assert found.tolist() == [brute(responses, row[2], row[3]) for row in rows]


def test_behind_a_missing_token_a_group_is_unknown_and_other_groups_are_not() -> None:
    rows = table([(0, 0, [1, 2, 3]), (0, 0, [1, 2, 4]), (0, 1, [5, 6]), (0, 1, [5, 6])])
    del rows[4]  # the second token of the second response
    known = Responses(np.array(rows, dtype=np.int64), whole=True)
    assert known.state([0, 0], [0, 0], [0, 1]).tolist() == [SHARED_STATE, UNKNOWN_STATE]
    assert known.state([0, 0], [1, 1], [0, 2]).tolist() == [SHARED_STATE, UNKNOWN_STATE]
    assert known.state([0], [2], [1]).tolist() == [SHARED_STATE]


def test_a_token_that_stands_twice_makes_its_group_unknown() -> None:
    rows = [*table([(0, 0, [1, 2]), (0, 0, [1, 2])]), (0, 0, 1, 1, 2)]
    known = Responses(np.array(rows, dtype=np.int64), whole=True)
    assert known.state([0, 0], [0, 0], [0, 1]).tolist() == [SHARED_STATE, UNKNOWN_STATE]


def test_a_thinned_dump_knows_first_positions_alone(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), stored=("kl", 0.05)))
    known = read_responses(dump, "none", 0)
    assert known.state([0, 0], [1000, 1000], [0, 1]).tolist() == [SHARED_STATE, UNKNOWN_STATE]


def test_a_whole_dump_is_read_across_its_files(tmp_path: Path) -> None:
    def keep_columns(arm: str, seed: int, columns: Columns) -> None:
        for name in ("step", "group", "sequence", "position", "token_id"):
            kept[name] = columns[name].copy()

    kept: Columns = {}
    run = make_dump(
        tmp_path / "run", arms=("none",), seeds=(0,), top_k=2, vocab_size=3, change=keep_columns
    )
    known = read_responses(Dump.open(run), "none", 0)
    responses = {
        sequence: (
            int(kept["step"][kept["sequence"] == sequence][0]),
            int(kept["group"][kept["sequence"] == sequence][0]),
            kept["token_id"][kept["sequence"] == sequence].tolist(),
        )
        for sequence in np.unique(kept["sequence"]).tolist()
    }
    found = known.state(kept["step"], kept["sequence"], kept["position"])
    listed, places = list(responses.values()), list(responses)
    expected = [
        brute(listed, places.index(sequence), position)
        for sequence, position in zip(kept["sequence"], kept["position"], strict=True)
    ]
    assert found.tolist() == expected
    assert {OWN_STATE, SHARED_STATE} == set(expected)
