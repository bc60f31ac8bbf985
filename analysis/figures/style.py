"""What all figures share: colours, sizes of type, how they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from deltad.analysis.question import QuestionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final[dict[str, str]] = {
    "ratio": "#D55E00",
    "aggregated": "#0072B2",
    "uniform": "#56B4E9",
    "exact": "#009E73",
    "full": "#000000",
    "binary-kl": "#E69F00",
    "binary-tv": "#A6761D",
    "clip-higher": "#CC79A7",
    "icepop": "#332288",
    "mis": "#882255",
    "tis": "#44AA99",
    "cispo": "#999933",
    "drpo": "#AA4499",
    "none": "#7F7F7F",
}
"""One colour a criterion in every figure, after Okabe and Ito, the neighbours' after Tol, for
colour-blind readers. A predictive criterion has that of its tail: two families never stand in
one figure."""

ENDINGS: Final = (".png", ".pdf", ".svg")

SMALL: Final = 7
NORMAL: Final = 8
"""Points of type: of ticks and legends, of labels and titles."""


def colour_of(criterion: str) -> str:
    """The colour that a criterion has in every figure.

    Parameters
    ----------
    criterion : str
        A name of `deltad.weights.WEIGHTS`.

    Returns
    -------
    str
        Hexadecimal.

    Raises
    ------
    KeyError
        The criterion has no entry in `COLOURS`.

    Examples
    --------
    >>> colour_of("predictive-tv-exact") == COLOURS["exact"]
    True
    """
    return COLOURS[criterion if criterion in COLOURS else criterion.rpartition("-")[2]]


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
    form = form or figure_format(path if isinstance(path, str | Path) else path.name)
    from matplotlib import rc_context

    # Text stays text, and nothing is dated: the same table gives the same file.
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "deltad"}):
        figure.savefig(path, format=form, dpi=200, metadata=undated.get(form))


def figure_format(path: str | Path) -> str:
    """`png`, `pdf` or `svg`, by a file's ending.

    Raises
    ------
    QuestionError
        Another ending.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise QuestionError(
            f"a figure's file must end in one of {', '.join(ENDINGS)}, got {str(path)!r}"
        )
    return ending[1:]


def axes_or_new(ax: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=(4, 3), layout="constrained").add_subplot()
