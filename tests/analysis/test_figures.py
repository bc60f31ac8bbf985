"""Figures by the data of their artists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch

from deltad.analysis import (
    Question,
    QuestionError,
    RateTable,
    calibrate,
    compare,
    condition_table,
    draw_contracting,
    draw_delta_d,
    draw_paired_rates,
    figure4,
    ladder_table,
    paper,
    power_table,
    protocol_table,
    rate_table,
    save_figure,
    sweep,
    training_table,
)
from deltad.analysis.figures import COLOURS, colours_of
from deltad.analysis.statistics import t_band
from deltad.dumps import Dump
from deltad.masks import RULES, Rule
from deltad.tally import FIELDS, SETS, Judged, count_pair
from tests.analysis.trainings import write_training
from tests.dumps.factory import make_dump

MINE = Rule("my_own_rule", "divergence", "ratio", threshold=0.4)
PAIR = ("predictive-kl-aggregated", "ratio")


def table(*seeds: tuple[list[float], list[float]], **question: Any) -> RateTable:
    """A table from the ΔD that criterion and baseline keep, by seed."""
    sets: dict[str, list[Any]] = {name: [] for name in SETS}
    for ours, theirs in seeds:
        mine = np.arange(len(ours) + len(theirs)) < len(ours)
        counts = count_pair(Judged.of(np.array([*ours, *theirs], float)), mine, ~mine)
        for name in SETS:
            sets[name].append(counts[name])
    question.setdefault("protocol", "shared:none")
    return RateTable(
        Question(**question),
        tuple(range(len(seeds))),
        np.full(len(seeds), 100.0),
        np.zeros(len(seeds)),
        {name: np.array(each).reshape(-1, len(FIELDS)) for name, each in sets.items()},
        delta_d={
            side: np.array([value for seed in seeds for value in seed[at]], float)
            for at, side in enumerate(("criterion", "baseline"))
        },
    )


TABLE = table(
    ([-0.1, -0.02, 0.3], [0.1, 0.2]),  # 1/3 against 1: lower
    ([0.5], [-0.4, 0.1]),  # 1 against 1/2: higher
    ([-0.5], [-0.001]),  # tied at 0
    ([], [0.7, -0.2]),  # the baseline alone
    ([], []),
)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump that answers for every criterion and protocol."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    return Dump.open(make_dump(folder, seeds=(0, 1, 2), rows=120, drift=1.5, ranks=1, parts=1))


def data(line: Line2D) -> tuple[list[float], list[float]]:
    """What a line goes through."""
    xs, ys = (np.asarray(values, dtype=float).tolist() for values in line.get_data())
    return xs, ys


def heights(ax: Axes, label: str, axis: int = 1) -> list[float]:
    """Heights (or places) of the one line whose label begins so."""
    (found,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return data(found)[axis]


def drawn(ax: Axes, colour: str, axis: int = 1) -> list[list[float]]:
    """Heights (or places) of all lines of a colour."""
    return [data(line)[axis] for line in ax.lines if line.get_color() == colour]


def bars(ax: Axes, dashes: str) -> list[float]:
    """Heights of the bars of one kind of dash, a bar per place."""
    lines = [line for line in ax.lines if line.get_linestyle() == dashes]
    return [data(line)[1][0] for line in lines if len(data(line)[1]) == 2]


def diamonds(ax: Axes) -> list[tuple[float, float]]:
    """Places of the paper's marks."""
    marks = [data(line) for line in ax.lines if line.get_marker() == "D"]
    return [place for xs, ys in marks for place in zip(xs, ys, strict=True)]


def words_of(ax: Axes) -> list[str]:
    """Words in axes."""
    return [text.get_text() for text in ax.texts]


def ticks_of(ax: Axes) -> list[str]:
    """Labels along the axis."""
    return [label.get_text() for label in ax.get_xticklabels()]


