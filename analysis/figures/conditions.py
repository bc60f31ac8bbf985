"""Figures of conditional rates: how often the sign of ΔD is foretold, bin by bin."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from deltad.analysis.condition_table import ConditionTable
from deltad.analysis.words import count, region

from .style import NORMAL, SMALL, axes_or_new, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS: Final = 3
_LONG: Final = 9  # letters of a label that are folded
_SPREAD: Final = 0.5  # of a bin's place, over which its criteria stand


def condition_figure(table: ConditionTable) -> Figure:
    """Sign accuracy by bin, axes a condition.

    Parameters
    ----------
    table : ConditionTable
        Computed.

    Returns
    -------
    Figure
        As many axes as conditions, in rows of at most three.
    """
    from matplotlib.figure import Figure

    names = [each.name for each in table.conditions]
    across = min(_ACROSS, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(max(4.4, 0.8 + 3.4 * across), 1.5 + 2.6 * down), layout="constrained")
    question = table.question
    seeds = len(table.parts[0].table.seeds) if table.parts else 0
    figure.suptitle(
        f"{', '.join(table.criteria)}\noutside: {region(question)} · protocol "
        f"{question.protocol} · {count(seeds, 'seed')}",
        fontsize=NORMAL,
        parse_math=False,  # an arm may be named anything
    )
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for at, ax in enumerate(axes):
        if at < len(names):
            draw_condition(table, names[at], ax=ax, legend=False)
        else:
            ax.remove()
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=across, fontsize=SMALL, frameon=False)
    return figure


def draw_condition(
    table: ConditionTable, condition: str, *, ax: Axes | None = None, legend: bool = True
) -> Axes:
    """Sign accuracy of every criterion in the bins of one condition.

    Parameters
    ----------
    table : ConditionTable
        Computed.
    condition : str
        One of its conditions.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        In the axes.

    Returns
    -------
    Axes
        A point with its interval a bin and criterion, every seed's own share a faint tick; a
        black bar at the constant guess of each bin; the number of tokens under its label.
    """
    ax = axes_or_new(ax)
    bins = table.of(condition, table.criteria[0])
    places = np.arange(len(bins))
    offsets = np.linspace(-0.5, 0.5, len(table.criteria) + 2)[1:-1] * _SPREAD
    for name, offset in zip(table.criteria, offsets, strict=True):
        colour = colour_of(name)
        ax.plot(
            [], [], marker="o", markersize=4, color=colour,
            label=f"{name}, pooled, 95 % bootstrap over seeds",
        )  # fmt: skip
        for place, part in enumerate(table.of(condition, name)):
            share = part.accuracy
            own = [each for each in share.by_seed if not math.isnan(each)]
            ax.plot(
                [place + offset] * len(own), own, marker="_", markersize=4, linestyle="none",
                color=colour, alpha=0.25, zorder=1,
            )  # fmt: skip
            if not math.isnan(share.rate):
                ax.plot(
                    [place + offset], [share.rate], marker="o", markersize=4, color=colour,
                    linestyle="none", zorder=4,
                )  # fmt: skip
            if not math.isnan(share.ci95[0]):
                ax.plot([place + offset] * 2, list(share.ci95), color=colour, linewidth=1.4)
    for place, part in enumerate(bins):
        guess = part.table.outside.constant_guess
        if not math.isnan(guess):
            ax.plot(
                [place - 0.4, place + 0.4], [guess, guess], color="black", linewidth=1.0,
                linestyle=":", zorder=2,
            )  # fmt: skip
    ax.plot([], [], color="black", linewidth=1.0, linestyle=":", label="constant guess in the bin")
    folded = [
        part.label.replace(", ", ",\n") if len(part.label) > _LONG else part.label for part in bins
    ]
    ax.set_xticks(
        places,
        [
            f"{label}\nn = {part.table.outside.tokens}"
            for label, part in zip(folded, bins, strict=True)
        ],
    )
    ax.set_xlim(-0.6, max(len(bins), 1) - 0.4)
    ax.set_ylim(-0.02, 1.02)
    meaning = next(each.meaning for each in table.conditions if each.name == condition)
    ax.set_xlabel(f"{meaning}; n tokens outside", fontsize=SMALL)
    ax.set_ylabel("signs of ΔD foretold", fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)
    if len(bins) > 4:
        ax.tick_params(axis="x", labelsize=SMALL - 1.5)
    if legend:
        ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return ax
