"""Figures by the data of their artists."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from deltad.analysis import Question, QuestionError, RateTable, figure4, paper, save_figure
from deltad.analysis.figures import (
    COLOURS,
    colour_of,
    draw_contracting,
    draw_delta_d,
    draw_paired_rates,
)
from deltad.analysis.rates import Kept, SeedRates
from deltad.weights import WEIGHTS


def table(*seeds: tuple[list[float], list[float]], **question: Any) -> RateTable:
    """A table from the ΔD that criterion and baseline keep, by seed."""
    rows = []
    for seed, (ours, theirs) in enumerate(seeds):
        deltas = np.array([*ours, *theirs])
        rows.append(
            SeedRates(
                seed=seed,
                tokens=100,
                outside=40,
                outside_increase=20,
                disagreement=len(deltas),
                disagreement_increase=int((deltas > 0).sum()),
                without_vectors=0,
                baseline=Kept(np.array(theirs, dtype=float)),
                criterion=Kept(np.array(ours, dtype=float)),
            )
        )
    question.setdefault("protocol", "shared:none")
    return RateTable(Question(**question), tuple(rows))


TABLE = table(
    ([-0.1, -0.02, 0.3], [0.1, 0.2]),  # 1/3 against 1: lower
    ([0.5], [-0.4, 0.1]),  # 1 against 1/2: higher
    ([-0.5], [-0.001]),  # tied at 0
    ([], [0.7, -0.2]),  # the baseline alone
    ([], []),
)


def data(line: Line2D) -> tuple[list[float], list[float]]:
    """What a line goes through."""
    xs, ys = (np.asarray(values, dtype=float).tolist() for values in line.get_data())
    return xs, ys


def lines(ax: Axes, colour: str) -> list[list[float]]:
    """Heights of the drawn lines of one colour that join the two criteria."""
    drawn = [data(line) for line in ax.lines if line.get_color() == colour]
    return [ys for xs, ys in drawn if xs == [0, 1]]


def diamonds(ax: Axes) -> list[tuple[float, float]]:
    """Places of the paper's marks."""
    marks = [data(line) for line in ax.lines if line.get_marker() == "D"]
    return [place for xs, ys in marks for place in zip(xs, ys, strict=True)]


def legend(ax: Axes) -> list[str]:
    """Words of the legend."""
    found = ax.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_every_criterion_has_a_colour_of_its_own_within_its_family() -> None:
    for family in ("kl", "tv"):
        names = [
            name
            for name, entry in WEIGHTS.items()
            if entry.criterion is None or entry.criterion.family in (None, family)
        ]
        colours = [colour_of(name) for name in names]
        assert len(set(colours)) == len(colours) == len(COLOURS)


def test_histograms_hold_every_moved_token_on_its_side_of_zero() -> None:
    ax = draw_delta_d(TABLE)
    outlines = [patch for patch in ax.patches if isinstance(patch, StepPatch) and not patch.fill]
    assert len(outlines) == 2
    for patch, deltas in zip(
        outlines, (TABLE.delta_d("criterion"), TABLE.delta_d("baseline")), strict=True
    ):
        shares, edges, _ = patch.get_data()
        assert shares.sum() == pytest.approx(1)
        assert shares[edges[1:] <= 0].sum() == pytest.approx((deltas < 0).mean())
        assert shares[edges[:-1] >= 0].sum() == pytest.approx((deltas > 0).mean())
        assert edges == pytest.approx(-edges[::-1])
    ours, theirs = legend(ax)
    assert ours.startswith("predictive-kl-aggregated: 5 tokens kept\ncontracting 0.600 [")
    assert theirs.startswith("ratio: 7 tokens kept\ncontracting 0.429 [")


def test_tokens_that_did_not_move_are_in_no_bin_and_are_counted() -> None:
    ax = draw_delta_d(table(([0.0, 0.1, -0.1, 0.0], [0.2])))
    ours = next(patch for patch in ax.patches if isinstance(patch, StepPatch) and not patch.fill)
    assert ours.get_data()[0].sum() == pytest.approx(0.5)
    assert "ΔD = 0 on 2" in legend(ax)[0]


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([([0.0], [0.0, 0.0])], "ΔD = 0 on every kept token"),
        ([([], [])], "no disagreement token"),
        ([], "no disagreement token"),
    ],
)
def test_nothing_to_draw_is_said(seeds: list[Any], words: str) -> None:
    ax = draw_delta_d(table(*seeds))
    assert not ax.patches
    assert [text.get_text() for text in ax.texts] == [words]