@pytest.mark.parametrize("family", ["kl", "tv"])
def test_every_rule_has_a_colour_of_its_own_whatever_its_name(family: str) -> None:
    names = [name for name, each in RULES.items() if each.family in (None, family)]
    found = colours_of([*names, "mine", "yours", "mine"])
    assert len(set(found.values())) == len(found) == len(names) + 2
    assert all(found[name] == COLOURS[name] for name in names)


def test_histograms_hold_every_moved_token_on_its_side_of_zero() -> None:
    ax = draw_delta_d(TABLE)
    outlines = [patch for patch in ax.patches if isinstance(patch, StepPatch) and not patch.fill]
    for patch, side in zip(outlines, ("criterion", "baseline"), strict=True):
        deltas = TABLE.delta_d[side]
        shares, edges, _ = patch.get_data()
        assert shares.sum() == pytest.approx(1)
        assert shares[edges[1:] <= 0].sum() == pytest.approx((deltas < 0).mean())
        assert shares[edges[:-1] >= 0].sum() == pytest.approx((deltas > 0).mean())
        assert edges == pytest.approx(-edges[::-1])
    ours, theirs = ax.get_legend_handles_labels()[1]
    assert ours.startswith("predictive-kl-aggregated: 5 tokens kept\ncontracting 0.600 [")
    assert theirs.startswith("ratio: 7 tokens kept\ncontracting 0.429 [")


def test_tokens_that_did_not_move_are_in_no_bin_and_are_counted() -> None:
    ax = draw_delta_d(table(([0.0, 0.1, -0.1, 0.0], [0.2])))
    ours = next(patch for patch in ax.patches if isinstance(patch, StepPatch) and not patch.fill)
    assert ours.get_data()[0].sum() == pytest.approx(0.5)
    assert "ΔD = 0 on 2" in ax.get_legend_handles_labels()[1][0]


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
    assert words_of(ax) == [words]


def test_a_line_per_paired_seed_coloured_by_who_is_lower() -> None:
    ax = draw_paired_rates(TABLE)
    lines = [(line.get_color(), *data(line)) for line in ax.lines]
    paired = [(colour, ys) for colour, xs, ys in lines if xs == [0, 1]]
    assert (COLOURS[PAIR[0]], [1.0, pytest.approx(1 / 3)]) in paired
    assert (COLOURS[PAIR[1]], [0.5, 1.0]) in paired
    assert ("#999999", [0.0, 0.0]) in paired
    # The seed in which the baseline alone has a rate.
    alone = heights(ax, "only one has a rate: 1 seed")
    assert [value for value in alone if not math.isnan(value)] == [0.5]
    labels = ax.get_legend_handles_labels()[1]
    assert {"lower: 1 of 3 seeds", "higher: 1 of 3 seeds", "tied: 1 of 3 seeds"} <= set(labels)


def test_means_and_pooled_fractions_stand_with_their_intervals() -> None:
    rates, fractions = draw_paired_rates(TABLE), draw_contracting(TABLE)
    for name, kept in zip(PAIR, (TABLE.criterion, TABLE.baseline), strict=True):
        heights_of_rates = drawn(rates, COLOURS[name])
        assert [kept.unsafe_keep_rate] in heights_of_rates
        assert list(kept.unsafe_keep_rate_ci95) in heights_of_rates
        places = drawn(fractions, COLOURS[name], axis=0)
        assert [kept.contracting_fraction] in places
        assert list(kept.contracting_fraction_ci95) in places


def test_the_papers_numbers_are_drawn_for_its_pair_alone() -> None:
    sides = ("baseline", "criterion")
    rates = diamonds(draw_paired_rates(TABLE))
    assert [y for _, y in rates] == [paper.UNSAFE_KEEP_RATES[side] for side in sides]
    assert rates[0][0] < 0 < 1 < rates[1][0]
    fractions = diamonds(draw_contracting(TABLE))
    assert [x for x, _ in fractions] == [paper.CONTRACTING_FRACTIONS[side] for side in sides]
    other = table(([0.1], [0.1]), criterion="clip-higher")
    assert not diamonds(draw_paired_rates(other))
    assert not diamonds(draw_contracting(other))


