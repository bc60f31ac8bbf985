"""Curves of trainings with bands over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.words import count
from deltad.curves import CURVES

from .style import NORMAL, SMALL, axes_or_new, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltad.analysis.trained_run import Setting
    from deltad.analysis.training import TrainingTable

Floats = NDArray[np.float64]

ALONE: Final = (
    "accuracy", "reward", "length", "ppo_kl", "masked_fraction", "outside_fraction"
)  # fmt: skip
"""Curves of one setting, three in a row."""

BESIDE: Final = ("accuracy", "ppo_kl", "masked_fraction", "outside_fraction")
"""Curves of several settings, a row each."""


def training_figure(table: TrainingTable) -> Figure:
    """Curves of every mask: six of one setting, or four of each of several.

    Parameters
    ----------
    table : TrainingTable
        Read.

    Returns
    -------
    Figure
        For one setting two rows of three axes; for several a row a curve and a column a
        setting.
    """
    from matplotlib.figure import Figure

    settings = table.settings
    several = len(settings) > 1
    shape = (len(BESIDE), len(settings)) if several else (2, 3)
    size = (1.2 + 2.6 * len(settings), 8.6) if several else (9.0, 5.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*shape, squeeze=False, sharey="row" if several else False)
    places = (
        [(name, setting, axes[r, c]) for r, name in enumerate(BESIDE)
         for c, setting in enumerate(settings)]
        if several
        else [(name, settings[0], ax) for name, ax in zip(ALONE, axes.flat, strict=True)]
    )  # fmt: skip
    for name, setting, ax in places:
        draw_curve(table, name, setting, ax=ax)
        if several:
            ax.set_title(table.name_of(setting) if name == BESIDE[0] else "", fontsize=SMALL)
            if setting is not settings[0]:
                ax.set_ylabel("")
    seeds = sorted({len(row.runs) for row in table.rows}) or [0]
    many = count(seeds[-1], "seed") if seeds[0] == seeds[-1] else f"{seeds[0]}–{seeds[-1]} seeds"
    head = "" if several else f"{table.name_of(settings[0])} · "
    figure.suptitle(
        f"{head}{many} a mask\n"
        "lines: means over seeds; bands: their 95 % t-intervals; dots: seeds, at the end",
        fontsize=NORMAL,
        parse_math=False,
    )
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
        fontsize=SMALL, frameon=False,
    )  # fmt: skip
    return figure


def draw_curve(
    table: TrainingTable, name: str, setting: Setting | None = None, *, ax: Axes | None = None
) -> Axes:
    """One curve of every mask over the optimizer steps.

    Parameters
    ----------
    table : TrainingTable
        Read.
    name : str
        One of `deltad.curves.CURVES`.
    setting : Setting, optional
        One of the table's; the first otherwise.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A line a mask, the mean over seeds, its band, and for the accuracy each seed's last
        value as a dot at the right edge.
    """
    ax = axes_or_new(ax)
    setting = table.settings[0] if setting is None else setting
    for at, mask in enumerate(table.masks):
        steps, values = table.course(setting, mask, name)
        if not len(steps):
            continue
        middle, low, high = band(values)
        colour = colour_of(mask)
        # Two tails may decide alike throughout: a dashed line shows the one that it lies on.
        dashes = "--" if mask.endswith("-exact") else "-"
        ax.plot(steps, middle, dashes, color=colour, linewidth=1.4, label=mask)
        ax.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        if name == "accuracy":
            place = steps[-1] * (1.02 + 0.015 * at)
            ax.plot(
                np.full(len(values), place), values[:, -1], linestyle="none", marker=".",
                markersize=4, color=colour, alpha=0.7, markeredgewidth=0,
            )  # fmt: skip
    if name.endswith("_fraction"):
        ax.set_ylim(bottom=0)
    ax.set_xlabel("optimizer steps", fontsize=NORMAL)
    ax.set_ylabel(_label(table, name, setting), fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)
    return ax


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


def _label(table: TrainingTable, name: str, setting: Setting) -> str:
    """The axis label, with the number of samples where that is what a number rests on."""
    if name != "accuracy":
        return CURVES[name].label
    return f"{CURVES[name].label} (avg@{setting.options['eval_samples']})"
