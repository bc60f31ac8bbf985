"""Figures of a calibration: realized ΔD along the quantiles of what was predicted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.calibration import Calibrated, Calibration
from deltad.analysis.prediction import LINEAR
from deltad.analysis.shares import Share
from deltad.analysis.words import count, number, region, unit

from .style import NORMAL, SMALL, axes_or_new, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINEAR_COLOUR: Final = "#555555"
_APART: Final = 0.006  # of the axis' width, between directions in one bin


def calibration_figure(calibration: Calibration) -> Figure:
    """Mean ΔD and share of ΔD > 0 along the quantiles of every direction's prediction.

    Parameters
    ----------
    calibration : Calibration
        Computed.

    Returns
    -------
    Figure
        Two axes side by side.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    question = calibration.question
    seeds = len(calibration.predictors[0].delta_d)
    figure.suptitle(
        f"predicted first-order change against ΔD · outside: {region(question)} · protocol "
        f"{question.protocol}\n{count(seeds, 'seed')}, "
        f"{count(calibration.base.tokens, 'token')} outside",
        fontsize=NORMAL,
        parse_math=False,  # an arm may be named anything
    )
    left, right = figure.subplots(1, 2)
    draw_calibration(calibration, ax=left, legend=False)
    draw_increase(calibration, ax=right, legend=False)
    handles = right.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    return figure


def draw_calibration(
    calibration: Calibration, *, ax: Axes | None = None, legend: bool = True
) -> Axes:
    """Mean ΔD in bins by quantile of every direction's prediction.

    Parameters
    ----------
    calibration : Calibration
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        In the axes.

    Returns
    -------
    Axes
        A line with intervals a direction, which rises where it orders tokens as their ΔD does;
        a triangle below where its prediction turns positive.
    """
    ax = axes_or_new(ax)
    for at, each in enumerate(calibration.predictors):
        _line(ax, calibration, at, [part.delta_d for part in each.bins])
    ax.axhline(0, color="black", linewidth=0.8, zorder=0)
    nats = unit(calibration.question)
    return _finished(ax, calibration, f"mean ΔD{',' if nats else ''}{nats}", legend=legend)


def draw_increase(calibration: Calibration, *, ax: Axes | None = None, legend: bool = True) -> Axes:
    """Share of tokens with ΔD > 0 in bins by quantile of every direction's prediction.

    Parameters
    ----------
    calibration : Calibration
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        In the axes.

    Returns
    -------
    Axes
        A line with intervals a direction; the base rate dotted; triangles as in
        `draw_calibration`.
    """
    ax = axes_or_new(ax)
    for at, each in enumerate(calibration.predictors):
        _line(ax, calibration, at, [part.increase for part in each.bins])
    base = calibration.base.increase_rate
    if not math.isnan(base):
        ax.axhline(
            base, color="black", linewidth=0.8, linestyle=":", zorder=0,
            label=f"base rate, {number(base)}",
        )  # fmt: skip
    ax.set_ylim(-0.03, 1.03)
    return _finished(ax, calibration, "share with ΔD > 0", legend=legend)


def _line(ax: Axes, calibration: Calibration, at: int, shares: list[Share]) -> None:
    """One direction's bins with their intervals, and where its prediction turns positive."""
    each = calibration.predictors[at]
    places = _middles(each) + _APART * (at - (len(calibration.predictors) - 1) / 2)
    name = each.predictor.name
    colour = _LINEAR_COLOUR if name == LINEAR else colour_of(name)
    ax.plot(
        places, [share.rate for share in shares], marker="o", markersize=3.5, linewidth=1.2,
        color=colour, label=f"{name}: Spearman {number(each.spearman, signed=True)}, "
        f"signs right {number(each.signs.rate)}",
    )  # fmt: skip
    for place, share in zip(places, shares, strict=True):
        if not math.isnan(share.ci95[0]):
            ax.plot([place, place], list(share.ci95), color=colour, linewidth=1.2, alpha=0.8)
    pooled = np.concatenate([np.empty(0), *each.predictions])
    known = pooled[~np.isnan(pooled)]
    if len(known):
        ax.plot(
            [float(np.mean(known <= 0))], [0], marker="^", markersize=5, color=colour,
            transform=ax.get_xaxis_transform(), clip_on=False, linestyle="none", zorder=5,
        )  # fmt: skip


def _middles(each: Calibrated) -> NDArray[np.float64]:
    """The middle of every bin, as a quantile of the prediction."""
    sizes = np.array([part.increase.whole for part in each.bins])
    total = sizes.sum()
    return (np.cumsum(sizes) - sizes / 2) / total if total else np.empty(0)


def _finished(ax: Axes, calibration: Calibration, what: str, *, legend: bool) -> Axes:
    """Labels, and words where nothing is outside."""
    if not calibration.base.tokens:
        ax.text(
            0.5, 0.5, "no token outside", transform=ax.transAxes, ha="center", fontsize=NORMAL
        )  # fmt: skip
    ax.plot([], [], marker="^", color="black", linestyle="none", label="prediction turns positive")
    ax.plot([], [], color="black", linewidth=1.2, label="95 % bootstrap over seeds")
    ax.set_xlim(0, 1)
    ax.set_xlabel("quantile of the prediction", fontsize=NORMAL)
    ax.set_ylabel(what, fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)
    if legend:
        ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return ax
