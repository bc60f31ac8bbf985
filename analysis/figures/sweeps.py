"""Figures of sweeps: rates, signs foretold and counts by threshold, K' or protocol."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.forms.sweeps import sweep_title
from deltad.analysis.sweeps import PROTOCOL, Point, Sweep
from deltad.analysis.words import count, unit

from .style import NORMAL, SMALL, axes_or_new, colour_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDES: Final = {"criterion": -1, "baseline": 1}
_APART: Final = 0.012  # half the distance of the two sides, of the axis' width
_BASE: Final = "#555555"


def sweep_figure(sweep: Sweep) -> Figure:
    """Unsafe-keep rates, signs foretold and counts along a sweep, one above the other.

    Parameters
    ----------
    sweep : Sweep
        Computed.

    Returns
    -------
    Figure
        Three axes over one common axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 7.4), layout="constrained")
    question, seeds = sweep.question, len(sweep.points[0].table.seeds)
    head, *rest = sweep_title(sweep).split(" · ")
    figure.suptitle(
        f"{head}\n{' · '.join([*rest, count(seeds, 'seed')])}",
        fontsize=NORMAL,
        parse_math=False,  # an arm may be named anything
    )
    rates, signs, counts = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1.2, 0.8))
    draw_swept_rates(sweep, ax=rates, legend=False)
    draw_swept_signs(sweep, ax=signs, legend=False)
    draw_swept_counts(sweep, ax=counts)
    for ax in (rates, signs):
        ax.set_xlabel("")
        ax.tick_params(labelbottom=False)
    handles = dict(zip(*reversed(rates.get_legend_handles_labels()), strict=True)) | dict(
        zip(*reversed(signs.get_legend_handles_labels()), strict=True)
    )
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", fontsize=SMALL,
        frameon=False, ncols=1 if len(question.criterion) > 30 else 2,
    )  # fmt: skip
    return figure


def draw_swept_rates(sweep: Sweep, *, ax: Axes | None = None, legend: bool = True) -> Axes:
    """Unsafe-keep rates of both criteria along a sweep, with the base rate.

    Parameters
    ----------
    sweep : Sweep
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        In the axes.

    Returns
    -------
    Axes
        A line with intervals a criterion (mean over seeds, every seed's own rate a faint
        tick); a dotted line for P(ΔD > 0) in the disagreement set.
    """
    ax = axes_or_new(ax)
    for side in _SIDES:
        values = [getattr(point.table, side) for point in sweep.points]
        _series(
            ax, sweep, side,
            [value.unsafe_keep_rate for value in values],
            [value.unsafe_keep_rate_ci95 for value in values],
            [point.table.rates(side).tolist() for point in sweep.points],
        )  # fmt: skip
    _base(
        ax, sweep, [point.table.disagreement.increase_rate for point in sweep.points],
        "P(ΔD > 0) in the disagreement set",
    )  # fmt: skip
    return _finished(ax, sweep, "unsafe-keep rate", legend=legend)


def draw_swept_signs(sweep: Sweep, *, ax: Axes | None = None, legend: bool = True) -> Axes:
    """Share of the tokens outside whose sign of ΔD is foretold, with the constant guess.

    Parameters
    ----------
    sweep : Sweep
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        In the axes.

    Returns
    -------
    Axes
        A line with intervals a criterion (pooled); a dashed line for the constant guess.
        Nothing is drawn at `own`, where no sign is judged.
    """
    ax = axes_or_new(ax)
    for side in _SIDES:
        shares = [point.accuracy[side] for point in sweep.points]
        _series(
            ax, sweep, side, [share.rate for share in shares], [share.ci95 for share in shares],
            [list(share.by_seed) for share in shares],
        )  # fmt: skip
    _base(
        ax, sweep, [point.table.outside.constant_guess for point in sweep.points],
        "constant guess, tokens outside", dashes=(0, (4, 2)),
    )  # fmt: skip
    return _finished(ax, sweep, "signs of ΔD foretold, outside", legend=legend)


