"""What all figures share: colours, type, points with intervals, legends, how they are saved."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from functools import singledispatch
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltad.analysis.question import QuestionError
from deltad.analysis.result import DRAWN, Result, form_of
from deltad.analysis.values import LINEAR
from deltad.divergence import DIVERGENCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltad.analysis.pairs import Estimate, Kept
    from deltad.analysis.statistics import Interval

Floats = NDArray[np.float64]

_TAILS: Final = {
    "aggregated": "#0072B2", "uniform": "#56B4E9", "exact": "#009E73", "full": "#000000"
}  # fmt: skip
COLOURS: Final = {
    "ratio": "#D55E00", "binary-kl": "#E69F00", "binary-tv": "#A6761D", "clip-higher": "#CC79A7",
    "icepop": "#332288", "mis": "#882255", "tis": "#44AA99", "cispo": "#999933",
    "drpo": "#AA4499", "sequence_mask": "#117733", "sequence_truncate": "#CC6677",
    "none": "#7F7F7F", LINEAR: "#555555",
} | {
    f"predictive-{family}-{tail}": colour
    for family in DIVERGENCES for tail, colour in _TAILS.items()
}  # fmt: skip
"""One colour per built-in rule in every figure, after Okabe and Ito and after Tol, for color-blind
readers. Predictions of the KL and of the TV share theirs: the two families never stand in one
figure."""

OTHERS: Final = ("#6A3D9A", "#B15928", "#E7298A", "#66A61E", "#1B9AAA", "#4D4DFF")
"""Colours of rules that are not built in, in the order in which a figure names them."""

GREY: Final = "#555555"
SMALL: Final = 7
NORMAL: Final = 8
"""Points of type: of ticks and legends, of labels and titles."""

_LETTER: Final = 0.53  # width of a letter, of its height
_LONGEST: Final = 20  # letters of a word that is not cut


@singledispatch
def draw(result: Result) -> Figure:
    """Draw a computed result, as its class says; neither shown nor saved."""
    raise QuestionError(f"there is no figure of a {type(result).__name__}: ask for another form")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Colours of a figure's rules by name: a built-in's own, and one of `OTHERS` for each other.

    >>> colours_of(["ratio", "mine"]) == {"ratio": COLOURS["ratio"], "mine": OTHERS[0]}
    True
    """
    others = cycle(OTHERS)
    return {name: COLOURS.get(name) or next(others) for name in dict.fromkeys(names)}


def save_figure(figure: Figure, path: str | Path | BinaryIO, *, form: str = "") -> None:
    """Write a figure as PNG, PDF or SVG; the same figure gives the same file.

    Parameters
    ----------
    figure : Figure
        As `figure4` returns it.
    path : str, Path or binary file
        Where to.
    form : {"png", "pdf", "svg"}, optional
        By default what the path's ending names; needed for an open file without a name.

    Raises
    ------
    QuestionError
        Another ending.
    OSError
        The file cannot be written.
    """
    form = form or form_of(str(getattr(path, "name", path)), DRAWN)
    from matplotlib import rc_context

    # Text stays text, and nothing is dated.
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "deltad"}):
        figure.savefig(path, format=form, dpi=200, metadata=undated.get(form))


def figure_bytes(figure: Figure, form: str) -> bytes:
    """A figure as the bytes of a `png`, `pdf` or `svg`."""
    file = io.BytesIO()
    save_figure(figure, file, form=form)
    return file.getvalue()


def new_figure(width: float, height: float, *title: str) -> Figure:
    """A figure of so many inches, the lines of its title folded to its width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    letters = int(72 * width / (_LETTER * NORMAL))
    lines = [folded(line, letters, "(?<= · )|(?<=, )") for line in title]
    figure.suptitle("\n".join(lines), fontsize=NORMAL, parse_math=False)  # arms have any name
    return figure


def label_axes(ax: Axes, x: str, y: str) -> None:
    """Name both axes."""
    ax.set_xlabel(x, fontsize=NORMAL)
    ax.set_ylabel(y, fontsize=NORMAL)
    ax.tick_params(labelsize=SMALL)


def say(ax: Axes, words: str) -> None:
    """Words in the middle of axes that would be empty."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", fontsize=NORMAL)


def folded(text: str, letters: int = 16, behind: str = "(?<=[-_: ])") -> str:
    """A text in lines of about so many letters, cut where a pattern matches.

    >>> folded("predictive-kl-aggregated").splitlines()
    ['predictive-kl-', 'aggregated']
    """
    lines = [""]
    most = max(letters, _LONGEST)
    words = re.split(behind, text)
    for part in (word[at : at + most] for word in words for at in range(0, len(word), most)):
        if lines[-1] and len(lines[-1] + part.rstrip(" ·,")) > letters:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip(" ·") for line in lines)


def name_panels(figure: Figure) -> None:
    """A bold letter above every axes, in their order."""
    for letter, ax in zip("abcd", figure.axes, strict=False):
        ax.set_title(letter, loc="left", fontsize=NORMAL, fontweight="bold")


def legend_below(figure: Figure, *axes: Axes) -> None:
    """One legend for some axes, each label once, in as many columns as fit."""
    found: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        found |= zip(labels, handles, strict=True)
    width = _LETTER * SMALL * max(map(len, found)) + 5 * SMALL
    legend = figure.legend(
        list(found.values()), list(found), loc="outside lower center", fontsize=SMALL,
        frameon=False, ncols=min(len(found), max(1, int(72 * figure.get_figwidth() / width))),
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


class Shown(NamedTuple):
    """What is drawn of a number: itself, its 95 % interval, and every seed's own."""

    value: float
    ci95: Interval
    by_seed: Floats

    @classmethod
    def of(cls, kept: Kept) -> Shown:
        """The unsafe-keep rate of a criterion."""
        return cls(kept.unsafe_keep_rate, kept.unsafe_keep_rate_ci95, kept.rates)


def draw_points(
    ax: Axes,
    places: ArrayLike,
    found: Sequence[Estimate | Shown],
    colour: str,
    *,
    label: str = "",
    joined: bool = False,
    upright: bool = True,
    seeds: bool = True,
    face: str = "",
) -> None:
    """Numbers as points with their intervals, every seed's own as a pale tick; no NaN."""
    at = np.asarray(places, dtype=np.float64)

    def plot(x: ArrayLike, y: ArrayLike, **style: Any) -> None:
        """Along the axis of the places, and along that of the numbers."""
        ax.plot(*((x, y) if upright else (y, x)), color=colour, **style)

    if seeds:
        ticks = [np.asarray(each.by_seed) for each in found]
        plot(
            np.repeat(at, [len(each) for each in ticks]), np.concatenate([np.empty(0), *ticks]),
            marker="_" if upright else "|", markersize=4, linestyle="none", alpha=0.25, zorder=1,
        )  # fmt: skip
    ends = np.array([each.ci95 for each in found], dtype=np.float64).reshape(-1, 2)
    plot(np.stack([at, at]), ends.T, linewidth=1.5, zorder=3)
    plot(
        at, [each.value for each in found], label=label, marker="o", markersize=4, zorder=4,
        linestyle="-" if joined else "none", linewidth=1.2, markerfacecolor=face or colour,
    )  # fmt: skip


def explain_points(ax: Axes, tick: str = "_") -> None:
    """Entries of a legend for the marks of `draw_points`."""
    ax.plot([], [], color=GREY, linewidth=1.5, label="95 %, bootstrap over seeds")
    ax.plot([], [], color=GREY, marker=tick, alpha=0.5, linestyle="none", label="one seed")
