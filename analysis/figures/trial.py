"""The figure of a trial of the doctor: its confusion matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from deltad.analysis.words import number

from .style import NORMAL, SMALL, axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltad.analysis.doctor.trial import Trial

_DARK: Final = 0.55
"""Share of a row above which its number is printed in white."""


def trial_figure(trial: Trial) -> Figure:
    """Draw the confusion matrix of a trial.

    Parameters
    ----------
    trial : Trial
        What was tried.

    Returns
    -------
    Figure
        One axes.
    """
    from matplotlib.figure import Figure

    width = 2.2 + 0.45 * len(trial.named)
    figure = Figure(figsize=(width, 1.6 + 0.34 * len(trial.causes)), layout="constrained")
    draw_confusion(trial, ax=figure.add_subplot())
    return figure


def draw_confusion(trial: Trial, *, ax: Axes | None = None) -> Axes:
    """Cases by cause put in and cause named, shaded by the share of the row.

    Parameters
    ----------
    trial : Trial
        What was tried.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A cell a pair with its number of cases; empty where that is 0.
    """
    ax = axes_or_new(ax)
    counts = np.asarray(trial.matrix, dtype=float).reshape(len(trial.causes), len(trial.named))
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.where(totals > 0, totals, 1)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(counts > 0):
        ax.text(
            column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=SMALL,
            color="white" if shares[row, column] > _DARK else "black",
        )  # fmt: skip
    ax.set_xticks(
        range(len(trial.named)), trial.named, rotation=40, ha="right", rotation_mode="anchor",
        fontsize=SMALL,
    )  # fmt: skip
    labels = [
        f"{cause} ({total:.0f})" for cause, total in zip(trial.causes, totals[:, 0], strict=True)
    ]
    ax.set_yticks(range(len(labels)), labels, fontsize=SMALL)
    ax.set_xlabel("cause named first (number: cases; shade: share of the row)", fontsize=NORMAL)
    ax.set_ylabel("put in (cases)", fontsize=NORMAL)
    right, alarms = trial.right, trial.false_alarms
    ax.set_title(
        f"{trial.run}\nright {right.count} of {right.cases} = {number(right.share)} · "
        f"alarms on sound dumps {alarms.count} of {alarms.cases} = {number(alarms.share)}",
        fontsize=NORMAL,
        parse_math=False,  # a folder may be named anything
    )
    return ax
