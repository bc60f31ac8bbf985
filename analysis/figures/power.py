"""Power against the number of seeds, a panel a test."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from deltad.analysis.statistics.power import TESTS
from deltad.analysis.words import count, points, title

from .style import NORMAL, SMALL, axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltad.analysis.power import PowerTable

_EQUAL: Final = "#D55E00"
_HERE: Final = "#333333"


def power_figure(table: PowerTable) -> Figure:
    """Power against the number of seeds.

    Parameters
    ----------
    table : PowerTable
        Its curves are computed here, if they were not before.

    Returns
    -------
    Figure
        An axes a test, which share their scales.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    question, paired = table.question, table.table.paired
    figure.suptitle(
        f"{title(question)} · protocol {question.protocol}\n"
        f"simulated from {count(table.seeds, 'seed')}, {paired.seeds} with both rates; level "
        f"{table.level:g}, {table.times} dumps a point",
        fontsize=NORMAL,
        parse_math=False,  # an arm may be named anything
    )
    panels = figure.subplots(1, len(TESTS), sharex=True, sharey=True)
    for test, ax in zip(TESTS, panels, strict=True):
        draw_power(table, test, ax=ax)
    panels[0].set_ylabel("share of simulated dumps in which it rejects", fontsize=NORMAL)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
        fontsize=SMALL, frameon=False,
    )  # fmt: skip
    return figure


def draw_power(table: PowerTable, test: str, *, ax: Axes | None = None) -> Axes:
    """One test's power against the number of seeds, a line a difference.

    Parameters
    ----------
    table : PowerTable
        What was simulated.
    test : str
        One of `deltad.analysis.statistics.power.TESTS`.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        Darker lines are larger differences; the dashed one is how often it rejects equal mean
        rates, which should stay at the level. Nothing is drawn where the dump says nothing.
    """
    ax = axes_or_new(ax)
    for at, (point, seeds, shares) in enumerate(table.curves):
        powers = [each[test] for each in shares]
        if point == 0:
            ax.plot(seeds, powers, "--", color=_EQUAL, linewidth=1.3, label="equal mean rates")
            continue
        shade = 0.75 - 0.75 * at / max(1, len(table.curves) - 1)
        ax.plot(
            seeds, powers, color=(shade * 0.9, shade, 0.45 + 0.5 * shade), linewidth=1.3,
            label=f"lower by {points(point)}",
        )  # fmt: skip
    if table.curves:
        ax.axhline(table.goal, color=_HERE, linewidth=0.7, linestyle=":")
        ax.axvline(
            table.seeds, color=_HERE, linewidth=0.9, linestyle="-.",
            label=f"this dump: {count(table.seeds, 'seed')}",
        )  # fmt: skip
        ax.set_xscale("log")
        ax.set_xlim(table.curves[0][1][0], table.curves[0][1][-1])
    else:
        ax.text(
            0.5, 0.5, "fewer than two seeds\nwith both rates", ha="center", va="center",
            transform=ax.transAxes, fontsize=NORMAL,
        )  # fmt: skip
    ax.set_ylim(0, 1)
    rate = table.rejects_equal_here[test]
    here = "" if math.isnan(rate) else f"\nrejects equal rates here: {rate:.3f}"
    ax.set_title(f"{test}{here}", fontsize=NORMAL)
    ax.set_xlabel("seeds", fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)
    return ax
