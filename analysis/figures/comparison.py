"""Figures of a comparison: who agrees with whom, and who foretells the sign of ΔD."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from deltad.analysis.comparison import Comparison
from deltad.analysis.shares import Share
from deltad.analysis.words import count, number, region

from .style import NORMAL, SMALL, axes_or_new, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CRITERION_HEIGHT: Final = 0.36  # inches
_DARK: Final = 0.6  # share from which a cell's text is white
_ABOVE: Final = -0.16
_BELOW: Final = 0.16


def comparison_figure(comparison: Comparison) -> Figure:
    """Agreement of all criteria, and their sign accuracy, side by side.

    Parameters
    ----------
    comparison : Comparison
        Computed.

    Returns
    -------
    Figure
        Two axes: heat map and forest plot, a row a criterion in both.
    """
    from matplotlib.figure import Figure

    rows = len(comparison.criteria)
    height = 1.6 + _CRITERION_HEIGHT * rows
    figure = Figure(figsize=(5.4 + 0.3 * rows, height), layout="constrained")
    question, table = comparison.question, comparison.criteria[0].table
    figure.suptitle(
        f"criteria against {question.baseline} · outside: {region(question)} · protocol "
        f"{question.protocol}\n{count(len(table.seeds), 'seed')}, "
        f"{count(comparison.outside.tokens, 'token')} outside",
        fontsize=NORMAL,
        parse_math=False,  # an arm may be named anything
    )
    left, right = figure.subplots(1, 2, width_ratios=(rows, max(6.0, 0.8 * rows)))
    draw_agreement(comparison, ax=left)
    draw_sign_accuracy(comparison, ax=right, legend=False)
    right.set_yticklabels([])
    handles = right.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    return figure


def draw_agreement(comparison: Comparison, *, ax: Axes | None = None) -> Axes:
    """Share of the tokens outside that two criteria decide alike, as a heat map.

    Parameters
    ----------
    comparison : Comparison
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A cell a pair with its share in per cent; empty where no token is outside.
    """
    ax = axes_or_new(ax)
    agreement = comparison.agreement
    ax.imshow(agreement, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for (row, column), share in np.ndenumerate(agreement):
        if not math.isnan(share):
            ax.text(
                column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=SMALL - 1,
                color="white" if share > _DARK else "black",
            )  # fmt: skip
    places = np.arange(len(comparison.names))
    ax.set_xticks(places, [str(place + 1) for place in places])
    ax.set_yticks(places, [f"{name} {at}" for at, name in enumerate(comparison.names, 1)])
    ax.set_xlabel("tokens outside decided alike, %", fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL, length=0)
    return ax


def draw_sign_accuracy(
    comparison: Comparison, *, ax: Axes | None = None, legend: bool = True
) -> Axes:
    """Share of tokens whose sign of ΔD each criterion foretold, as a forest plot.

    Parameters
    ----------
    comparison : Comparison
        Computed.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        In the axes.

    Returns
    -------
    Axes
        A filled point a criterion over all tokens outside with every seed's own share as a
        tick, an open one over the tokens in disagreement with the baseline, each with its
        interval; the constant guess as a line, and as a cross where it is another one.
    """
    ax = axes_or_new(ax)
    for place, each in enumerate(comparison.criteria):
        colour = colour_of(each.name)
        own = [share for share in each.outside.by_seed if not math.isnan(share)]
        ax.plot(
            own, [place + _ABOVE] * len(own), marker="|", markersize=5, linestyle="none",
            color=colour, alpha=0.3, zorder=1,
        )  # fmt: skip
        _point(ax, each.outside, place + _ABOVE, colour, filled=True)
        _point(ax, each.disagreement, place + _BELOW, colour, filled=False)
        guess = each.table.disagreement.constant_guess
        if each.disagreement.whole:
            ax.plot(
                [guess], [place + _BELOW], marker="x", markersize=4, color="black", zorder=3,
                linestyle="none",
            )  # fmt: skip
    guess = comparison.outside.constant_guess
    judged = any(each.outside.whole for each in comparison.criteria)
    if judged:
        ax.axvline(
            guess, color="black", linewidth=0.8, linestyle=":", zorder=0,
            label=f"constant guess, tokens outside: {number(guess)}",
        )  # fmt: skip
    for label, style in (
        ("all tokens outside, pooled, 95 % bootstrap over seeds", {"marker": "o"}),
        ("in disagreement with the baseline", {"marker": "o", "markerfacecolor": "white"}),
        ("constant guess there", {"marker": "x", "linestyle": "none"}),
        ("one seed, tokens outside", {"marker": "|", "linestyle": "none"}),
    ):
        ax.plot([], [], color="#555555", markersize=5, label=label, **style)  # type: ignore[arg-type]
    if not judged:
        ax.text(
            0.5, 0.5, "no sign is judged here", transform=ax.transAxes, ha="center",
            fontsize=NORMAL,
        )  # fmt: skip
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(len(comparison.criteria) - 0.5, -0.5)
    ax.set_yticks(range(len(comparison.criteria)), list(comparison.names))
    ax.set_xlabel("share of signs of ΔD foretold", fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)
    ax.grid(axis="y", linewidth=0.3, alpha=0.5)
    if legend:
        ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return ax


def _point(ax: Axes, share: Share, place: float, colour: str, *, filled: bool) -> None:
    """A share with its 95 % interval; nothing where it is undefined."""
    if math.isnan(share.rate):
        return
    if not math.isnan(share.ci95[0]):
        ax.plot(list(share.ci95), [place, place], color=colour, linewidth=1.5, zorder=2)
    ax.plot(
        [share.rate], [place], marker="o", markersize=5, color=colour, linestyle="none", zorder=4,
        markerfacecolor=colour if filled else "white",
    )  # fmt: skip
