"""Figures of sweeps by the data of their artists."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from deltad.analysis import Sweep, save_figure, sweep
from deltad.analysis.figures import colour_of
from deltad.analysis.figures.sweeps import (
    draw_swept_counts,
    draw_swept_rates,
    draw_swept_signs,
)
from deltad.dumps import Dump
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump that answers every protocol."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    return Dump.open(make_dump(folder, seeds=(0, 1, 2), rows=90, drift=1.5, ranks=1, parts=1))


@pytest.fixture(scope="module", params=["threshold", "top-k", "protocol"])
def swept(dump: Dump, request: pytest.FixtureRequest) -> Sweep:
    """Each kind of sweep."""
    values = {"threshold": (0.05, 0.15, 0.4), "top-k": (), "protocol": ()}[request.param]
    return sweep(dump, over=request.param, values=values)


def labelled(ax: Axes, start: str) -> list[float]:
    """Heights of the line whose label begins so."""
    (found,) = [line for line in ax.lines if str(line.get_label()).startswith(start)]
    return [float(value) for value in np.asarray(found.get_ydata(), dtype=float)]


def test_lines_go_through_the_rates_and_the_base_rate(swept: Sweep) -> None:
    ax = draw_swept_rates(swept)
    for side in ("criterion", "baseline"):
        name = getattr(swept.question, side)
        expected = [getattr(point.table, side).unsafe_keep_rate for point in swept.points]
        assert labelled(ax, name) == pytest.approx(expected, nan_ok=True)
        spans = [
            np.asarray(line.get_ydata(), dtype=float).tolist()
            for line in ax.lines
            if line.get_color() == colour_of(name)
        ]
        for point in swept.points:
            interval = getattr(point.table, side).unsafe_keep_rate_ci95
            assert math.isnan(interval[0]) or list(interval) in spans
    base = [point.table.disagreement.increase_rate for point in swept.points]
    assert labelled(ax, "P(ΔD > 0)") == pytest.approx(base, nan_ok=True)


def test_signs_stand_beside_the_constant_guess(swept: Sweep) -> None:
    ax = draw_swept_signs(swept)
    for side in ("criterion", "baseline"):
        expected = [point.accuracy[side].rate for point in swept.points]
        assert labelled(ax, getattr(swept.question, side)) == pytest.approx(expected, nan_ok=True)
    guess = [point.table.outside.constant_guess for point in swept.points]
    assert labelled(ax, "constant guess") == pytest.approx(guess, nan_ok=True)


def test_counts_are_those_of_the_points(swept: Sweep) -> None:
    ax = draw_swept_counts(swept)
    assert labelled(ax, "outside") == [point.table.outside.tokens for point in swept.points]
    for side in ("criterion", "baseline"):
        assert labelled(ax, f"kept by the {side}") == [
            getattr(point.table, side).kept for point in swept.points
        ]


def test_the_figure_names_what_is_swept_and_its_points(swept: Sweep, tmp_path: Path) -> None:
    figure = swept.figure()
    assert "predictive-kl-aggregated against ratio" in figure.get_suptitle()
    assert "3 seeds" in figure.get_suptitle()
    last = figure.axes[-1]
    words = {"threshold": "δ, nats", "top-k": "K', ids", "protocol": "protocol"}
    assert last.get_xlabel().startswith(words[swept.over])
    labels = [text.get_text().replace("\n", "") for text in last.get_xticklabels()]
    assert labels == [
        point.value if isinstance(point.value, str) else f"{point.value:g}"
        for point in swept.points
    ]
    if swept.over == "protocol":
        save_figure(figure, tmp_path / "sweep.png")


@pytest.mark.parametrize("values", [(0.0, 0.1), (0.15,), (1e6,)])
def test_a_threshold_of_nothing_and_a_single_point_can_be_drawn(
    dump: Dump, values: tuple[float, ...]
) -> None:
    figure = sweep(dump, values=values).figure()
    assert len(figure.axes[0].get_xticks()) == len(values)