def draw_swept_counts(sweep: Sweep, *, ax: Axes | None = None) -> Axes:
    """How many tokens are outside and in disagreement, and how many each criterion keeps.

    Parameters
    ----------
    sweep : Sweep
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A line a count, logarithmic; a count of 0 lies on the floor.
    """
    ax = axes_or_new(ax)
    question = sweep.question
    ax.set_yscale("symlog", linthresh=1)
    for label, colour, counts in (
        ("outside", _BASE, [point.table.outside.tokens for point in sweep.points]),
        (
            "kept by the criterion alone",
            colour_of(question.criterion),
            [point.table.criterion.kept for point in sweep.points],
        ),
        (
            "kept by the baseline alone",
            colour_of(question.baseline),
            [point.table.baseline.kept for point in sweep.points],
        ),
    ):
        ax.plot(
            _places(sweep), counts, marker="o", markersize=3, linewidth=_width(sweep),
            color=colour, label=label,
        )  # fmt: skip
    _finished(ax, sweep, "tokens, all seeds", legend=False, share=False)
    ax.set_ylim(0, 30 * max(1, ax.get_ylim()[1]))  # the legend stands above the counts
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", ncols=3)
    return ax


def _series(
    ax: Axes,
    sweep: Sweep,
    side: str,
    rates: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    by_seed: Sequence[Sequence[float]],
) -> None:
    """One criterion's rates with intervals, a little aside so that two do not hide each other."""
    name = getattr(sweep.question, side)
    places = _places(sweep)
    span = max(float(places.max() - places.min()), 1.0) if len(places) else 1.0
    places = places + _SIDES[side] * _APART * span
    colour = colour_of(name)
    for place, own in zip(places, by_seed, strict=True):
        known = [each for each in own if not math.isnan(each)]
        ax.plot(
            [place] * len(known), known, marker="_", markersize=3, linestyle="none",
            color=colour, alpha=0.15, zorder=1,
        )  # fmt: skip
    ax.plot(
        places, rates, marker="o", markersize=4, linewidth=_width(sweep), color=colour,
        label=f"{name}, 95 % bootstrap over seeds", zorder=4,
    )  # fmt: skip
    for place, interval in zip(places, intervals, strict=True):
        if not math.isnan(interval[0]):
            ax.plot([place, place], list(interval), color=colour, linewidth=1.5, zorder=3)


def _base(
    ax: Axes,
    sweep: Sweep,
    rates: Sequence[float],
    label: str,
    dashes: str | tuple[int, tuple[int, ...]] = ":",
) -> None:
    """What needs no criterion to know."""
    style: dict[str, Any] = {"linestyle": dashes, "linewidth": 1.0}
    if sweep.over == PROTOCOL:  # a bar at each
        style = {"linestyle": "none", "marker": "_", "markersize": 24}
    ax.plot(_places(sweep), rates, color="black", label=label, zorder=2, **style)


def _places(sweep: Sweep) -> NDArray[np.float64]:
    """Where the points stand: by the logarithm of a number, in a row otherwise."""
    values = [point.value for point in sweep.points]
    if sweep.over == PROTOCOL or any(float(value) <= 0 for value in values):
        return np.arange(len(values), dtype=np.float64)
    return np.array([math.log10(float(value)) for value in values])


def _width(sweep: Sweep) -> float:
    """Points of a line between points; protocols have no order, so none joins them."""
    return 0.0 if sweep.over == PROTOCOL else 1.2


def _label(point: Point) -> str:
    """A point's value as a tick has it."""
    if not isinstance(point.value, str):
        return f"{point.value:g}"
    return (
        point.value.replace("shared:", "shared:\n")
        .replace("-kl-", "-kl-\n")
        .replace("-tv-", "-tv-\n")
    )


def _finished(ax: Axes, sweep: Sweep, what: str, *, legend: bool, share: bool = True) -> Axes:
    """Ticks at the points, labels, the range of a share."""
    places = _places(sweep)
    ax.set_xticks(places, [_label(point) for point in sweep.points])
    ax.set_xticks([], minor=True)
    span = max(float(places.max() - places.min()), 1.0)
    ax.set_xlim(places.min() - 0.06 * span, places.max() + 0.06 * span)
    names = {
        "threshold": f"δ{',' if unit(sweep.question) else ''}{unit(sweep.question)}",
        "top-k": "K', ids of the top-K that are read",
        "protocol": "protocol",
    }
    ax.set_xlabel(names[sweep.over], fontsize=NORMAL)
    ax.set_ylabel(what, fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)
    if share:
        ax.set_ylim(-0.03, 1.03)
    if legend:
        ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return ax
