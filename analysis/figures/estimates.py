"""Shares with intervals in rows: sweeps, criteria, conditions, the ladder, calibrations.

Every one of them is points with intervals, seeds as pale ticks, over what always guessing the more
common direction gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltad.analysis.pairs import SIDES, Estimate
from deltad.analysis.question import QuestionError
from deltad.analysis.result import counted, number, region, title, unit
from deltad.analysis.tables.compare import PROTOCOL, Comparison, ConditionTable, Sweep
from deltad.analysis.tables.ladder import SETS, Calibration, LadderTable

from . import style
from .style import GREY, NORMAL, SMALL, Floats, Shown, colours_of, draw, draw_points, label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltad.analysis.question import Question

_GUESS: Final = "always the more common direction"
_SHARE: Final = (-0.03, 1.03)
_STEP: Final = 0.17  # of the distance of two places, between rules at one
_DARK: Final = 0.6  # share from which a cell's text is white
_ACROSS: Final = 3
_APART: Final = 0.006  # of the axis' width, between predictors in one bin


def _asked(question: Question) -> str:
    """Region and protocol."""
    return f"outside: {region(question)} · protocol {question.protocol}"


def _side_by_side(
    ax: Axes,
    places: Floats,
    series: Mapping[str, Sequence[Estimate | Shown]],
    guesses: Sequence[float],
    guess: str = _GUESS,
    *,
    dashes: str = ":",
    joined: bool = False,
) -> None:
    """Every rule's shares at every place next to each other, over a bar at what guessing gets."""
    gap = float(np.diff(places).min()) if len(places) > 1 else 1.0
    step = gap * min(_STEP, 0.8 / len(series))
    offsets = step * (np.arange(len(series)) - (len(series) - 1) / 2)
    colours = colours_of(series)
    for offset, (name, found) in zip(offsets, series.items(), strict=True):
        draw_points(ax, places + offset, found, colours[name], label=name, joined=joined)
    ends = np.stack([places - 0.4 * gap, places + 0.4 * gap])
    ax.plot(ends, np.stack([guesses, guesses]), dashes, color="black", linewidth=1.0, zorder=2)
    ax.plot([], [], dashes, color="black", linewidth=1.0, label=guess)
    style.explain_points(ax)
    ax.set_xlim(places.min() - 0.6 * gap, places.max() + 0.6 * gap)
    ax.set_ylim(*_SHARE)


@draw.register(Sweep)
def _sweep(sweep: Sweep) -> Figure:
    """Unsafe-keep rates, predicted signs and counts, one above the other."""
    figure = style.new_figure(5.6, 7.2, sweep.heading())
    rates, signs, counts = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1.2, 0.8))
    values, pairs = [point.value for point in sweep.rows], [point.pair for point in sweep.rows]
    places = np.arange(len(values), dtype=np.float64)
    joined = sweep.over != PROTOCOL  # protocols have no order
    if joined and min(values) > 0:
        places = np.log10(np.array(values, dtype=np.float64))
    names = dict(zip(SIDES, sweep.question.names, strict=True))
    _side_by_side(
        rates, places,
        {name: [Shown.of(pair.side(side)) for pair in pairs] for side, name in names.items()},
        [pair.disagreement.increase_rate for pair in pairs], "P(ΔD > 0) in the disagreement set",
        dashes="--", joined=joined,
    )  # fmt: skip
    right = {name: [pair.accuracy(side) for pair in pairs] for side, name in names.items()}
    guesses = [pair.outside.constant_guess for pair in pairs]
    _side_by_side(signs, places, right, guesses, f"{_GUESS}, outside", joined=joined)
    label_axes(rates, "", "unsafe-keep rate")
    label_axes(signs, "", "sign of ΔD predicted, outside")
    if not any(each.whole for found in right.values() for each in found):
        style.say(signs, "no sign is judged here")
    lines = [("outside", GREY, [pair.outside.tokens for pair in pairs])]
    colours = colours_of(sweep.question.names)
    for side, name in names.items():
        kept = [pair.side(side).kept for pair in pairs]
        lines.append((f"kept by the {side} alone", colours[name], kept))
    for label, colour, tokens in lines:
        marks = "o-" if joined else "o"
        counts.plot(places, np.array(tokens, float), marks, ms=3, lw=1.2, color=colour, label=label)
    counts.set_yscale("symlog", linthresh=1)
    counts.set_ylim(0, 30 * max(1, counts.get_ylim()[1]))  # the legend stands above the counts
    counts.legend(fontsize=SMALL, frameon=False, loc="upper center", ncols=3)
    ticks = [style.folded(each) if isinstance(each, str) else f"{each:g}" for each in values]
    counts.set_xticks(places, ticks, parse_math=False)
    nats = unit(sweep.question)
    axis = {
        "threshold": f"δ{',' if nats else ''}{nats}",
        "top-k": "K', ids of the top-K that are read",
        "protocol": "protocol",
    }
    label_axes(counts, axis[sweep.over], "tokens, all seeds")
    style.legend_below(figure, rates, signs)
    return figure


