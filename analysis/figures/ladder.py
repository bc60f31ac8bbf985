"""Figure of a ladder: shares of signs foretold, rung by rung."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

import numpy as np

from deltad.analysis.ladder import SETS, LadderTable
from deltad.analysis.words import count, title

from .style import NORMAL, SMALL, axes_or_new, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GUESS: Final = "#7F7F7F"
_AGREEMENT: Final = "#333333"
_NAMES: Final = {"outside": "tokens outside", "disagreement": "disagreement tokens"}
_SPREAD: Final = 0.16  # between criteria on one rung


def ladder_figure(table: LadderTable) -> Figure:
    """Shares of signs foretold over the rungs, for both sets of tokens.

    Parameters
    ----------
    table : LadderTable
        Of one arm.

    Returns
    -------
    Figure
        Four axes: shares right above, agreement with the step below; tokens outside to the
        left, disagreement tokens to the right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1.3))
    figure.suptitle(
        f"Where the sign of ΔD is lost · {title(table.question)}\n"
        f"protocol {table.question.protocol} · {count(len(table.seeds), 'seed')}",
        fontsize=NORMAL,
        parse_math=False,  # an arm may be named anything
    )
    for column, within in enumerate(SETS):
        draw_foretold(table, within, ax=axes[0, column])
        draw_agreement(table, within, ax=axes[1, column])
        axes[0, column].set_xlabel("")
        if column:
            for row in range(2):
                axes[row, column].set_ylabel("")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
        fontsize=SMALL, frameon=False,
    )  # fmt: skip
    for letter, ax in zip("abcd", axes.flat, strict=True):
        ax.set_title(letter, loc="left", fontsize=NORMAL, fontweight="bold")
    return figure


def draw_foretold(table: LadderTable, within: str = "outside", *, ax: Axes | None = None) -> Axes:
    """Share of signs that each criterion foretells, on each rung.

    Parameters
    ----------
    table : LadderTable
        Of one arm.
    within : {"outside", "disagreement"}
        Which tokens.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A line a criterion with intervals, its seeds as pale points, and the constant guess of
        every rung.
    """
    ax = axes_or_new(ax)
    places = np.arange(len(table.rungs))
    for at, name in enumerate(table.criteria):
        found = [table.right(rung.name, name, within) for rung in table.rungs]
        shares = np.array([each.share for each in found])
        ends = np.array([each.ci95 for each in found]).reshape(-1, 2)
        reach = np.clip(np.stack([shares - ends[:, 0], ends[:, 1] - shares]), 0, None)
        shift = _SPREAD * (at - (len(table.criteria) - 1) / 2)
        ax.errorbar(
            places + shift, shares, np.nan_to_num(reach), color=colour_of(name), marker="o",
            markersize=5, linewidth=1.4, elinewidth=1.2, capsize=2, label=name,
        )  # fmt: skip
        if len(table.seeds) > 1:
            by_seed = [each.by_seed for each in found]
            ax.plot(
                places + shift, np.array(by_seed), linestyle="none", marker=".", markersize=3,
                color=colour_of(name), alpha=0.15, zorder=1, markeredgewidth=0,
            )  # fmt: skip
    guesses = [table.constant_guess(rung.name, within) for rung in table.rungs]
    ax.plot(
        places, guesses, linestyle="none", marker="_", markersize=22, markeredgewidth=1.6,
        color=_GUESS, label="constant guess of the rung",
    )  # fmt: skip
    ax.plot([], [], " ", label="pale points: seeds; bars: 95 %, bootstrap over seeds")
    ax.axhline(0.5, color="black", linewidth=0.6, linestyle=":", zorder=0)
    ax.set_ylim(-0.03, 1.03)
    ax.set_title(f"{_NAMES[within]}: {table.tokens(within)}", fontsize=NORMAL)
    ax.set_ylabel("share of signs foretold", fontsize=NORMAL)
    _rungs(table, ax)
    return ax


def draw_agreement(table: LadderTable, within: str = "outside", *, ax: Axes | None = None) -> Axes:
    """Share of tokens on which a rung has the sign of the step as it was made.

    Parameters
    ----------
    table, within, ax
        As `draw_foretold`.

    Returns
    -------
    Axes
        A point with its interval a rung.
    """
    ax = axes_or_new(ax)
    found = [table.agreement(rung.name, within) for rung in table.rungs]
    shares = np.array([each.share for each in found])
    ends = np.array([each.ci95 for each in found]).reshape(-1, 2)
    reach = np.clip(np.stack([shares - ends[:, 0], ends[:, 1] - shares]), 0, None)
    ax.errorbar(
        np.arange(len(shares)), shares, np.nan_to_num(reach), color=_AGREEMENT, marker="s",
        markersize=4, linewidth=1.2, capsize=2,
    )  # fmt: skip
    ax.axhline(0.5, color="black", linewidth=0.6, linestyle=":", zorder=0)
    ax.set_ylim(-0.03, 1.06)
    ax.set_ylabel("has the sign\nof the step", fontsize=NORMAL)
    _rungs(table, ax)
    return ax


def _rungs(table: LadderTable, ax: Axes) -> None:
    """Name the rungs along the axis."""
    labels = [textwrap.fill(rung.label, 13) for rung in table.rungs]
    ax.set_xticks(range(len(labels)), labels, fontsize=SMALL - 1)
    ax.set_xlim(-0.5, max(1, len(labels)) - 0.5)
    ax.set_xlabel("ΔD along …", fontsize=NORMAL)
    ax.tick_params(axis="y", labelsize=SMALL)
