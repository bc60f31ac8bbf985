"""Figures of conditional rates by the data of their artists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltad.analysis import ConditionTable, Question, condition_table, save_figure
from deltad.analysis.figures import colour_of
from deltad.analysis.figures.conditions import draw_condition
from deltad.dumps import Dump
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every column."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    return Dump.open(make_dump(folder, seeds=(0, 1, 2), rows=90, drift=1.5, ranks=1, parts=1))


@pytest.fixture(scope="module")
def table(dump: Dump) -> ConditionTable:
    """Some conditions."""
    return condition_table(dump, by=["entropy", "advantage", "token"])


@pytest.mark.parametrize("condition", ["entropy", "advantage", "token"])
def test_every_bin_has_a_point_its_interval_and_its_guess(
    table: ConditionTable, condition: str
) -> None:
    ax = draw_condition(table, condition)
    for name in table.criteria:
        parts = [part for part in table.of(condition, name) if part.accuracy.whole]
        drawn = [
            np.asarray(line.get_ydata(), dtype=float).tolist()
            for line in ax.lines
            if line.get_color() == colour_of(name) and len(np.asarray(line.get_xdata())) > 0
        ]
        for part in parts:
            assert [part.accuracy.rate] in drawn
            assert list(part.accuracy.ci95) in drawn
    guesses = [
        float(np.asarray(line.get_ydata(), dtype=float)[0])
        for line in ax.lines
        if line.get_linestyle() == ":" and len(np.asarray(line.get_xdata()))
    ]
    bins = table.of(condition, table.criteria[0])
    assert guesses == [
        part.table.outside.constant_guess for part in bins if part.table.outside.tokens
    ]
    labels = [text.get_text() for text in ax.get_xticklabels()]
    assert len(labels) == len(bins)
    for label, part in zip(labels, bins, strict=True):
        assert label.endswith(f"n = {part.table.outside.tokens}")


def test_the_figure_has_axes_a_condition(table: ConditionTable, tmp_path: Path) -> None:
    figure = table.figure()
    assert [ax.get_xlabel().partition(";")[0] for ax in figure.axes] == [
        each.meaning for each in table.conditions
    ]
    assert "top-K KL > 0.15 nats · protocol shared:none · 3 seeds" in figure.get_suptitle()
    save_figure(figure, tmp_path / "conditions.png")


def test_no_token_outside_leaves_empty_axes(dump: Dump) -> None:
    table = condition_table(dump, Question(threshold=1e6), ["entropy", "state"])
    assert [len(ax.get_xticks()) for ax in table.figure().axes] == [0, 2]
