"""Shares with their intervals: sweeps, comparisons, conditions, calibrations, ladders."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.pairs import SIDES, Estimate
from deltad.analysis.result import counted, number, region, title, unit
from deltad.analysis.tables.compare import PROTOCOL, Comparison, ConditionTable, Sweep
from deltad.analysis.tables.ladder import SETS, Calibrated, Calibration, LadderTable
from deltad.analysis.values import LINEAR

from .style import (
    GREY,
    NORMAL,
    SMALL,
    colour_of,
    draw,
    estimate,
    labelled,
    legend_below,
    new_figure,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GUESS: Final = "always the more common direction"
_INTERVALS: Final = "95 % bootstrap over seeds"
_APART: Final = 0.012
"""Between two rules at one place, of the axis' width."""
_DARK: Final = 0.6
"""Share from which a cell's text is white."""
_ACROSS: Final = 3
"""Conditions in a row."""


@draw.register(Sweep)
def sweep_figure(sweep: Sweep) -> Figure:
    """Unsafe-keep rates, predicted signs and counts along a sweep, one above the other."""
    head, *rest = sweep.heading().split(" · ")
    figure = new_figure(5.6, 7.4, f"{head}\n{' · '.join(rest)}")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1.2, 0.8))
    rates, signs, counts = axes
    names = dict(zip(SIDES, sweep.question.names, strict=True))
    pairs, places = [point.pair for point in sweep.rows], _places(sweep)
    span = max(float(np.ptp(places)), 1.0)
    width = 0.0 if sweep.over == PROTOCOL else 1.2  # protocols have no order
    for side, shift in zip(SIDES, (-_APART * span, _APART * span), strict=True):
        kept = [pair.side(side) for pair in pairs]
        right = [pair.accuracy(side) for pair in pairs]
        colour = colour_of(names[side])
        _line(
            rates, places + shift, [each.unsafe_keep_rate for each in kept],
            [each.unsafe_keep_rate_ci95 for each in kept], [each.rates for each in kept], colour,
            linewidth=width, label=f"{names[side]}, {_INTERVALS}",
        )  # fmt: skip
        _shares(signs, places + shift, right, colour, linewidth=width)
        counts.plot(
            places, [_count(each.kept) for each in kept], marker="o", markersize=3,
            linewidth=width, color=colour, label=f"kept by the {side} alone",
        )  # fmt: skip
    _bars(rates, sweep, [pair.disagreement.increase_rate for pair in pairs], ":",
          "P(ΔD > 0) in the disagreement set")  # fmt: skip
    _bars(signs, sweep, [pair.outside.constant_guess for pair in pairs], (0, (4, 2)),
          f"{_GUESS}, tokens outside")  # fmt: skip
    counts.plot(
        places, [_count(pair.outside.tokens) for pair in pairs], marker="o", markersize=3,
        linewidth=width, color=GREY, label="outside",
    )  # fmt: skip
    counts.set_yscale("symlog", linthresh=1)
    counts.set_ylim(0, 30 * max(1, counts.get_ylim()[1]))  # the legend stands above the counts
    counts.legend(fontsize=SMALL, frameon=False, loc="upper center", ncols=3)
    nats = f",{unit(sweep.question)}" if unit(sweep.question) else ""
    meaning = {"threshold": f"δ{nats}", "top-k": "K', ids of the top-K that are read"}
    for ax, what in zip(
        axes, ("unsafe-keep rate", "sign of ΔD predicted, outside", "tokens, all seeds"),
        strict=True,
    ):  # fmt: skip
        labelled(ax, meaning.get(sweep.over, sweep.over) if ax is counts else "", what)
        if ax is not counts:
            ax.set_ylim(-0.03, 1.03)
    ticks = [
        f"{point.value:g}" if not isinstance(point.value, str)
        else "\n".join(textwrap.wrap(point.value.replace(":", ": "), 14))
        for point in sweep.rows
    ]  # fmt: skip
    counts.set_xticks(places, ticks)
    counts.set_xticks([], minor=True)
    counts.set_xlim(places.min() - 0.06 * span, places.max() + 0.06 * span)
    legend_below(figure, rates, signs, columns=1)
    return figure


