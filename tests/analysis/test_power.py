"""Power tables: of made dumps and of the recorded ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis import POWER_COLUMNS, PowerTable, Question, QuestionError, power_table
from deltad.analysis.result import to_json
from deltad.analysis.tables.power import TESTS
from deltad.analysis.tables.rates import RateTable, rate_table
from deltad.dumps import Dump
from deltad.tally import FIELDS, SETS
from tests.analysis.statistics.coverage import KEPT
from tests.dumps.factory import Columns, make_dump


def rates_of(seeds: list[tuple[int, int, int, int]], undetermined: int = 0) -> RateTable:
    """A table from unsafe and determined tokens of criterion and baseline, by seed."""

    def counts(unsafe: int, of: int) -> list[float]:
        whole = of + undetermined
        return [whole, undetermined, whole, of, unsafe, of - unsafe, of, unsafe, of - unsafe]

    sets = {name: np.zeros((len(seeds), len(FIELDS))) for name in SETS}
    for at, (a, n, b, m) in enumerate(seeds):
        sets["criterion_kept"][at] = counts(a, n)
        sets["baseline_kept"][at] = counts(b, m)
    none = np.zeros(len(seeds))
    question = Question(protocol="shared:none")
    return RateTable(question, tuple(range(len(seeds))), none + 100, none, sets)


@pytest.fixture(scope="module")
def table() -> PowerTable:
    """Of seeds like those of the tiny model."""
    rng = np.random.default_rng(0)
    seeds = [
        (int(rng.binomial(few, 0.45)), int(few), int(rng.binomial(many, 0.47)), int(many))
        for many, few in KEPT[:30]
    ]
    return power_table(rates_of(seeds), points=[0.2, 0.1], times=600)


def test_more_seeds_see_smaller_differences_and_a_search_ends_at_its_goal(
    table: PowerTable,
) -> None:
    assert table.points == (0.1, 0.2)
    for test in TESTS:
        small, large = (table.row(test, point) for point in table.points)
        assert small.seeds is not None
        assert large.seeds is not None
        assert small.seeds > large.seeds
        for row in (small, large):
            assert 0.8 <= row.power < 0.88
        assert large.power_here > small.power_here > table.rejects_equal_here[test]
        # The difference that these seeds see is between those that need more and fewer.
        seen = table.detectable_here[test]
        assert (seen > 0.1) == (small.seeds > table.seeds)
        assert abs(table.shares(seen, table.seeds)[test] - 0.8) < 0.05


def test_the_t_test_needs_what_its_formula_says(table: PowerTable) -> None:
    model = table.model(0.1)
    assert model is not None
    expected = 7.85 * (model.spread / 0.1) ** 2 / (1 - model.empty)
    assert table.row("paired t", 0.1).seeds == pytest.approx(expected, rel=0.1)


def test_a_second_table_is_the_same_and_another_random_seed_is_near(table: PowerTable) -> None:
    again = power_table(table.pair, points=[0.2], times=600)
    assert again.row("Wilcoxon", 0.2).seeds == table.row("Wilcoxon", 0.2).seeds


def test_undetermined_tokens_are_left_out_as_in_the_rate_table(tmp_path: Path) -> None:
    def bound(arm: str, seed: int, columns: Columns) -> None:
        columns["delta_d_noise"] = np.full(len(columns["step"]), 0.05)

    run = make_dump(tmp_path / "run", rows=150, drift=1.5, seeds=range(4), change=bound)
    rates = rate_table(Dump.open(run))
    assert rates.pair.criterion.undetermined
    dump = power_table(rates, times=50).to_json_object()["dump"]
    both = ~np.isnan(rates.pair.criterion.rates) & ~np.isnan(rates.pair.baseline.rates)
    assert dump["criterion_rate"] == rates.pair.criterion.rates[both].mean()
    assert dump["baseline_rate"] == rates.pair.baseline.rates[both].mean()
    few = [(1, 3, 4, 8), (2, 4, 3, 9), (0, 2, 5, 7)]
    for options in ({}, {"undetermined": 5}):
        model = power_table(rates_of(few, **options)).model(0.1)
        assert model is not None
        assert model.mean == pytest.approx(-0.1)
    assert model.spread == power_table(rates_of(few)).model(0.1).spread  # type: ignore[union-attr]


def test_every_form_has_the_rows(table: PowerTable) -> None:
    columns = table.to_dict()
    assert list(columns) == [each.name for each in POWER_COLUMNS]
    assert columns["test"] == [test for test in TESTS for _ in table.points]
    found = table.to_json_object()
    assert [row["seeds"] for row in found["rows"]] == columns["seeds"]
    assert found["dump"]["seeds"] == 30
    assert found["dump"]["paired"] + found["dump"]["without_rate"] == 30
    assert found["simulation"] == {"dumps": 600, "seed": 0}
    text = str(table)
    for words in ("10 points", "sign test", "600 dumps", "random seed 0", "rejects equal"):
        assert words in text
    assert "nan" not in text
    to_json(found)


@pytest.mark.parametrize("seeds", [[], [(1, 2, 1, 3)], [(0, 0, 1, 3), (0, 0, 2, 3)]])
def test_fewer_than_two_pairs_say_nothing(seeds: list[Any]) -> None:
    table = power_table(rates_of(seeds), times=50)
    assert table.rows == ()
    assert all(math.isnan(each) for each in table.detectable_here.values())
    assert not any(table.to_dict().values())
    assert table.to_json_object()["rows"] == []
    assert "says nothing" in str(table)


def test_a_rate_cannot_fall_below_0() -> None:
    table = power_table(rates_of([(1, 4, 1, 10), (0, 4, 0, 8), (1, 3, 2, 9)]), times=200)
    row = table.row("paired t", 0.5)
    assert row.seeds is None
    assert math.isnan(row.power)
    assert "–" in str(power_table(table.pair, points=[0.5], times=50))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"points": [0.0]}, "`points` must lie between 0.01"),
        ({"points": [1.5]}, "150"),
        ({"points": []}, "got none"),
        ({"points": [math.nan]}, "nan"),
        ({"power": 1.0}, "`power` must lie between 1e-06"),
        ({"level": 0.0}, "`level` must lie between 1e-06"),
        ({"level": 0.9}, "`power` must be above `level`"),
    ],
)
def test_numbers_outside_their_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QuestionError, match=words):
        power_table(rates_of([]), **options)
