"""Figures of a calibration by the data of their artists."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes

from deltad.analysis import Calibration, Question, calibrate
from deltad.analysis.figures.calibration import draw_calibration, draw_increase
from deltad.dumps import Dump
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every column."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    return Dump.open(
        make_dump(folder, arms=("none",), seeds=(0, 1, 2), rows=90, drift=1.5, ranks=1, parts=1)
    )


@pytest.fixture(scope="module")
def calibration(dump: Dump) -> Calibration:
    """All directions."""
    return calibrate(dump, bins=3)


def heights(ax: Axes, name: str) -> list[float]:
    """Heights of a direction's line."""
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(f"{name}: ")]
    return [float(value) for value in np.asarray(line.get_ydata(), dtype=float)]


def test_lines_go_through_the_bins(calibration: Calibration) -> None:
    means, shares = draw_calibration(calibration), draw_increase(calibration)
    for each in calibration.predictors:
        name = each.predictor.name
        assert heights(means, name) == [part.delta_d.rate for part in each.bins]
        assert heights(shares, name) == [part.increase.rate for part in each.bins]
    drawn = [np.asarray(line.get_ydata(), dtype=float).tolist() for line in means.lines]
    assert list(calibration.predictors[0].bins[0].delta_d.ci95) in drawn
    base = [line for line in shares.lines if str(line.get_label()).startswith("base rate")]
    assert np.asarray(base[0].get_ydata(), dtype=float)[0] == calibration.base.increase_rate


def test_a_triangle_marks_where_the_prediction_turns_positive(calibration: Calibration) -> None:
    ax = draw_increase(calibration)
    marks = [
        float(np.asarray(line.get_xdata(), dtype=float)[0])
        for line in ax.lines
        if line.get_marker() == "^" and len(np.asarray(line.get_xdata()))
    ]
    expected = [
        float(np.mean(np.concatenate(each.predictions) <= 0)) for each in calibration.predictors
    ]
    assert marks == pytest.approx(expected)


def test_the_figure_says_what_was_asked(calibration: Calibration) -> None:
    figure = calibration.figure()
    title = figure.get_suptitle()
    assert "top-K KL > 0.15 nats · protocol shared:none\n3 seeds" in title
    assert f"{calibration.base.tokens} tokens outside" in title


def test_no_token_outside_is_said(dump: Dump) -> None:
    empty = calibrate(dump, Question(threshold=1e6))
    assert [text.get_text() for text in draw_increase(empty).texts] == ["no token outside"]
    assert len(empty.figure().axes) == 2
