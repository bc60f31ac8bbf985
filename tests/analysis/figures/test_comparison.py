"""The comparison's figures by the data of their artists."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from matplotlib.axes import Axes

from deltad.analysis import Comparison, Question, compare, save_figure
from deltad.analysis.figures import colour_of
from deltad.analysis.figures.comparison import draw_agreement, draw_sign_accuracy
from deltad.dumps import Dump
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump that answers for all criteria."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    return Dump.open(make_dump(folder, seeds=(0, 1, 2), rows=120, drift=1.5, ranks=1, parts=1))


@pytest.fixture(scope="module")
def comparison(dump: Dump) -> Comparison:
    """Some criteria against the ratio."""
    return compare(dump, criteria=["predictive-kl-aggregated", "clip-higher", "icepop"])


def points(ax: Axes, colour: str, *, filled: bool) -> list[float]:
    """Where a criterion's points stand."""
    face = colour if filled else "white"
    return [
        float(np.asarray(line.get_xdata(), dtype=float)[0])
        for line in ax.lines
        if line.get_marker() == "o"
        and line.get_color() == colour
        and line.get_markerfacecolor() == face
        and len(np.asarray(line.get_xdata())) == 1
    ]


def test_the_heat_map_holds_every_pair(comparison: Comparison) -> None:
    ax = draw_agreement(comparison)
    (image,) = ax.images
    assert np.asarray(image.get_array()) == pytest.approx(comparison.agreement)
    cells = [text.get_text() for text in ax.texts]
    assert cells == [f"{100 * share:.0f}" for share in comparison.agreement.ravel()]
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels[0] == "ratio 1"
    assert len(labels) == len(comparison.names)


def test_the_forest_holds_every_accuracy_with_its_interval(comparison: Comparison) -> None:
    ax = draw_sign_accuracy(comparison)
    for place, each in enumerate(comparison.criteria):
        colour = colour_of(each.name)
        assert points(ax, colour, filled=True) == [pytest.approx(each.outside.rate)]
        expected = [] if math.isnan(each.disagreement.rate) else [each.disagreement.rate]
        assert points(ax, colour, filled=False) == pytest.approx(expected)
        ticks = [
            np.asarray(line.get_xdata(), dtype=float).tolist()
            for line in ax.lines
            if line.get_marker() == "|" and line.get_color() == colour
        ]
        assert ticks == [pytest.approx(list(each.outside.by_seed))]
        spans = [
            np.asarray(line.get_xdata(), dtype=float).tolist()
            for line in ax.lines
            if line.get_color() == colour
            and line.get_marker() in ("", "None")
            and place - 0.5 < float(np.asarray(line.get_ydata(), dtype=float)[0]) < place + 0.5
        ]
        assert list(each.outside.ci95) in spans
    (guess,) = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert np.asarray(guess.get_xdata(), dtype=float)[0] == comparison.outside.constant_guess


def test_the_figure_says_what_was_asked(comparison: Comparison) -> None:
    figure = comparison.figure()
    title = figure.get_suptitle()
    for words in ("against ratio", "top-K KL > 0.15 nats", "shared:none", "3 seeds"):
        assert words in title
    assert f"{comparison.outside.tokens} tokens outside" in title
    file = io.BytesIO()
    save_figure(figure, file, form="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_where_nothing_is_judged_it_says_so(dump: Dump) -> None:
    own = compare(dump, Question(protocol="own"))
    ax = draw_sign_accuracy(own)
    assert "no sign is judged here" in [text.get_text() for text in ax.texts]
    assert not [line for line in ax.lines if line.get_linestyle() == ":"]
    empty = compare(dump, Question(threshold=1e6))
    assert len(draw_agreement(empty).texts) == 0
    assert len(empty.figure().axes) == 2
