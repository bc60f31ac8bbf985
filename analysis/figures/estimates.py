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
from deltad.analysis.tables.ladder import SETS, Calibrated, Calibration, LadderTable

from .style import (
    GREY,
    NORMAL,
    SMALL,
    Floats,
    Shown,
    colours_of,
    draw,
    draw_points,
    explain_points,
    folded,
    label_axes,
    legend_below,
    new_figure,
    say,
)

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
    explain_points(ax)
    ax.set_xlim(places.min() - 0.6 * gap, places.max() + 0.6 * gap)
    ax.set_ylim(*_SHARE)


@draw.register(Sweep)
def _sweep(sweep: Sweep) -> Figure:
    """Unsafe-keep rates, predicted signs and counts, one above the other."""
    figure = new_figure(5.6, 7.2, sweep.heading())
    rates, signs, counts = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1.2, 0.8))
    pairs, places = [point.pair for point in sweep.rows], _places(sweep)
    joined = sweep.over != PROTOCOL  # protocols have no order
    names = dict(zip(SIDES, sweep.question.names, strict=True))
    _side_by_side(
        rates, places,
        {name: [Shown.of(pair.side(side)) for pair in pairs] for side, name in names.items()},
        [pair.disagreement.increase_rate for pair in pairs], "P(ΔD > 0) in the disagreement set",
        dashes="--", joined=joined,
    )  # fmt: skip
    _side_by_side(
        signs, places,
        {name: [pair.accuracy(side) for pair in pairs] for side, name in names.items()},
        [pair.outside.constant_guess for pair in pairs], f"{_GUESS}, outside", joined=joined,
    )  # fmt: skip
    label_axes(rates, "", "unsafe-keep rate")
    label_axes(signs, "", "sign of ΔD predicted, outside")
    if all(not pair.accuracy(side).whole for pair in pairs for side in SIDES):
        say(signs, "no sign is judged here")
    colours = colours_of(sweep.question.names)
    for label, colour, tokens in (
        ("outside", GREY, [pair.outside.tokens for pair in pairs]),
        *(
            (f"kept by the {side} alone", colours[name], [pair.side(side).kept for pair in pairs])
            for side, name in names.items()
        ),
    ):
        known = np.array(tokens, dtype=np.float64)
        counts.plot(
            places, known, marker="o", markersize=3, color=colour, label=label, linewidth=1.2,
            linestyle="-" if joined else "none",
        )  # fmt: skip
    counts.set_yscale("symlog", linthresh=1)
    counts.set_ylim(0, 30 * max(1, counts.get_ylim()[1]))  # the legend stands above the counts
    counts.legend(fontsize=SMALL, frameon=False, loc="upper center", ncols=3)
    values = [point.value for point in sweep.rows]
    ticks = [folded(each) if isinstance(each, str) else f"{each:g}" for each in values]
    counts.set_xticks(places, ticks, parse_math=False)
    nats = unit(sweep.question)
    label_axes(
        counts,
        {
            "threshold": f"δ{',' if nats else ''}{nats}",
            "top-k": "K', ids of the top-K that are read",
            "protocol": "protocol",
        }[sweep.over],
        "tokens, all seeds",
    )
    legend_below(figure, rates, signs)
    return figure


def _places(sweep: Sweep) -> Floats:
    """Where the points stand: by the logarithm of a number, in a row otherwise."""
    values = [point.value for point in sweep.rows]
    if sweep.over == PROTOCOL or min(values) <= 0:
        return np.arange(len(values), dtype=np.float64)
    return np.log10(np.array(values, dtype=np.float64))


