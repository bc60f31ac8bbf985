"""Tables for a notebook and for the report, as HTML that takes the page's type and colours."""

from __future__ import annotations

import io
from html import escape
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .grid import Grid, Line, Stack

_CONSOLE: Final[dict[str, Any]] = {
    "width": 10_000, "highlight": False, "markup": False, "force_jupyter": False,
    "force_terminal": True, "color_system": None,
}  # fmt: skip
_TABLE: Final = "border-collapse:collapse;margin:.4em 0 .8em;font-variant-numeric:tabular-nums"
_CELL: Final = "padding:.2em 1.2em .2em 0;vertical-align:top;border:0;background:none;"
_RULE: Final = "border-bottom:1px solid currentColor;"
_PRE: Final = '<pre style="font-size:90%;line-height:1.3;overflow-x:auto">'


def as_html(renderable: RenderableType) -> str:
    """Render as HTML elements: tables as tables, lines as paragraphs.

    Parameters
    ----------
    renderable : RenderableType
        What a result's `text` returns. Groups, tables and texts become elements; anything
        else is preformatted text.

    Returns
    -------
    str
        One `<div>`, in which what is wide scrolls. All text is escaped.

    Examples
    --------
    >>> as_html("1 < 2")
    '<div style="overflow-x:auto"><p style="margin:.4em 0;max-width:60em">1 &lt; 2</p></div>'
    """
    return f'<div style="overflow-x:auto">{_element(renderable)}</div>'


def _element(renderable: RenderableType) -> str:
    """One renderable as an element."""
    if isinstance(renderable, Line | Grid | Stack):
        renderable = renderable.__rich__()
    if isinstance(renderable, Group):
        return "".join(_element(each) for each in renderable.renderables)
    if isinstance(renderable, Padding):
        return _element(renderable.renderable)
    if isinstance(renderable, Table):
        return _table(renderable)
    if isinstance(renderable, str | Text):
        words = _inline(renderable)
        style = "margin:.4em 0;max-width:60em"
        if "\n" in str(renderable):
            style += ";white-space:pre-wrap"
        return f'<p style="{style}">{words}</p>' if words else ""
    console = Console(file=io.StringIO(), record=True, **{**_CONSOLE, "width": 120})
    console.print(renderable)
    return f"{_PRE}{escape(console.export_text())}</pre>"


def _table(table: Table) -> str:
    """A table: its head, where it is shown, and its rows."""
    parts = [f'<table style="{_TABLE}">']
    if table.title:
        parts.append(f'<caption style="text-align:left">{_inline(table.title)}</caption>')
    if table.show_header and table.columns:
        heads = "".join(
            f'<th scope="col" style="{_CELL}{_RULE}{_align(column)}">{_inline(column.header)}</th>'
            for column in table.columns
        )
        parts.append(f"<thead><tr>{heads}</tr></thead>")
    parts.append("<tbody>")
    cells = [list(column.cells) for column in table.columns]
    for at, row in enumerate(table.rows):
        style = _css(
            Style.parse(row.style) if isinstance(row.style, str) else row.style or Style.null()
        )
        parts.append("<tr>")
        for place, column in enumerate(table.columns):
            tag, scope = ("td", "") if place else ("th", ' scope="row"')
            weight = "" if place else "font-weight:normal;"
            parts.append(
                f'<{tag}{scope} style="{_CELL}{weight}{_align(column)}{style}">'
                f"{_inline(cells[place][at])}</{tag}>"
            )
        parts.append("</tr>")
    parts.append("</tbody></table>")
    return "".join(parts)


def _align(column: Any) -> str:
    """Where a column's text stands, and whether it may be folded."""
    side = {"right": "right", "center": "center"}.get(column.justify, "left")
    return f"text-align:{side};white-space:{'pre' if column.no_wrap else 'pre-wrap'};"


def _inline(cell: RenderableType) -> str:
    """A cell or a line, its bold, dim and italic parts marked."""
    if isinstance(cell, str):
        return escape(cell)
    if isinstance(cell, Text):
        console = Console(file=io.StringIO(), **_CONSOLE)
        whole = console.get_style(cell.style)  # a text without spans is rendered without it
        return "".join(
            _span(segment.text, whole + (segment.style or Style.null()))
            for segment in cell.render(console)
            if segment.text
        )
    return _element(cell)


def _span(text: str, style: Style) -> str:
    """Some text in one style."""
    css = _css(style)
    return f'<span style="{css}">{escape(text)}</span>' if css else escape(text)


def _css(style: Style | str) -> str:
    """What of a terminal's style a page can show in its own colours."""
    if isinstance(style, str):
        style = Style.parse(style)
    css = ""
    if style.bold:
        css += "font-weight:600;"
    if style.dim:
        css += "opacity:.65;"
    if style.italic:
        css += "font-style:italic;"
    return css
