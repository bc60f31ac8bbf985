"""Numbers along an axis of steps or seeds: trainings with bands over seeds, power."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.result import counted, points, title
from deltad.analysis.tables.power import TESTS, PowerTable
from deltad.analysis.tables.training import Setting, TrainingTable
from deltad.curves import CURVES

from .style import NORMAL, SMALL, colour_of, draw, labelled, legend_below, new_figure, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

ALONE: Final = ("accuracy", "reward", "length", "ppo_kl", "masked_fraction", "outside_fraction")
"""Curves of one setting, three in a row."""

BESIDE: Final = ("accuracy", "ppo_kl", "masked_fraction", "outside_fraction")
"""Curves of several settings, a row each."""


@draw.register(TrainingTable)
def training_figure(table: TrainingTable) -> Figure:
    """Curves of every mask: six of one setting, or four of each of several side by side."""
    settings = table.settings
    several = len(settings) > 1
    seeds = sorted({len(row.runs) for row in table.rows}) or [0]
    many = counted(seeds[-1], "seed") if seeds[0] == seeds[-1] else f"{seeds[0]}–{seeds[-1]} seeds"
    head = "" if several else f"{table.name_of(settings[0])} · "
    figure = new_figure(
        1.2 + 2.6 * len(settings) if several else 9.0, 8.6 if several else 5.6,
        f"{head}{many} per mask\n"
        "lines: means over seeds; bands: their 95 % t-intervals; dots: seeds, at the end",
    )  # fmt: skip
    shape = (len(BESIDE), len(settings)) if several else (2, 3)
    axes = figure.subplots(*shape, squeeze=False, sharey="row" if several else False)
    if several:
        for row, name in zip(axes, BESIDE, strict=True):
            for ax, setting in zip(row, settings, strict=True):
                _curve(ax, table, name, setting)
                ax.set_title(table.name_of(setting) if name == BESIDE[0] else "", fontsize=SMALL)
                ax.set_ylabel(ax.get_ylabel() if ax is row[0] else "", fontsize=NORMAL)
    else:
        for ax, name in zip(axes.flat, ALONE, strict=True):
            _curve(ax, table, name, settings[0])
    legend_below(figure, axes.flat[0], columns=3)
    return figure


def _curve(ax: Axes, table: TrainingTable, name: str, setting: Setting) -> None:
    """One curve of every mask over the optimizer steps."""
    drawn: list[Floats] = []
    for at, mask in enumerate(table.masks):
        steps, values = table.course(setting, mask, name)
        if not len(steps):
            continue
        middle, low, high = band(values)
        # Two masks may decide alike throughout: a dashed line shows the one that it lies on.
        dashes = "--" if any(np.array_equal(middle, other) for other in drawn) else "-"
        drawn.append(middle)
        colour = colour_of(mask)
        ax.plot(steps, middle, dashes, color=colour, linewidth=1.4, label=mask)
        ax.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        if name == "accuracy":
            ax.plot(
                np.full(len(values), steps[-1] * (1.02 + 0.015 * at)), values[:, -1],
                linestyle="none", marker=".", markersize=4, color=colour, alpha=0.7,
                markeredgewidth=0,
            )  # fmt: skip
    if name.endswith("_fraction"):
        ax.set_ylim(bottom=0)
    samples = f" (avg@{setting.options['eval_samples']})" if name == "accuracy" else ""
    labelled(ax, "optimizer steps", f"{CURVES[name].label}{samples}")


def band(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean over seeds and the ends of its 95 % t-interval.

    Parameters
    ----------
    values : ndarray of float64, shape (seed, point)
        NaN takes no part.

    Returns
    -------
    mean, low, high : ndarray of float64, shape (point,)
        mean ± t s/√n with n − 1 degrees of freedom; all three the value itself where there is
        only one.

    Examples
    --------
    >>> import numpy as np
    >>> mean, low, high = band(np.array([[1.0], [3.0]]))
    >>> float(mean[0]), round(float(high[0] - mean[0]), 3)
    (2.0, 12.706)
    """
    from scipy.special import stdtrit

    known = ~np.isnan(values)
    size = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, values, 0.0).sum(axis=0) / size
    squares = np.where(known, values - mean, 0.0) ** 2
    free = np.maximum(size - 1, 1)
    reach = stdtrit(free, 0.975) * np.sqrt(squares.sum(axis=0) / free / size)
    reach = np.where(size > 1, reach, 0.0)
    return mean, mean - reach, mean + reach


@draw.register(PowerTable)
def power_figure(table: PowerTable) -> Figure:
    """Power against the number of seeds, axes per test.

    Darker lines are larger differences; the dashed one is how often a test rejects equal mean
    rates, which should stay at the level.
    """
    question = table.question
    figure = new_figure(
        7.4, 3.4,
        f"{title(question)} · protocol {question.protocol}\n"
        f"simulated from {counted(table.seeds, 'seed')}, {table.pair.paired.seeds} with both "
        f"rates; level {table.level:g}, {table.times} dumps a point",
    )  # fmt: skip
    axes = figure.subplots(1, len(TESTS), sharex=True, sharey=True)
    for test, ax in zip(TESTS, axes, strict=True):
        for at, (point, seeds, shares) in enumerate(table.curves):
            shade = 0.75 - 0.75 * at / max(1, len(table.curves) - 1)
            ax.plot(
                seeds, [each[test] for each in shares], "-" if point else "--", linewidth=1.3,
                color=(shade * 0.9, shade, 0.45 + 0.5 * shade) if point else "#D55E00",
                label=f"lower by {points(point)}" if point else "equal mean rates",
            )  # fmt: skip
        if table.curves:
            ax.axhline(table.goal, color="#333333", linewidth=0.7, linestyle=":")
            here = f"this dump: {counted(table.seeds, 'seed')}"
            ax.axvline(table.seeds, color="#333333", linewidth=0.9, linestyle="-.", label=here)
            ax.set_xscale("log")
            ax.set_xlim(table.curves[0][1][0], table.curves[0][1][-1])
        else:
            say(ax, "fewer than two seeds\nwith both rates")
        ax.set_ylim(0, 1)
        rate = table.rejects_equal_here[test]
        words = "" if math.isnan(rate) else f"\nrejects equal rates here: {rate:.3f}"
        ax.set_title(f"{test}{words}", fontsize=NORMAL)
        labelled(ax, "seeds")
    axes[0].set_ylabel("share of simulated dumps in which it rejects", fontsize=NORMAL)
    legend_below(figure, axes[0], columns=4)
    return figure
