"""What all figures share: who draws what, colours, sizes of type, estimates, how they are saved."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterable, Sequence
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from deltad.analysis.question import QuestionError
from deltad.analysis.result import DRAWN, form_of
from deltad.divergence import DIVERGENCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TAILS: Final = {
    "aggregated": "#0072B2", "uniform": "#56B4E9", "exact": "#009E73", "full": "#000000"
}  # fmt: skip

COLOURS: Final[dict[str, str]] = {
    "ratio": "#D55E00",
    **{
        f"predictive-{family}-{tail}": colour
        for family in DIVERGENCES
        for tail, colour in _TAILS.items()
    },
    "binary-kl": "#E69F00",
    "binary-tv": "#A6761D",
    "clip-higher": "#CC79A7",
    "icepop": "#332288",
    "mis": "#882255",
    "tis": "#44AA99",
    "cispo": "#999933",
    "drpo": "#AA4499",
    "sequence_mask": "#661100",
    "sequence_truncate": "#6699CC",
    "none": "#7F7F7F",
}
"""Colours of the built-in rules, after Okabe and Ito, and Tol, for color-blind readers. Two
divergences never stand in one figure."""

OTHERS: Final = ("#1B9E77", "#7570B3", "#E7298A", "#66A61E", "#B15928", "#4A4A8A", "#008B8B")
"""Colours of all other rules."""

GREY: Final = "#555555"
SMALL: Final = 7
NORMAL: Final = 8
"""Points of type: of ticks and legends, of labels and titles."""


@singledispatch
def draw(result: Any) -> Figure:
    """Draw a result.

    Parameters
    ----------
    result : Result
        Computed.

    Returns
    -------
    Figure
        By the function that is registered for its class.

    Raises
    ------
    QuestionError
        There is no figure of such a result.
    """
    raise QuestionError(f"there is no figure of a {type(result).__name__}")


def colour_of(rule: str) -> str:
    """The colour that a rule has in every figure.

    Parameters
    ----------
    rule : str
        Its name; of a rule that is not built in one of `OTHERS`, always the same.

    Returns
    -------
    str
        Hexadecimal.

    Examples
    --------
    >>> colour_of("ratio"), colour_of("my_masks") in OTHERS
    ('#D55E00', True)
    """
    return COLOURS.get(rule) or OTHERS[zlib.crc32(rule.encode()) % len(OTHERS)]


def figure_bytes(figure: Figure, form: str) -> bytes:
    """A figure as a PNG, PDF or SVG file."""
    found = io.BytesIO()
    save_figure(figure, found, form=form)
    return found.getvalue()


def save_figure(figure: Figure, path: str | Path | BinaryIO, *, form: str = "") -> None:
    """Write a figure as PNG, PDF or SVG.

    Parameters
    ----------
    figure : Figure
        As `figure4` returns it.
    path : str, Path or binary file
        Where to.
    form : {"png", "pdf", "svg"}, optional
        By default what the path's ending names; needed for an open file.

    Raises
    ------
    QuestionError
        Another ending.
    OSError
        The file cannot be written.
    """
    form = form or form_of(path if isinstance(path, str | Path) else path.name, DRAWN)
    from matplotlib import rc_context

    # Text stays text, and nothing is dated: the same table gives the same file.
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "deltad"}):
        figure.savefig(path, format=form, dpi=200, metadata=undated.get(form))


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure, inches wide and high; its title may hold any arm's name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=NORMAL, parse_math=False)
    return figure


def axes_or_new(ax: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=(4, 3), layout="constrained").add_subplot()


def legend_below(figure: Figure, *axes: Axes, columns: int = 2) -> None:
    """One legend for some axes, under all of them; equal labels once."""
    handles: dict[str, Any] = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns,
        fontsize=SMALL, frameon=False,
    )  # fmt: skip


def labelled(ax: Axes, across: str, up: str = "") -> None:
    """Label both axes."""
    ax.set_xlabel(across, fontsize=NORMAL)
    ax.set_ylabel(up, fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)


def say(ax: Axes, words: str) -> None:
    """Words where there is nothing to draw."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", fontsize=NORMAL)


def estimate(
    ax: Axes,
    place: float,
    value: float,
    interval: Sequence[float],
    colour: str,
    *,
    by_seed: Iterable[float] = (),
    upright: bool = True,
    filled: bool = True,
    size: float = 4,
) -> None:
    """A point with its 95 % interval, every seed's own share a pale tick.

    Parameters
    ----------
    ax : Axes
        Drawn into.
    place : float
        On the axis of what the numbers are of.
    value : float
        The number; where it is NaN, only the ticks are drawn.
    interval : pair of float
        Its ends; NaN draws none.
    colour : str
        Of all three.
    by_seed : iterable of float
        NaN is left out.
    upright : bool
        Whether numbers go up; across otherwise.
    filled : bool
        Whether the point is.
    size : float
        Points of the point.
    """

    def at(places: Sequence[float], values: Sequence[float], **style: Any) -> None:
        """Plot either way round."""
        ends = (places, values) if upright else (values, places)
        ax.plot(*ends, color=colour, **style)

    own = [share for share in by_seed if not math.isnan(share)]
    if own:
        at(
            [place] * len(own), own, marker="_" if upright else "|", markersize=size,
            linestyle="none", alpha=0.25, zorder=1,
        )  # fmt: skip
    if not math.isnan(interval[0]):
        at([place] * 2, list(interval), linewidth=1.5, zorder=3)
    if not math.isnan(value):
        at(
            [place], [value], marker="o", markersize=size, linestyle="none", zorder=4,
            markerfacecolor=colour if filled else "white",
        )  # fmt: skip
