"""Power tables: of made dumps and of the recorded ones."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest

from deltad.analysis import (
    POWER_COLUMNS,
    PowerTable,
    Question,
    QuestionError,
    RateTable,
    power_table,
    save_figure,
)
from deltad.analysis.export import to_json
from deltad.analysis.rates import Kept, SeedRates
from deltad.analysis.statistics.power import TESTS
from tests.analysis.statistics.coverage import KEPT


def rates_of(seeds: list[tuple[int, int, int, int]]) -> RateTable:
    """A table from unsafe and kept tokens of criterion and baseline, by seed."""

    def kept(unsafe: int, of: int) -> Kept:
        return Kept(np.array([0.1] * unsafe + [-0.1] * (of - unsafe)))

    rows = tuple(
        SeedRates(
            seed=at, tokens=100, outside=50, outside_increase=20, disagreement=n + m,
            disagreement_increase=a + b, without_vectors=0, baseline=kept(b, m),
            criterion=kept(a, n),
        )
        for at, (a, n, b, m) in enumerate(seeds)
    )  # fmt: skip
    return RateTable(Question(protocol="shared:none"), rows)


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
        assert abs(table.dumps.shares(seen, table.seeds)[test] - 0.8) < 0.05


def test_the_t_test_needs_what_its_formula_says(table: PowerTable) -> None:
    model = table.dumps.model(0.1)
    assert model is not None
    expected = 7.85 * (model.spread / 0.1) ** 2 / (1 - model.empty)
    assert table.row("paired t", 0.1).seeds == pytest.approx(expected, rel=0.1)


def test_a_second_table_is_the_same_and_another_random_seed_is_near(table: PowerTable) -> None:
    again = power_table(table.table, points=[0.2], times=600)
    assert again.row("Wilcoxon", 0.2) == table.row("Wilcoxon", 0.2)


def test_every_form_has_the_rows(table: PowerTable) -> None:
    columns = table.columns()
    assert list(columns) == list(POWER_COLUMNS)
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


def test_the_figure_draws_a_curve_a_difference(table: PowerTable) -> None:
    figure = table.figure()
    assert len(figure.axes) == len(TESTS)
    for test, ax in zip(TESTS, figure.axes, strict=True):
        curves = {line.get_label(): line for line in ax.lines}
        for point, label in ((0.0, "equal mean rates"), (0.1, "lower by 10 points")):
            xs, ys = (np.asarray(values).tolist() for values in curves[label].get_data())
            assert ys == [table.dumps.shares(point, int(seeds))[test] for seeds in xs]
        assert "this dump: 30 seeds" in curves
        assert test in ax.get_title()
    save_figure(figure, io.BytesIO(), form="png")


@pytest.mark.parametrize("seeds", [[], [(1, 2, 1, 3)], [(0, 0, 1, 3), (0, 0, 2, 3)]])
def test_fewer_than_two_pairs_say_nothing(seeds: list[Any]) -> None:
    table = power_table(rates_of(seeds), times=50)
    assert table.rows == ()
    assert all(math.isnan(each) for each in table.detectable_here.values())
    assert table.columns() == {name: [] for name in POWER_COLUMNS}
    assert table.to_json_object()["rows"] == []
    assert "says nothing" in str(table)
    assert table.figure().axes[0].texts


def test_a_rate_cannot_fall_below_0() -> None:
    table = power_table(rates_of([(1, 4, 1, 10), (0, 4, 0, 8), (1, 3, 2, 9)]), times=200)
    row = table.row("paired t", 0.5)
    assert row.seeds is None
    assert math.isnan(row.power)
    assert "–" in str(power_table(table.table, points=[0.5], times=50))


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
