"""The forwards that reach every wanted position, and no more than they must."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from deltad.probes.plan import Branch, Plan, Trunk, make_plan


def plan(places: Sequence[tuple[int, int]], overhead: int = 0, **more: object) -> Plan:
    row, column = (np.array(each, np.int64) for each in zip(*places, strict=True))
    return make_plan(row, column, overhead=overhead, **more)  # type: ignore[arg-type]


def test_rows_end_with_their_last_position_and_the_others_are_left_out() -> None:
    found = plan([(3, 5), (3, 2), (1, 9)])
    assert found == Plan((Trunk(0, (Branch((1,), 10), Branch((3,), 6))),))
    assert found.tokens == 16
    assert not found.shares


def test_nothing_wanted_needs_no_forward() -> None:
    none = np.empty(0, np.int64)
    assert make_plan(none, none, overhead=3) == Plan(())
    shared = make_plan(none, none, overhead=3, groups={}, common=len)
    assert shared == Plan(())


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_put_together_in_the_cheapest_way(seed: int) -> None:
    random = np.random.default_rng(seed)
    stops = random.integers(1, 30, 5)
    overhead = int(random.integers(0, 40))
    found = plan([(row, stop - 1) for row, stop in enumerate(stops)], overhead)
    branches = found.trunks[0].branches
    cost = found.tokens + overhead * len(branches)
    assert sorted(row for each in branches for row in each.rows) == list(range(5))
    assert all(each.stop == max(stops[list(each.rows)]) for each in branches)
    every = [
        sum(overhead + part.count(at) * max(stops[row] for row in range(5) if part[row] == at)
            for at in set(part))
        for part in itertools.product(range(5), repeat=5)
    ]  # fmt: skip
    assert cost == min(every)


def test_many_lengths_are_rounded_up() -> None:
    found = plan([(row, row) for row in range(1000)], 50)
    reached = {row: each.stop for each in found.trunks[0].branches for row in each.rows}
    assert all(reached[row] >= row + 1 for row in range(1000))
    assert found.tokens < 1.1 * 1000 * 1001 / 2


def test_what_a_group_begins_with_is_forwarded_once() -> None:
    groups = {0: 7, 1: 7, 2: 8, 3: 7}
    places = [(0, 12), (1, 9), (2, 20), (3, 9), (3, 30)]
    found = plan(places, groups=groups, common=lambda rows: 8)
    assert found.trunks[0].length == 8
    assert {row for each in found.trunks[0].branches for row in each.rows} == {0, 1, 3}
    assert found.trunks[1] == Trunk(0, (Branch((2,), 21),))
    assert found.tokens == 8 + 5 + 2 + 23 + 21
    assert found.shares


def test_what_is_wanted_lies_behind_what_is_shared() -> None:
    found = plan([(0, 4), (1, 9)], groups={0: 0, 1: 0}, common=lambda rows: 8)
    assert found.trunks[0].length == 4


def test_little_is_not_worth_sharing() -> None:
    found = plan([(0, 14), (1, 9)], 20, groups={0: 0, 1: 0}, common=lambda rows: 8)
    assert not found.shares