@draw.register(Comparison)
def _comparison(comparison: Comparison) -> Figure:
    """Who agrees with whom, and whose signs come true: a row per criterion in both."""
    names, rows = comparison.names, comparison.rows
    pair, question = comparison.first, comparison.question
    figure = new_figure(
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
    places = np.arange(len(rows))
    left.set_xticks(places, [str(place + 1) for place in places])
    left.set_yticks(places, [f"{name} {at}" for at, name in enumerate(names, 1)])
    label_axes(left, "tokens outside\ndecided alike, %", "")
    left.tick_params(length=0)
    right.set_ylim(len(rows) - 0.5, -0.5)
    right.set_yticks(places, [""] * len(rows))
    label_axes(right, "sign of ΔD predicted", "")
    if any(each.outside.whole for each in rows):
        _forest(comparison, right)
        legend_below(figure, right)
    else:
        say(right, "no sign is judged here")
    return figure


def _forest(comparison: Comparison, ax: Axes) -> None:
    """Predicted signs: filled over all tokens outside, hollow over those in disagreement."""
    colours = colours_of(comparison.names)
    for place, each in enumerate(comparison.rows):
        colour = colours[each.name]
        draw_points(ax, [place - 0.16], [each.outside], colour, upright=False)
        draw_points(
            ax, [place + 0.16], [each.disagreement], colour, upright=False, seeds=False,
            face="white",
        )  # fmt: skip
        guess = each.pair.disagreement.constant_guess
        ax.plot([guess], [place + 0.16], "x", markersize=4, color="black", zorder=5)
    guess = comparison.first.outside.constant_guess
    ax.axvline(
        guess, color="black", linewidth=0.8, linestyle=":", zorder=0,
        label=f"{_GUESS}, outside: {number(guess)}",
    )  # fmt: skip
    styles: dict[str, dict[str, Any]] = {
        f"{_GUESS}, in disagreement": {"marker": "x", "color": "black"},
        "outside, pooled": {"marker": "o", "color": GREY},
        "in disagreement, pooled": {"marker": "o", "color": GREY, "markerfacecolor": "white"},
    }
    for label, style in styles.items():
        ax.plot([], [], markersize=4, linestyle="none", label=label, **style)
    explain_points(ax, "|")
    ax.set_xlim(*_SHARE)
    ax.grid(axis="y", linewidth=0.3, alpha=0.5)


@draw.register(ConditionTable)
def _conditions(table: ConditionTable) -> Figure:
    """Predicted signs by bin, axes per condition."""
    across = min(_ACROSS, len(table.conditions))
    down = -(-len(table.conditions) // across)
    figure = new_figure(
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
            say(ax, "no token outside")
            continue
        places = np.arange(len(bins), dtype=np.float64)
        _side_by_side(
            ax, places, {name: [part.accuracy for part in found] for name, found in parts.items()},
            [part.pair.outside.constant_guess for part in bins],
        )  # fmt: skip
        ticks = [f"{folded(part.label, 9)}\nn = {part.pair.outside.tokens}" for part in bins]
        ax.set_xticks(places, ticks)
        ax.xaxis.label.set_fontsize(SMALL)
        if len(bins) > 4:
            ax.tick_params(axis="x", labelsize=SMALL - 1.5)
    legend_below(figure, *axes[: len(table.conditions)])
    return figure


@draw.register(LadderTable)
def _ladder(table: LadderTable) -> Figure:
    """Predicted signs rung by rung, above the share of signs that are the step's already."""
    if not table.rungs:
        raise QuestionError("the ladder has no rung: there is nothing to draw")
    figure = new_figure(
        8.4, 5.4, f"Where the sign of ΔD is lost · {title(table.question)}",
        f"protocol {table.question.protocol} · {counted(len(table.seeds), 'seed')}",
    )  # fmt: skip
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1.3))
    places = np.arange(len(table.rungs), dtype=np.float64)
    rungs = [rung.name for rung in table.rungs]
    for (within, words), (upper, lower) in zip(SETS.items(), axes.T, strict=True):
        _side_by_side(
            upper, places,
            {
                name: [table.right(rung, name, within) for rung in rungs]
                for name in table.criteria
            },
            [table.constant_guess(rung, within) for rung in rungs], f"{_GUESS} on the rung",
            joined=True,
        )  # fmt: skip
        same = [table.agreement(rung, within) for rung in rungs]
        draw_points(lower, places, same, "#333333", joined=True, seeds=False)
        for ax in (upper, lower):
            ax.axhline(0.5, color="black", linewidth=0.4, zorder=0)
        upper.set_title(f"{words}: {table.tokens(within)}", fontsize=NORMAL)
        left = within == "outside"
        label_axes(upper, "", "sign of ΔD predicted" if left else "")
        label_axes(lower, "ΔD along …", "has the sign\nof the step" if left else "")
        lower.set_xticks(places, [folded(rung.label, 11) for rung in table.rungs])
        lower.tick_params(axis="x", labelsize=SMALL - 1)
        lower.set_ylim(-0.03, 1.06)
    for letter, ax in zip("abcd", axes.flat, strict=True):
        ax.set_title(letter, loc="left", fontsize=NORMAL, fontweight="bold")
    legend_below(figure, axes[0, 0])
    return figure


@draw.register(Calibration)
def _calibration(calibration: Calibration) -> Figure:
    """Mean ΔD, and the share of ΔD > 0, along the quantiles of every prediction."""
    base, question = calibration.base, calibration.question
    if not base.tokens:
        raise QuestionError("no token is outside: there is nothing to draw")
    figure = new_figure(
        8.4, 4.2, f"predicted first-order change against ΔD · {_asked(question)}",
        f"{counted(len(calibration.pair.seeds), 'seed')}, {counted(base.tokens, 'token')} outside",
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    colours = colours_of(each.predictor.name for each in calibration.predictors)
    for at, each in enumerate(calibration.predictors):
        colour, places = colours[each.predictor.name], _middles(each)
        places = places + _APART * (at - (len(colours) - 1) / 2)
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
            ax.plot(
                [positive], [0], marker="^", markersize=5, color=colour, linestyle="none",
                transform=ax.get_xaxis_transform(), clip_on=False, zorder=5,
            )  # fmt: skip
    left.axhline(0, color="black", linewidth=0.8, zorder=0)
    right.axhline(
        base.increase_rate, color="black", linewidth=0.8, linestyle=":", zorder=0,
        label=f"base rate, {number(base.increase_rate)}",
    )  # fmt: skip
    right.plot([], [], "^", color="black", label="prediction turns positive")
    right.plot([], [], color=GREY, linewidth=1.5, label="95 %, bootstrap over seeds")
    nats = unit(question)
    for ax, what in (
        (left, f"mean ΔD{',' if nats else ''}{nats}"), (right, "share with ΔD > 0")
    ):  # fmt: skip
        ax.set_xlim(0, 1)
        label_axes(ax, "quantile of the prediction", what)
    right.set_ylim(*_SHARE)
    legend_below(figure, right)
    return figure


def _middles(each: Calibrated) -> Floats:
    """The middle of every bin, as a quantile of the prediction."""
    sizes = np.array([part.tokens for part in each.bins], dtype=np.float64)
    return (np.cumsum(sizes) - sizes / 2) / max(1.0, float(sizes.sum()))