def test_the_title_names_pair_region_protocol_seeds_and_tokens() -> None:
    question = {"divergence": "tv", "threshold": 0.2, "protocol": "own"}
    title = figure4(table(([0.1], [0.1]), **question)).get_suptitle()
    for words in ("predictive-tv-aggregated against ratio", "top-K TV > 0.2 ·", "protocol own",
                  "1 seed;", "100 tokens", "2.0 outside", "2.0 in disagreement"):  # fmt: skip
        assert words in title
    assert "nats" in draw_delta_d(TABLE).get_xlabel()
    assert "nats" not in draw_delta_d(table(([0.1], [0.1]), divergence="tv")).get_xlabel()


@pytest.mark.parametrize(
    "result", [TABLE, table(), table(([], [])), table(([0.3], [])), table(([0.0], [0.0]))]
)
def test_figure_4_is_drawn_whatever_there_is_to_show(result: RateTable) -> None:
    figure = result.figure()
    figure.draw_without_rendering()
    assert len(figure.axes) == 3


@pytest.mark.parametrize("over", ["threshold", "top-k", "protocol"])
def test_a_sweep_draws_rates_signs_and_counts_of_its_points(dump: Dump, over: str) -> None:
    swept = sweep(dump, over=over, values=(0.05, 0.15, 0.4) if over == "threshold" else ())
    figure = swept.figure()
    rates, signs, counts = figure.axes
    pairs = [point.pair for point in swept.rows]
    for side, name in zip(("criterion", "baseline"), PAIR, strict=True):
        kept = [pair.side(side) for pair in pairs]
        expected = [each.unsafe_keep_rate for each in kept]
        assert heights(rates, name) == pytest.approx(expected, nan_ok=True)
        spans = drawn(rates, COLOURS[name])
        intervals = [each.unsafe_keep_rate_ci95 for each in kept]
        assert all(list(each) in spans for each in intervals if not math.isnan(each[0]))
        right = [pair.accuracy(side).value for pair in pairs]
        assert heights(signs, name) == pytest.approx(right, nan_ok=True)
        assert heights(counts, f"kept by the {side}") == [each.kept for each in kept]
    assert heights(counts, "outside") == [pair.outside.tokens for pair in pairs]
    assert bars(rates, "--") == [pair.disagreement.increase_rate for pair in pairs]
    assert bars(signs, ":") == [pair.outside.constant_guess for pair in pairs]
    words = {"threshold": "δ, nats", "top-k": "K', ids", "protocol": "protocol"}
    assert counts.get_xlabel().startswith(words[over])
    values = [point.value for point in swept.rows]
    labels = [label.replace("\n", "") for label in ticks_of(counts)]
    assert labels == [each if isinstance(each, str) else f"{each:g}" for each in values]
    title = figure.get_suptitle()
    assert "predictive-kl-aggregated against ratio" in title
    assert "3 seeds" in title


@pytest.mark.parametrize("values", [(0.0, 0.1), (0.15,), (1e6,)])
def test_a_threshold_of_nothing_and_a_single_point_can_be_drawn(
    dump: Dump, values: tuple[float, ...]
) -> None:
    figure = sweep(dump, values=values).figure()
    figure.draw_without_rendering()
    assert len(figure.axes[0].get_xticks()) == len(values)


def test_a_comparison_draws_who_agrees_and_whose_signs_come_true(dump: Dump) -> None:
    found = compare(dump, criteria=["predictive-kl-aggregated", "clip-higher", MINE])
    figure = found.figure()
    left, right = figure.axes
    assert np.asarray(left.images[0].get_array()) == pytest.approx(found.agreement)
    assert words_of(left) == [f"{100 * share:.0f}" for share in found.agreement.ravel()]
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == [f"{name} {at}" for at, name in enumerate(found.names, 1)]
    colours = colours_of(found.names)
    for each in found.rows:
        places = drawn(right, colours[each.name], axis=0)
        for share in (each.outside, *([each.disagreement] if each.disagreement.whole else [])):
            assert [share.value] in places
            assert list(share.ci95) in places
        assert each.outside.by_seed.tolist() in places
    guess = found.first.outside.constant_guess
    assert heights(right, "always the more common direction, outside", axis=0)[0] == guess
    title = figure.get_suptitle()
    for words in ("against ratio", "top-K KL > 0.15 nats", "shared:none", "3 seeds"):
        assert words in title
    assert f"{found.first.outside.tokens} tokens outside" in title