@draw.register(Comparison)
def _comparison(comparison: Comparison) -> Figure:
    """Who agrees with whom, and whose signs come true: a row per criterion in both."""
    rows, pair, question = comparison.rows, comparison.first, comparison.question
    figure = style.new_figure(
        5.4 + 0.3 * len(rows), 1.6 + 0.36 * len(rows),
        f"criteria against {question.names[1]} · {_asked(question)}",
        f"{counted(len(pair.seeds), 'seed')}, {counted(pair.outside.tokens, 'token')} outside",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(len(rows), max(6.0, 0.8 * len(rows))))
    left.imshow(comparison.agreement, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for (row, column), share in np.ndenumerate(comparison.agreement):
        if not math.isnan(share):
            left.text(
                column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=SMALL - 1,
                color="white" if share > _DARK else "black",
            )  # fmt: skip
    places = range(len(rows))
    left.set_xticks(places, [str(place + 1) for place in places])
    left.set_yticks(places, [f"{name} {at}" for at, name in enumerate(comparison.names, 1)])
    label_axes(left, "tokens outside\ndecided alike, %", "")
    left.tick_params(length=0)
    right.set_ylim(len(rows) - 0.5, -0.5)
    right.set_yticks(places, [""] * len(rows))
    label_axes(right, "sign of ΔD predicted", "")
    if any(each.outside.whole for each in rows):
        _forest(comparison, right)
        style.legend_below(figure, right)
    else:
        style.say(right, "no sign is judged here")
    return figure


def _forest(comparison: Comparison, ax: Axes) -> None:
    """Predicted signs: filled over all tokens outside, hollow over those in disagreement."""
    colours = colours_of(comparison.names)
    for place, each in enumerate(comparison.rows):
        apart: dict[str, Any] = {"upright": False, "seeds": False, "face": "white"}
        draw_points(ax, [place - 0.16], [each.outside], colours[each.name], upright=False)
        draw_points(ax, [place + 0.16], [each.disagreement], colours[each.name], **apart)
        guess = each.pair.disagreement.constant_guess
        ax.plot([guess], [place + 0.16], "x", markersize=4, color="black", zorder=5)
    guess = comparison.first.outside.constant_guess
    words = f"{_GUESS}, outside: {number(guess)}"
    ax.axvline(guess, color="black", linewidth=0.8, linestyle=":", zorder=0, label=words)
    for label, marker, colour, face in (
        (f"{_GUESS}, in disagreement", "x", "black", "black"),
        ("outside, pooled", "o", GREY, GREY),
        ("in disagreement, pooled", "o", GREY, "white"),
    ):
        ax.plot([], [], marker, ms=4, color=colour, mfc=face, label=label)
    style.explain_points(ax, "|")
    ax.set_xlim(*_SHARE)
    ax.grid(axis="y", linewidth=0.3, alpha=0.5)


@draw.register(ConditionTable)
def _conditions(table: ConditionTable) -> Figure:
    """Predicted signs by bin, axes per condition."""
    across = min(_ACROSS, len(table.conditions))
    down = -(-len(table.conditions) // across)
    figure = style.new_figure(
        max(4.4, 0.8 + 3.4 * across), 1.5 + 2.6 * down, ", ".join(table.criteria),
        f"{_asked(table.question)} · {counted(len(table.first.seeds), 'seed')}",
    )  # fmt: skip
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for ax in axes[len(table.conditions) :]:
        ax.remove()
    for ax, condition in zip(axes, table.conditions, strict=False):
        parts = {name: table.of(condition.name, name) for name in table.criteria}
        bins = parts[table.criteria[0]]
        first = ax.get_subplotspec().is_first_col()
        words = f"{condition.meaning}; n tokens outside"
        label_axes(ax, words, "sign of ΔD predicted" if first else "")
        if not bins:
            style.say(ax, "no token outside")
            continue
        places = np.arange(len(bins), dtype=np.float64)
        shares = {name: [part.accuracy for part in found] for name, found in parts.items()}
        _side_by_side(ax, places, shares, [part.pair.outside.constant_guess for part in bins])
        ticks = [f"{style.folded(part.label, 9)}\nn = {part.pair.outside.tokens}" for part in bins]
        ax.set_xticks(places, ticks)
        ax.xaxis.label.set_fontsize(SMALL)
        if len(bins) > 4:
            ax.tick_params(axis="x", labelsize=SMALL - 1.5)
    style.legend_below(figure, *axes[: len(table.conditions)])
    return figure


@draw.register(LadderTable)
def _ladder(table: LadderTable) -> Figure:
    """Predicted signs rung by rung, above the share of signs that are the step's already."""
    if not table.rungs:
        raise QuestionError("the ladder has no rung: there is nothing to draw")
    figure = style.new_figure(
        8.4, 5.4, f"Where the sign of ΔD is lost · {title(table.question)}",
        f"protocol {table.question.protocol} · {counted(len(table.seeds), 'seed')}",
    )  # fmt: skip
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1.3))
    places = np.arange(len(table.rungs), dtype=np.float64)
    rungs = [rung.name for rung in table.rungs]
    for (within, words), (upper, lower) in zip(SETS.items(), axes.T, strict=True):
        shares = {
            name: [table.right(rung, name, within) for rung in rungs] for name in table.criteria
        }
        guesses = [table.constant_guess(rung, within) for rung in rungs]
        _side_by_side(upper, places, shares, guesses, f"{_GUESS} on the rung", joined=True)
        same = [table.agreement(rung, within) for rung in rungs]
        draw_points(lower, places, same, "#333333", joined=True, seeds=False)
        for ax in (upper, lower):
            ax.axhline(0.5, color="black", linewidth=0.4, zorder=0)
        upper.set_title(f"{words}: {table.tokens(within)}", fontsize=NORMAL)
        left = within == "outside"
        label_axes(upper, "", "sign of ΔD predicted" if left else "")
        label_axes(lower, "ΔD along …", "has the sign\nof the step" if left else "")
        lower.set_xticks(places, [style.folded(rung.label, 11) for rung in table.rungs])
        lower.tick_params(axis="x", labelsize=SMALL - 1)
        lower.set_ylim(-0.03, 1.06)
    style.name_panels(figure)
    style.legend_below(figure, axes[0, 0])
    return figure