@draw.register(Comparison)
def comparison_figure(comparison: Comparison) -> Figure:
    """Who decides alike as a heat map, and how often each predicts the sign of ΔD."""
    rows, question = len(comparison.rows), comparison.question
    figure = new_figure(
        5.4 + 0.3 * rows, 1.6 + 0.36 * rows,
        f"criteria against {question.names[1]} · outside: {region(question)} · protocol "
        f"{question.protocol}\n{counted(len(comparison.first.seeds), 'seed')}, "
        f"{counted(comparison.first.outside.tokens, 'token')} outside",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(rows, max(6.0, 0.8 * rows)))
    _agreement(left, comparison)
    for place, each in enumerate(comparison.rows):
        colour = colour_of(each.name)
        for share, at, filled in ((each.outside, -0.16, True), (each.disagreement, 0.16, False)):
            estimate(
                right, place + at, share.value, share.ci95, colour, upright=False, filled=filled,
                by_seed=share.by_seed if filled else (), size=5,
            )  # fmt: skip
        if each.disagreement.whole:
            right.plot(
                [each.pair.disagreement.constant_guess], [place + 0.16], marker="x", markersize=4,
                color="black", zorder=3, linestyle="none",
            )  # fmt: skip
    if any(each.outside.whole for each in comparison.rows):
        guess = comparison.first.outside.constant_guess
        right.axvline(
            guess, color="black", linewidth=0.8, linestyle=":", zorder=0,
            label=f"{_GUESS}, tokens outside: {number(guess)}",
        )  # fmt: skip
    else:
        say(right, "no sign is judged here")
    legend: dict[str, dict[str, Any]] = {
        f"all tokens outside, pooled, {_INTERVALS}": {"marker": "o"},
        "in disagreement with the baseline": {"marker": "o", "markerfacecolor": "white"},
        f"{_GUESS} there": {"marker": "x", "linestyle": "none"},
        "one seed, tokens outside": {"marker": "|", "linestyle": "none"},
    }
    for label, style in legend.items():
        right.plot([], [], color=GREY, markersize=5, label=label, **style)
    right.set_xlim(-0.02, 1.02)
    right.set_ylim(rows - 0.5, -0.5)
    right.set_yticks(range(rows), [""] * rows)
    right.grid(axis="y", linewidth=0.3, alpha=0.5)
    labelled(right, "share of signs of ΔD predicted")
    legend_below(figure, right)
    return figure