def test_a_line_a_paired_seed_coloured_by_who_is_lower() -> None:
    ax = draw_paired_rates(TABLE)
    assert lines(ax, colour_of("predictive-kl-aggregated")) == [[1.0, pytest.approx(1 / 3)]]
    assert lines(ax, colour_of("ratio")) == [[0.5, 1.0]]
    assert lines(ax, "#999999") == [[0.0, 0.0]]
    hollow = [
        data(line)[1]
        for line in ax.lines
        if line.get_marker() == "o" and line.get_markerfacecolor() == "white"
    ]
    # The seed in which the baseline alone has a rate.
    assert [[value for value in ys if value == value] for ys in hollow] == [[0.5]]
    labels = ax.get_legend_handles_labels()[1]
    assert {"one rate alone: 1 seed"} <= set(labels)
    assert {"lower: 1 of 3 seeds", "higher: 1 of 3 seeds", "tied: 1 of 3 seeds"} <= set(labels)


def test_means_stand_beside_the_seeds_with_their_interval() -> None:
    ax = draw_paired_rates(TABLE)
    for side in ("criterion", "baseline"):
        summary = getattr(TABLE, side)
        colour = colour_of(getattr(TABLE.question, side))
        drawn = [data(line) for line in ax.lines if line.get_color() == colour]
        values = [ys for xs, ys in drawn if len(set(xs)) == 1 and xs[0] not in (0, 1)]
        assert [summary.unsafe_keep_rate] in values
        assert list(summary.unsafe_keep_rate_ci95) in values


def test_the_papers_numbers_are_drawn_for_its_pair_alone() -> None:
    rates = diamonds(draw_paired_rates(TABLE))
    assert [y for _, y in rates] == [
        paper.RATIO_UNSAFE_KEEP_RATE.value,
        paper.PREDICTIVE_UNSAFE_KEEP_RATE.value,
    ]
    assert rates[0][0] < 0 < 1 < rates[1][0]
    fractions = diamonds(draw_contracting(TABLE))
    assert [x for x, _ in fractions] == [
        paper.RATIO_CONTRACTING_FRACTION.value,
        paper.PREDICTIVE_CONTRACTING_FRACTION.value,
    ]
    other = table(([0.1], [0.1]), criterion="clip-higher")
    assert not diamonds(draw_paired_rates(other))
    assert not diamonds(draw_contracting(other))


def test_contracting_fractions_are_the_pooled_ones() -> None:
    ax = draw_contracting(TABLE)
    points = {str(line.get_color()): data(line) for line in ax.lines if line.get_marker() == "o"}
    ours, theirs = points[colour_of("predictive-kl-aggregated")], points[colour_of("ratio")]
    assert [*ours[0], *ours[1]] == pytest.approx([3 / 5, 1.0])
    assert [*theirs[0], *theirs[1]] == pytest.approx([3 / 7, 0.0])


def test_the_title_names_pair_region_protocol_seeds_and_tokens() -> None:
    question = {"divergence": "tv", "threshold": 0.2, "protocol": "own"}
    title = figure4(table(([0.1], [0.1]), **question)).get_suptitle()
    for words in ("predictive-tv-aggregated against ratio", "top-K TV > 0.2 ·", "protocol own",
                  "1 seed;", "100 tokens", "40.0 outside", "2.0 in disagreement"):  # fmt: skip
        assert words in title
    ax = draw_delta_d(TABLE)
    assert "nats" in ax.get_xlabel()
    assert "nats" not in draw_delta_d(table(([0.1], [0.1]), divergence="tv")).get_xlabel()


@pytest.mark.parametrize(
    "result", [TABLE, table(), table(([], [])), table(([0.3], [])), table(([0.0], [0.0]))]
)
def test_a_figure_is_drawn_whatever_there_is_to_show(result: RateTable) -> None:
    figure = figure4(result)
    figure.draw_without_rendering()
    assert len(figure.axes) == 3


@pytest.mark.parametrize(
    ("ending", "head", "dated"),
    [
        ("png", b"\x89PNG", b"Creation Time"),
        ("pdf", b"%PDF", b"CreationDate"),
        ("SVG", b"<?xml", b"dc:date"),
    ],
)
def test_the_ending_names_the_format_and_nothing_is_dated(
    ending: str, head: bytes, dated: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"figure.{ending}"
    save_figure(figure4(TABLE), path)
    assert path.read_bytes().startswith(head)
    assert dated not in path.read_bytes()


def test_the_same_table_gives_the_same_file() -> None:
    first, second = io.BytesIO(), io.BytesIO()
    for sink in (first, second):
        save_figure(figure4(TABLE), sink, form="svg")
    assert first.getvalue() == second.getvalue()


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match=r"\.png, \.pdf, \.svg"):
        save_figure(figure4(TABLE), tmp_path / "figure.jpg")
    assert not list(tmp_path.iterdir())