@draw.register(Calibration)
def _calibration(calibration: Calibration) -> Figure:
    """Mean ΔD, and the share of ΔD > 0, along the quantiles of every prediction."""
    base, question = calibration.base, calibration.question
    if not base.tokens:
        raise QuestionError("no token is outside: there is nothing to draw")
    figure = style.new_figure(
        8.4, 4.2, f"predicted first-order change against ΔD · {_asked(question)}",
        f"{counted(len(calibration.pair.seeds), 'seed')}, {counted(base.tokens, 'token')} outside",
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    colours = colours_of(each.predictor.name for each in calibration.predictors)
    for at, each in enumerate(calibration.predictors):
        colour = colours[each.predictor.name]
        # The middle of every bin, as a quantile of the prediction
        sizes = np.array([part.tokens for part in each.bins], dtype=np.float64)
        places = (np.cumsum(sizes) - sizes / 2) / max(1.0, float(sizes.sum()))
        places += _APART * (at - (len(colours) - 1) / 2)
        label = (
            f"{each.predictor.name}: Spearman {number(each.spearman, signed=True)}, "
            f"sign predicted {number(each.signs.value)}"
        )
        known = np.concatenate(each.predictions)
        known = known[~np.isnan(known)]
        positive = float(np.mean(known <= 0)) if len(known) else math.nan
        for ax, found in (
            (left, [part.delta_d for part in each.bins]),
            (right, [part.increase for part in each.bins]),
        ):
            draw_points(ax, places, found, colour, label=label, joined=True, seeds=False)
            on_axis: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "clip_on": False}
            ax.plot([positive], [0], "^", ms=5, color=colour, zorder=5, **on_axis)
    left.axhline(0, color="black", linewidth=0.8, zorder=0)
    rate = base.increase_rate
    words = f"base rate, {number(rate)}"
    right.axhline(rate, color="black", linewidth=0.8, linestyle=":", zorder=0, label=words)
    right.plot([], [], "^", color="black", label="prediction turns positive")
    right.plot([], [], color=GREY, linewidth=1.5, label="95 %, bootstrap over seeds")
    nats = unit(question)
    label_axes(left, "quantile of the prediction", f"mean ΔD{',' if nats else ''}{nats}")
    label_axes(right, "quantile of the prediction", "share with ΔD > 0")
    left.set_xlim(0, 1)
    right.set_xlim(0, 1)
    right.set_ylim(*_SHARE)
    style.legend_below(figure, right)
    return figure
