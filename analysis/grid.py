"""Lines and unboxed tables that are plain text without rich, and rich's own where it is asked.

Importing rich's console takes longer than counting a small dump, and text that goes into a file
or a pipe has no colours. (For the same reason these are no dataclasses.) What these render is
what rich renders, character for character; rich is imported where a terminal, a notebook or the
page wants a renderable.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text


class Line:
    """Words in one style; they may be several lines."""

    def __init__(self, words: str, style: str = "") -> None:
        self.words, self.style = words, style

    def __rich__(self) -> Text:
        """As rich's Text."""
        from rich.text import Text

        return Text(self.words, style=self.style)

    def lines(self) -> list[str]:
        """The lines."""
        return self.words.split("\n")


class Stack:
    """Parts one below the other."""

    def __init__(self, parts: Sequence[Line | Grid | Stack]) -> None:
        self.parts = parts

    def __rich__(self) -> Group:
        """As rich's Group."""
        from rich.console import Group

        return Group(*(part.__rich__() for part in self.parts))

    def lines(self) -> list[str]:
        """The lines of all parts."""
        return [line for part in self.parts for line in part.lines()]


class Grid:
    """An unboxed table whose cells are never folded.

    Parameters
    ----------
    headers : tuple of str
        The first column stands to the left, the others to the right. Without headers two columns
        stand to the left, and there is no rule.

    Attributes
    ----------
    rows : list of (tuple of str, str)
        Cells and the style of each row.
    """

    def __init__(self, headers: tuple[str, ...] = ()) -> None:
        self.headers = headers
        self.rows: list[tuple[tuple[str, ...], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row."""
        self.rows.append((cells, style))

    def __rich__(self) -> Table:
        """As rich's Table."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        if self.headers:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for at, header in enumerate(self.headers):
                table.add_column(Text(header), justify="right" if at else "left", no_wrap=True)
        else:
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True)
        for cells, style in self.rows:
            table.add_row(*map(Text, cells), style=style or None)  # an arm may be called "[b]"
        return table

    def lines(self) -> list[str]:
        """The lines; with headers between two empty ones, and each begun by a space."""
        columns = len(self.headers) or 2
        every = [cells for cells, _ in self.rows]
        blocks = [
            [cell.split("\n") for cell in (*cells, *[""] * (columns - len(cells)))]
            for cells in ([self.headers, *every] if self.headers else every)
        ]
        widths = [
            max((len(line) for block in blocks for line in block[at]), default=0)
            for at in range(columns)
        ]
        gap = "   " if self.headers else "  "
        found: list[str] = []
        for row, block in enumerate(blocks):
            high = max(len(cell) for cell in block)
            is_head = bool(self.headers) and row == 0
            for cell in block:
                empty = [""] * (high - len(cell))
                cell[:] = [*empty, *cell] if is_head else [*cell, *empty]
            for at in range(high):
                cells = [
                    f"{cell[at]:>{width}}" if column and self.headers else f"{cell[at]:<{width}}"
                    for column, (cell, width) in enumerate(zip(block, widths, strict=True))
                ]
                found.append(gap.join(cells))
            if is_head:
                found.append("─" * (sum(widths) + len(gap) * (columns - 1)))
        return ["", *(f" {line}" for line in found), ""] if self.headers else found


def plain_text(renderable: RenderableType | Line | Grid | Stack) -> str | None:
    """What a terminal without colours would show.

    Parameters
    ----------
    renderable : RenderableType
        Of this module, or any.

    Returns
    -------
    str or None
        Lines, each ended; None for what is not of this module, or has characters that are not one
        column wide each, so that rich must measure them.

    Examples
    --------
    >>> grid = Grid(("rate", "all"))
    >>> grid.add_row("of those outside", "0.5")
    >>> print(plain_text(Stack([Line("title"), grid])), end="")  # doctest: +NORMALIZE_WHITESPACE
    title
    <BLANKLINE>
     rate               all
     ──────────────────────
     of those outside   0.5
    <BLANKLINE>
    """
    if not isinstance(renderable, (Line, Grid, Stack)):
        return None
    lines = renderable.lines()
    if not all(map(_is_narrow, lines)):
        return None
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _is_narrow(line: str) -> bool:
    """Whether every character is one column wide."""
    if not line.isprintable():
        return False
    return line.isascii() or not any(
        unicodedata.combining(character) or unicodedata.east_asian_width(character) in "WF"
        for character in line
    )