def test_where_no_sign_is_judged_a_comparison_says_so(dump: Dump) -> None:
    for found in (compare(dump, Question(protocol="own")), compare(dump, Question(threshold=1e6))):
        right = found.figure().axes[1]
        assert words_of(right) == ["no sign is judged here"]
        assert not right.lines


def test_conditions_draw_every_bin_with_its_interval_and_its_guess(dump: Dump) -> None:
    found = condition_table(dump, by=["entropy", "advantage", "token", "state"], criteria=[MINE])
    figure = found.figure()
    assert len(figure.axes) == len(found.conditions)
    colours = colours_of(found.criteria)
    for ax, condition in zip(figure.axes, found.conditions, strict=True):
        assert ax.get_xlabel() == f"{condition.meaning}; n tokens outside"
        for name in found.criteria:
            parts = found.of(condition.name, name)
            values = [part.accuracy.value for part in parts]
            assert heights(ax, name) == pytest.approx(values, nan_ok=True)
            spans = drawn(ax, colours[name])
            assert all(list(part.accuracy.ci95) in spans for part in parts if part.accuracy.whole)
        guesses = [part.pair.outside.constant_guess for part in parts]
        assert bars(ax, ":") == pytest.approx(guesses, nan_ok=True)
        for label, part in zip(ticks_of(ax), parts, strict=True):
            assert label.endswith(f"n = {part.pair.outside.tokens}")
    assert "top-K KL > 0.15 nats · protocol shared:none · 3 seeds" in figure.get_suptitle()


def test_a_ladder_draws_every_rung_of_both_sets(dump: Dump) -> None:
    found = ladder_table(dump, criteria=[MINE])
    figure = found.figure()
    axes = np.reshape(np.array(figure.axes), (2, 2))
    rungs = [rung.name for rung in found.rungs]
    assert len(rungs) == 8
    for within, (upper, lower) in zip(("outside", "disagreement"), axes.T, strict=True):
        for name in found.criteria:
            shares = [found.right(rung, name, within).value for rung in rungs]
            assert heights(upper, name) == pytest.approx(shares, nan_ok=True)
        assert bars(upper, ":") == [found.constant_guess(rung, within) for rung in rungs]
        same = [found.agreement(rung, within).value for rung in rungs]
        assert same in drawn(lower, "#333333")
        assert upper.get_title().endswith(f": {found.tokens(within)}")
    labels = [" ".join(label.split()) for label in ticks_of(axes[1, 0])]
    assert labels == [rung.label for rung in found.rungs]


def test_a_calibration_draws_bins_and_where_predictions_turn_positive(dump: Dump) -> None:
    found = calibrate(dump, bins=3)
    first, *others = found.predictors
    some = tuple(np.where(np.arange(len(p)) % 3, p, np.nan) for p in first.predictions)
    found = replace(found, predictors=(replace(first, predictions=some), *others))
    assert found.predictors[0].unknown
    figure = found.figure()
    means, shares = figure.axes
    colours = colours_of(each.predictor.name for each in found.predictors)
    for each in found.predictors:
        name = each.predictor.name
        assert heights(means, f"{name}: ") == [part.delta_d.value for part in each.bins]
        assert heights(shares, f"{name}: ") == [part.increase.value for part in each.bins]
        assert all(list(part.delta_d.ci95) in drawn(means, colours[name]) for part in each.bins)
        known = [value for seed in each.predictions for value in seed if not math.isnan(value)]
        positive = sum(value <= 0 for value in known) / len(known)
        assert [positive] in drawn(shares, colours[name], axis=0)
    assert heights(shares, "base rate")[0] == found.base.increase_rate
    assert f"{found.base.tokens} tokens outside" in figure.get_suptitle()


