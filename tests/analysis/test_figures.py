"""Figures by the data of their artists."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from deltad.analysis import (
    Column,
    Question,
    QuestionError,
    RateTable,
    Result,
    calibrate,
    compare,
    condition_table,
    figure4,
    ladder_table,
    paper,
    power_table,
    rate_table,
    save_figure,
    sweep,
    training_table,
)
from deltad.analysis.figures import (
    COLOURS,
    colour_of,
    draw_contracting,
    draw_delta_d,
    draw_paired_rates,
)
from deltad.analysis.figures.style import OTHERS
from deltad.analysis.pairs import SIDES
from deltad.dumps import Dump
from deltad.masks import RULES, Rule
from deltad.tally import SETS, Judged, count_pair
from tests.dumps.factory import make_dump

DATA = Path(__file__).parents[2]


def table(*seeds: tuple[list[float], list[float]], **question: Any) -> RateTable:
    """A table from the ΔD that criterion and baseline keep, by seed."""
    sets: dict[str, list[Any]] = {name: [] for name in SETS}
    for ours, theirs in seeds:
        keep = np.arange(len(ours) + len(theirs)) < len(ours)
        judged = Judged.of(np.array([*ours, *theirs], dtype=float))
        for name, counts in count_pair(judged, keep, ~keep).items():
            sets[name].append(counts)
    question.setdefault("protocol", "shared:none")
    seen = np.full(len(seeds), 100.0)
    kept = {
        side: np.array([delta for seed in seeds for delta in seed[at]], dtype=float)
        for at, side in enumerate(SIDES)
    }
    return RateTable(
        Question(**question), tuple(range(len(seeds))), seen, 0 * seen,
        {name: np.array(found).reshape(len(seeds), -1) for name, found in sets.items()}
        if seeds else {name: np.zeros((0, 9)) for name in SETS},
        delta_d=kept,
    )  # fmt: skip


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


@pytest.mark.parametrize("family", ["kl", "tv"])
def test_every_rule_has_a_colour_of_its_own_within_its_divergence(family: str) -> None:
    names = [name for name, rule in RULES.items() if rule.family in (None, family)]
    assert set(names) <= set(COLOURS)
    assert len({colour_of(name) for name in names}) == len(names)


def test_a_rule_of_a_user_has_a_colour_that_stays() -> None:
    assert colour_of("predictive-my-own") == colour_of("predictive-my-own")
    assert colour_of("predictive-my-own") in OTHERS
    assert not set(OTHERS) & set(COLOURS.values())


def test_histograms_hold_every_moved_token_on_its_side_of_zero() -> None:
    ax = draw_delta_d(TABLE)
    outlines = [patch for patch in ax.patches if isinstance(patch, StepPatch) and not patch.fill]
    assert len(outlines) == 2
    for patch, deltas in zip(
        outlines, (TABLE.delta_d["criterion"], TABLE.delta_d["baseline"]), strict=True
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
        summary = TABLE.side(side)
        colour = colour_of(TABLE.question.names[SIDES.index(side)])
        drawn = [data(line) for line in ax.lines if line.get_color() == colour]
        values = [ys for xs, ys in drawn if len(set(xs)) == 1 and xs[0] not in (0, 1)]
        assert [summary.unsafe_keep_rate] in values
        assert list(summary.unsafe_keep_rate_ci95) in values


def test_the_papers_numbers_are_drawn_for_its_pair_alone() -> None:
    rates = diamonds(draw_paired_rates(TABLE))
    order = ("baseline", "criterion")
    assert [y for _, y in rates] == [paper.UNSAFE_KEEP_RATES[side] for side in order]
    assert rates[0][0] < 0 < 1 < rates[1][0]
    fractions = diamonds(draw_contracting(TABLE))
    assert [x for x, _ in fractions] == [paper.CONTRACTING_FRACTIONS[side] for side in order]
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
                  "1 seed;", "100 tokens", "2.0 outside", "2.0 in disagreement"):  # fmt: skip
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
    with pytest.raises(QuestionError, match=r"\.png"):
        save_figure(figure4(TABLE), tmp_path / "figure.jpg")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Three seeds, arms of both protocols."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    arms = ("none", "ratio", "predictive-kl-aggregated")
    return Dump.open(
        make_dump(folder, arms=arms, seeds=(0, 1, 2), rows=90, drift=1.5, ranks=1, parts=1)
    )


def line(ax: Axes, label: str) -> list[float]:
    """Heights of the line whose label begins so."""
    (found,) = [each for each in ax.lines if str(each.get_label()).startswith(label)]
    return data(found)[1]


def spans(ax: Axes, colour: str) -> list[list[float]]:
    """Heights of everything that is drawn in one colour."""
    return [data(each)[1] for each in ax.lines if each.get_color() == colour]


@pytest.mark.parametrize("over", ["threshold", "top-k", "protocol"])
def test_a_sweep_goes_through_its_points(dump: Dump, over: str) -> None:
    swept = sweep(dump, over=over)
    rates, signs, counts = swept.figure().axes
    for side, name in zip(SIDES, swept.question.names, strict=True):
        kept = [point.pair.side(side) for point in swept.rows]
        assert line(rates, name) == pytest.approx(
            [each.unsafe_keep_rate for each in kept], nan_ok=True
        )
        assert line(counts, f"kept by the {side}") == [each.kept for each in kept]
        for each in kept:
            interval = each.unsafe_keep_rate_ci95
            assert math.isnan(interval[0]) or list(interval) in spans(rates, colour_of(name))
        for point in swept.rows:
            share = point.accuracy(side)
            assert math.isnan(share.ci95[0]) or list(share.ci95) in spans(signs, colour_of(name))
    base = [point.pair.disagreement.increase_rate for point in swept.rows]
    assert line(rates, "P(ΔD > 0)") == pytest.approx(base, nan_ok=True)
    guess = [point.pair.outside.constant_guess for point in swept.rows]
    assert line(signs, "always the more common") == pytest.approx(guess, nan_ok=True)
    assert line(counts, "outside") == [point.pair.outside.tokens for point in swept.rows]


@pytest.mark.parametrize("values", [(0.0, 0.1), (0.15,), (1e6,)])
def test_a_threshold_of_nothing_and_a_single_point_can_be_drawn(
    dump: Dump, values: tuple[float, ...]
) -> None:
    figure = sweep(dump, values=values).figure()
    assert len(figure.axes[0].get_xticks()) == len(values)


def test_a_comparison_shows_who_agrees_and_what_each_predicts(dump: Dump) -> None:
    found = compare(dump)
    left, right = found.figure().axes
    assert np.asarray(left.images[0].get_array()) == pytest.approx(found.agreement)
    cells = [text.get_text() for text in left.texts]
    assert cells == [f"{100 * share:.0f}" for share in found.agreement.ravel()]
    for each in found.rows:
        points = [
            data(mark)[0]
            for mark in right.lines
            if mark.get_marker() == "o" and mark.get_color() == colour_of(each.name)
        ]
        shares = (each.outside.value, each.disagreement.value)
        assert points == [[share] for share in shares if not math.isnan(share)]
    (guess,) = [mark for mark in right.lines if mark.get_linestyle() == ":"]
    assert data(guess)[0][0] == found.first.outside.constant_guess


def test_where_no_sign_is_judged_it_says_so(dump: Dump) -> None:
    _, right = compare(dump, Question(protocol="own")).figure().axes
    assert "no sign is judged here" in [text.get_text() for text in right.texts]
    left, _ = compare(dump, Question(threshold=1e6)).figure().axes
    assert not left.texts


def test_conditions_have_a_point_per_bin_and_rule(dump: Dump) -> None:
    found = condition_table(dump, by=["advantage", "position"])
    axes = found.figure().axes
    assert len(axes) == 2
    for ax, condition in zip(axes, found.conditions, strict=True):
        for name in found.criteria:
            shares = [part.accuracy.value for part in found.of(condition.name, name)]
            assert line(ax, name) == pytest.approx(shares, nan_ok=True)


def test_a_calibration_goes_through_its_bins(dump: Dump) -> None:
    found = calibrate(dump, bins=3)
    means, shares = found.figure().axes
    for each in found.predictors:
        name = f"{each.predictor.name}: "
        assert line(means, name) == [part.delta_d.value for part in each.bins]
        assert line(shares, name) == [part.increase.value for part in each.bins]
        turn = float(np.mean(np.concatenate(each.predictions) <= 0))
        assert turn in [data(mark)[0][0] for mark in shares.lines if mark.get_marker() == "^"
                        and len(data(mark)[0])]  # fmt: skip
    empty = calibrate(dump, Question(threshold=1e6)).figure()
    assert [text.get_text() for text in empty.axes[1].texts] == ["no token outside"]


def test_a_ladder_goes_through_its_rungs() -> None:
    found = ladder_table(Dump.open(DATA / "data_dumps" / "smollm2-ladder"))
    figure = found.figure()
    for ax, within in zip(figure.axes[:2], ("outside", "disagreement"), strict=True):
        for name in found.criteria:
            shares = [found.right(rung.name, name, within).value for rung in found.rungs]
            assert line(ax, name) == pytest.approx(shares)
    same = [found.agreement(rung.name).value for rung in found.rungs]
    assert data(figure.axes[2].lines[0])[1] == pytest.approx(same)


def test_power_rises_with_the_number_of_seeds() -> None:
    found = power_table(
        rate_table(Dump.open(DATA / "data_dumps" / "tiny")), points=[0.1], times=200
    )
    ax = found.figure().axes[0]
    (curve,) = [shares for point, _, shares in found.curves if point == 0.1]
    assert line(ax, "lower by 10 points") == [each["sign test"] for each in curve]
    assert line(ax, "this dump: 61 seeds")[0] == 0


def test_a_training_has_a_line_per_mask() -> None:
    found = training_table([DATA / "data_training" / "tiny" / "fp32"])
    figure = found.figure()
    assert len(figure.axes) == 6
    assert figure.axes[0].get_legend_handles_labels()[1] == list(found.masks)
    several = training_table(
        [DATA / "data_training" / "tiny" / name for name in ("fp32", "fp8")]
    ).figure()
    assert len(several.axes) == 8


def test_a_rule_of_a_user_can_be_drawn_everywhere(dump: Dump) -> None:
    mine = Rule("far-away", region="divergence", push=lambda tokens: -tokens.log_ratio)
    question = Question(criterion=mine)
    drawn: list[Figure] = [
        rate_table(dump, question).figure(), sweep(dump, question, values=(0.1, 0.2)).figure(),
        compare(dump, question, [mine]).figure(),
        condition_table(dump, question, by=["state"]).figure(),
    ]  # fmt: skip
    for figure in drawn:
        figure.draw_without_rendering()
        colours = {mark.get_color() for ax in figure.axes for mark in ax.lines}
        assert colour_of("far-away") in colours


def test_a_result_without_a_figure_says_so() -> None:
    class Plain(Result):
        """Has none."""

        columns = (Column("x", "a number", lambda row: row),)
        rows = (1,)

        def to_json_object(self) -> dict[str, Any]:
            return {}

        def parts(self) -> list[str]:
            return []

    with pytest.raises(QuestionError, match="no figure of a Plain"):
        Plain().figure()
