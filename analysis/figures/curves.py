"""Lines: curves of trainings over their steps, and power over the number of seeds."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from deltad.analysis.question import QuestionError
from deltad.analysis.result import counted, points, title
from deltad.analysis.statistics import t_band
from deltad.analysis.tables.power import TESTS, PowerTable
from deltad.analysis.tables.training import Setting, TrainingTable
from deltad.curves import CURVES

from .style import NORMAL, SMALL, colours_of, draw, label_axes, legend_below, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Curves of one setting, three in a row; and of several settings, a row each
_ALONE: Final = ("accuracy", "reward", "length", "ppo_kl", "masked_fraction", "outside_fraction")
_SEVERAL: Final = ("accuracy", "ppo_kl", "masked_fraction", "outside_fraction")
_DASHES: Final = ("-", "--", "-.")  # masks may decide alike throughout: each line shows


@draw.register(TrainingTable)
def _training(table: TrainingTable) -> Figure:
    """Curves of every mask: six of one setting, or four of each of several."""
    if not table.rows:
        raise QuestionError("no run was trained to its end: there is nothing to draw")
    settings = table.settings
    several = len(settings) > 1
    names: tuple[str, ...] = _SEVERAL if several else _ALONE
    shape = (len(names), len(settings)) if several else (2, 3)
    size = (1.2 + 2.6 * len(settings), 8.6) if several else (9.0, 5.6)
    seeds = sorted({len(row.runs) for row in table.rows})
    many = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]}–{seeds[-1]} seeds"
    figure = new_figure(
        *size, f"{many} per mask" if several else f"{settings[0].name} · {many} per mask",
        "lines: means over seeds; bands: their 95 % t-intervals; dots: seeds, at the end",
    )  # fmt: skip
    axes = figure.subplots(*shape, squeeze=False, sharey="row" if several else False).ravel()
    for ax, (name, setting) in zip(axes, product(names, settings), strict=True):
        _curve(table, name, setting, ax)
        if several and name == names[0]:
            ax.set_title(table.name_of(setting), fontsize=SMALL, parse_math=False)
        if setting is not settings[0]:
            ax.set_ylabel("")
    for ax, (name, _) in zip(axes, product(names, settings), strict=True):
        if name.endswith("_fraction"):  # once all that share the axis are drawn
            ax.set_ylim(bottom=0)
    legend_below(figure, *axes)
    return figure


def _curve(table: TrainingTable, name: str, setting: Setting, ax: Axes) -> None:
    """One curve of every mask with its band; of the accuracy also each seed's last value."""
    colours = colours_of(table.masks)
    for at, mask in enumerate(table.masks):
        steps, values = table.course(setting, mask, name)
        if not len(steps):
            continue
        mean, low, high = t_band(values)
        colour, dashes = colours[mask], _DASHES[at % len(_DASHES)]
        ax.plot(steps, mean, dashes, color=colour, linewidth=1.4, label=mask)
        ax.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        if name == "accuracy":
            behind = np.full(len(values), steps[-1] * (1.02 + 0.015 * at))
            ax.plot(behind, values[:, -1], ".", ms=4, mew=0, color=colour, alpha=0.7)
    samples = f" (avg@{setting.options['eval_samples']})" if name == "accuracy" else ""
    label_axes(ax, "optimizer steps", CURVES[name].label + samples)


@draw.register(PowerTable)
def _power(table: PowerTable) -> Figure:
    """Power against the number of seeds, axes per test; darker lines are larger differences."""
    if not table.curves:
        raise QuestionError("fewer than two seeds have both rates: there is nothing to draw")
    figure = new_figure(
        7.4, 3.4, f"{title(table.question)} · protocol {table.question.protocol}",
        f"simulated from {counted(table.seeds, 'seed')}, {table.pair.paired.seeds} with both "
        f"rates; level {table.level:g}, {table.times} dumps per point",
    )  # fmt: skip
    axes = figure.subplots(1, len(TESTS), sharex=True, sharey=True)
    for test, ax in zip(TESTS, axes, strict=True):
        for at, (difference, seeds, shares) in enumerate(table.curves):
            powers = [each[test] for each in shares]
            if difference == 0:
                ax.plot(seeds, powers, "--", color="#D55E00", lw=1.3, label="equal mean rates")
                continue
            shade = 0.75 - 0.75 * at / max(1, len(table.curves) - 1)
            colour = (shade * 0.9, shade, 0.45 + 0.5 * shade)
            ax.plot(seeds, powers, color=colour, lw=1.3, label=f"lower by {points(difference)}")
        ax.axhline(table.goal, color="#333333", linewidth=0.7, linestyle=":")
        here = f"this dump: {counted(table.seeds, 'seed')}"
        ax.axvline(table.seeds, color="#333333", linewidth=0.9, linestyle="-.", label=here)
        ax.set_xscale("log")
        ax.set_xlim(table.curves[0][1][0], table.curves[0][1][-1])
        ax.set_ylim(0, 1)
        rate = table.rejects_equal_here[test]
        more = "" if math.isnan(rate) else f"\nrejects equal rates here: {rate:.3f}"
        ax.set_title(f"{test}{more}", fontsize=NORMAL)
        label_axes(ax, "seeds", "")
    axes[0].set_ylabel("share of simulated dumps in which it rejects", fontsize=NORMAL)
    legend_below(figure, axes[0])
    return figure