def test_power_draws_a_curve_per_difference_and_test() -> None:
    few = [([0.1, -0.1, -0.2, 0.3], [0.2, -0.1]), ([-0.1, 0.2], [0.2, -0.1, 0.5])] * 3
    found = power_table(table(*few), points=[0.2], times=50)
    axes = found.figure().axes
    (_, seeds, equal), (_, _, lower) = found.curves
    for ax, test in zip(axes, ("sign test", "Wilcoxon", "paired t"), strict=True):
        assert ax.get_title().startswith(f"{test}\n")
        assert heights(ax, "equal mean rates") == [each[test] for each in equal]
        assert heights(ax, "lower by 20 points") == [each[test] for each in lower]
        assert heights(ax, "equal mean rates", axis=0) == seeds


@pytest.mark.parametrize("several", [False, True])
def test_trainings_draw_means_with_bands_and_last_seeds(tmp_path: Path, several: bool) -> None:
    courses = {
        "ratio": [[0.1, 0.3, 0.2], [0.1, 0.2, 0.4]],
        "my_own_rule": [[0.1, 0.2, 0.1], [0.1, 0.2, 0.3]],
    }
    folders = [write_training(tmp_path / "one", courses)]
    if several:
        folders.append(write_training(tmp_path / "two", courses, threshold=0.05))
    found = training_table(folders)
    figure = found.figure()
    assert len(figure.axes) == (8 if several else 6)
    colours, ax = colours_of(found.masks), figure.axes[0]
    for mask, seeds in courses.items():
        mean, low, high = t_band(seeds)
        assert heights(ax, mask) == pytest.approx(mean)
        band = next(
            each for each in ax.collections
            if np.asarray(each.get_facecolor())[0, :3] == pytest.approx(to_rgb(colours[mask]))
        )  # fmt: skip
        ends = np.asarray(band.get_paths()[0].vertices)[:, 1]
        assert (ends.min(), ends.max()) == pytest.approx((low.min(), high.max()))
        assert [each[-1] for each in seeds] in drawn(ax, colours[mask])
    assert ax.get_ylabel() == "held-out accuracy (avg@16)"
    shared = [each.get_ylim() for each in figure.axes[-2:]]
    assert all(bottom == 0 for bottom, _ in shared)


def test_what_has_no_figure_is_refused(dump: Dump, tmp_path: Path) -> None:
    nowhere = Question(threshold=1e6)
    made: list[tuple[Callable[[], Any], str]] = [
        (lambda: protocol_table(dump), "no figure of a ProtocolTable"),
        (lambda: ladder_table(dump, nowhere), "nothing to draw"),
        (lambda: calibrate(dump, nowhere), "nothing to draw"),
        (lambda: power_table(rate_table(dump, nowhere), times=50), "nothing to draw"),
        (
            lambda: training_table([write_training(tmp_path / "run", {"none": [[0.1]]})]),
            "nothing to draw",
        ),
    ]
    for make, words in made:
        with pytest.raises(QuestionError, match=words):
            make().figure()


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
    assert TABLE.form("svg") == TABLE.form("svg")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match=r"\.png, \.pdf, \.svg"):
        save_figure(figure4(TABLE), tmp_path / "figure.jpg")
    assert not list(tmp_path.iterdir())


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    run = Dump.open(make_dump(tmp_path / "run", arms=("none", "$x^$"), ranks=1, parts=1))
    figure4(rate_table(run, Question(protocol="shared:$x^$"))).draw_without_rendering()
    figure = sweep(run, over="protocol").figure()
    figure.draw_without_rendering()
    assert "shared:$x^$" in ticks_of(figure.axes[-1])