@draw.register(ConditionTable)
def condition_figure(table: ConditionTable) -> Figure:
    """How often the sign of ΔD is predicted, bin by bin, axes per condition."""
    across = min(_ACROSS, len(table.conditions))
    down = -(-len(table.conditions) // across)
    question = table.question
    figure = new_figure(
        max(4.4, 0.8 + 3.4 * across), 1.5 + 2.6 * down,
        f"{', '.join(table.criteria)}\noutside: {region(question)} · protocol "
        f"{question.protocol} · {counted(len(table.first.seeds), 'seed')}",
    )  # fmt: skip
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for ax in axes[len(table.conditions) :]:
        ax.remove()
    for ax, condition in zip(axes, table.conditions, strict=False):
        offsets = np.linspace(-0.25, 0.25, len(table.criteria) + 2)[1:-1]
        for name, offset in zip(table.criteria, offsets, strict=True):
            shares = [part.accuracy for part in table.of(condition.name, name)]
            places = np.arange(len(shares), dtype=np.float64) + float(offset)
            _shares(
                ax, places, shares, colour_of(name), linewidth=0.0,
                label=f"{name}, pooled, {_INTERVALS}",
            )  # fmt: skip
        bins = table.of(condition.name, table.criteria[0])
        for place, part in enumerate(bins):
            ax.plot(
                [place - 0.4, place + 0.4], [part.pair.outside.constant_guess] * 2,
                color="black", linewidth=1.0, linestyle=":", zorder=2,
                label=f"{_GUESS} in the bin",
            )  # fmt: skip
        labels = [part.label.replace(", ", ",\n" if len(part.label) > 9 else ", ") for part in bins]
        ax.set_xticks(
            range(len(bins)),
            [f"{words}\nn = {part.pair.outside.tokens}"
             for words, part in zip(labels, bins, strict=True)],
        )  # fmt: skip
        ax.set_xlim(-0.6, max(len(bins), 1) - 0.4)
        ax.set_ylim(-0.02, 1.02)
        labelled(ax, "", "sign of ΔD predicted")
        ax.set_xlabel(f"{condition.meaning}; n tokens outside", fontsize=SMALL)
        if len(bins) > 4:
            ax.tick_params(axis="x", labelsize=SMALL - 1.5)
    legend_below(figure, axes[0], columns=across)
    return figure


@draw.register(Calibration)
def calibration_figure(calibration: Calibration) -> Figure:
    """Mean ΔD and the share with ΔD > 0 along the quantiles of every prediction.

    A line rises where its prediction orders tokens as their ΔD does; a triangle below stands
    where the prediction turns positive.
    """
    question, predictors = calibration.question, calibration.predictors
    figure = new_figure(
        8.4, 4.2,
        f"predicted first-order change against ΔD · outside: {region(question)} · protocol "
        f"{question.protocol}\n{counted(len(calibration.pair.seeds), 'seed')}, "
        f"{counted(calibration.base.tokens, 'token')} outside",
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    for at, each in enumerate(predictors):
        places: NDArray[np.float64] = _middles(each) + _APART / 2 * (at - (len(predictors) - 1) / 2)
        name = each.predictor.name
        colour = GREY if name == LINEAR else colour_of(name)
        label = (
            f"{name}: Spearman {number(each.spearman, signed=True)}, signs predicted "
            f"{number(each.signs.value)}"
        )
        for ax, what in ((left, "delta_d"), (right, "increase")):
            shares = [getattr(part, what) for part in each.bins]
            _line(
                ax, places, [share.value for share in shares], [share.ci95 for share in shares],
                [()] * len(shares), colour, label=label,
            )  # fmt: skip
            _turn(ax, each, colour)
    left.axhline(0, color="black", linewidth=0.8, zorder=0)
    base = calibration.base.increase_rate
    if not math.isnan(base):
        right.axhline(
            base, color="black", linewidth=0.8, linestyle=":", zorder=0,
            label=f"base rate, {number(base)}",
        )  # fmt: skip
    right.set_ylim(-0.03, 1.03)
    nats = f",{unit(question)}" if unit(question) else ""
    for ax, what in ((left, f"mean ΔD{nats}"), (right, "share with ΔD > 0")):
        if not calibration.base.tokens:
            say(ax, "no token outside")
        ax.set_xlim(0, 1)
        labelled(ax, "quantile of the prediction", what)
    for label, marker in (("prediction turns positive", "^"), (_INTERVALS, "")):
        style = "none" if marker else "-"
        right.plot([], [], marker=marker, color="black", linestyle=style, label=label)
    legend_below(figure, right)
    return figure


@draw.register(LadderTable)
def ladder_figure(table: LadderTable) -> Figure:
    """Shares of predicted signs over the rungs above, agreement with the step below."""
    figure = new_figure(
        8.4, 5.4,
        f"Where the sign of ΔD is lost · {title(table.question)}\n"
        f"protocol {table.question.protocol} · {counted(len(table.seeds), 'seed')}",
    )  # fmt: skip
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1.3))
    places = np.arange(len(table.rungs), dtype=np.float64)
    for (above, below), within in zip(axes.T, SETS, strict=True):
        for at, name in enumerate(table.criteria):
            shift = 0.16 * (at - (len(table.criteria) - 1) / 2)
            _shares(
                above, places + shift, [table.right(rung.name, name, within)
                                        for rung in table.rungs],
                colour_of(name), label=name,
            )  # fmt: skip
        above.plot(
            places, [table.constant_guess(rung.name, within) for rung in table.rungs],
            linestyle="none", marker="_", markersize=22, markeredgewidth=1.6, color="#7F7F7F",
            label=f"{_GUESS} on the rung",
        )  # fmt: skip
        above.plot([], [], " ", label=f"pale ticks: seeds; bars: {_INTERVALS}")
        same = [table.agreement(rung.name, within) for rung in table.rungs]
        _line(
            below, places, [each.value for each in same], [each.ci95 for each in same],
            [()] * len(same), "#333333",
        )  # fmt: skip
        above.set_title(f"{SETS[within]}: {table.tokens(within)}", fontsize=NORMAL)
        for ax in (above, below):
            ax.axhline(0.5, color="black", linewidth=0.6, linestyle=":", zorder=0)
            ax.set_ylim(-0.03, 1.06)
            labelled(ax, "")
        labels = [textwrap.fill(rung.label, 13) for rung in table.rungs]
        below.set_xticks(places, labels, fontsize=SMALL - 1)
        below.set_xlim(-0.5, max(1, len(labels)) - 0.5)
        below.set_xlabel("ΔD along …", fontsize=NORMAL)
    axes[0, 0].set_ylabel("share of signs predicted", fontsize=NORMAL)
    axes[1, 0].set_ylabel("has the sign\nof the step", fontsize=NORMAL)
    legend_below(figure, axes[0, 0], columns=4)
    for letter, ax in zip("abcd", axes.flat, strict=True):
        ax.set_title(letter, loc="left", fontsize=NORMAL, fontweight="bold")
    return figure


