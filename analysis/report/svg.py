"""Figures as SVG elements within the page, in the page's own colours."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Final

from deltad.analysis.figures.style import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TAG: Final = re.compile(r"<[^>]*>")
_ID: Final = re.compile(r'(?<= id=")[^"]+|(?<=url\(#)[^)]+|(?<=href="#)[^"]+')
_DROPPED: Final = re.compile(
    r"<metadata>.*?</metadata>|<title>.*?</title>|<style.*?</style>|<!--.*?-->", re.DOTALL
)
_NAMESPACE: Final = re.compile(r' xmlns(?::\w+)?="[^"]*"')
_SIZE: Final = re.compile(r'\b(?:width|height|version)="[^"]*"\s*')
_INK: Final = re.compile(r"#(?:000000|333333)\b")
_GROUND: Final = re.compile(r"fill: #ffffff\b")


def inline_svg(figure: Figure, *, name: str, label: str) -> str:
    """Draw a figure into the page.

    Parameters
    ----------
    figure : Figure
        As a result's `figure` returns it.
    name : str
        Stands before its elements' ids, so that figures do not get in each other's way.
    label : str
        What it shows, for those who cannot see it.

    Returns
    -------
    str
        One `<svg>` element without a reference to anywhere. Black is the page's ink and white
        its ground, but for a figure with a heat map, whose words are meant for its own cells:
        that one stays on white.
    """
    file = io.BytesIO()
    save_figure(figure, file, form="svg")
    drawn = file.getvalue().decode()
    on_white = "<image" in drawn or 'id="QuadMesh' in drawn
    drawn = _DROPPED.sub("", drawn[drawn.index("<svg") :])

    def for_page(found: re.Match[str]) -> str:
        tag = _NAMESPACE.sub("", found.group()).replace("xlink:href", "href")
        tag = _ID.sub(lambda reference: f"{name}-{reference.group()}", tag)
        if not on_white:
            tag = _GROUND.sub("fill: var(--panel)", _INK.sub("currentColor", tag))
        return tag

    head, _, rest = _TAG.sub(for_page, drawn).partition(">")
    attributes = _SIZE.sub("", head.removeprefix("<svg")).strip()
    kind = ' class="on-white"' if on_white else ""
    return (
        f'<svg role="img" aria-label="{escape(label)}"{kind} fill="currentColor" {attributes}>'
        f"{rest}"
    )