def _line(
    ax: Axes,
    places: NDArray[np.float64],
    values: Sequence[float],
    intervals: Sequence[Sequence[float]],
    by_seed: Sequence[Any],
    colour: str,
    *,
    linewidth: float = 1.2,
    label: str = "",
) -> None:
    """Points with intervals, joined by a line of some width."""
    ax.plot(
        places, values, marker="o", markersize=4, linewidth=linewidth, color=colour, zorder=4,
        label=label or None,
    )  # fmt: skip
    for place, interval, own in zip(places, intervals, by_seed, strict=True):
        estimate(ax, place, math.nan, interval, colour, by_seed=own)


def _shares(
    ax: Axes, places: NDArray[np.float64], shares: Sequence[Estimate], colour: str, **style: Any
) -> None:
    """The same of pooled shares with every seed's own."""
    _line(
        ax, places, [each.value for each in shares], [each.ci95 for each in shares],
        [each.by_seed for each in shares], colour, **style,
    )  # fmt: skip


def _bars(ax: Axes, sweep: Sweep, values: Sequence[float], dashes: Any, label: str) -> None:
    """What needs no criterion to know, along a sweep."""
    style: dict[str, Any] = {"linestyle": dashes, "linewidth": 1.0}
    if sweep.over == PROTOCOL:  # a bar at each
        style = {"linestyle": "none", "marker": "_", "markersize": 24}
    ax.plot(_places(sweep), values, color="black", label=label, zorder=2, **style)


def _places(sweep: Sweep) -> NDArray[np.float64]:
    """Where the points stand: by the logarithm of a number, in a row otherwise."""
    values = [point.value for point in sweep.rows]
    if sweep.over == PROTOCOL or any(float(value) <= 0 for value in values):
        return np.arange(len(values), dtype=np.float64)
    return np.array([math.log10(float(value)) for value in values])


def _count(number_of: int | None) -> float:
    """A count as a point; NaN where it is not known."""
    return math.nan if number_of is None else number_of


def _agreement(ax: Axes, comparison: Comparison) -> None:
    """Share of the tokens outside that two criteria decide alike, in per cent."""
    agreement = comparison.agreement
    ax.imshow(agreement, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for (row, column), share in np.ndenumerate(agreement):
        if not math.isnan(share):
            ax.text(
                column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=SMALL - 1,
                color="white" if share > _DARK else "black",
            )  # fmt: skip
    places = range(len(comparison.names))
    ax.set_xticks(places, [str(place + 1) for place in places])
    ax.set_yticks(places, [f"{name} {at}" for at, name in enumerate(comparison.names, 1)])
    labelled(ax, "tokens outside decided alike, %")
    ax.tick_params(length=0)


def _turn(ax: Axes, each: Calibrated, colour: str) -> None:
    """A triangle where a prediction turns positive."""
    pooled = np.concatenate([np.empty(0), *each.predictions])
    known = pooled[~np.isnan(pooled)]
    if len(known):
        ax.plot(
            [float(np.mean(known <= 0))], [0], marker="^", markersize=5, color=colour,
            transform=ax.get_xaxis_transform(), clip_on=False, linestyle="none", zorder=5,
        )  # fmt: skip


def _middles(each: Calibrated) -> NDArray[np.float64]:
    """The middle of every bin, as a quantile of the prediction."""
    sizes = np.array([part.tokens for part in each.bins], dtype=np.float64)
    return (np.cumsum(sizes) - sizes / 2) / sizes.sum() if len(sizes) else np.empty(0)
