"""The first rows of a ΔD table, to look at."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltad.analysis.words import DASH, title

if TYPE_CHECKING:
    from deltad.analysis.tokens import TokenTable

FIRST_ROWS: Final = 10
"""How many rows are shown."""


def token_text(table: TokenTable, *, rows: int = FIRST_ROWS) -> RenderableType:
    """The first rows of a ΔD table.

    Parameters
    ----------
    table : TokenTable
        Read until there are enough rows.
    rows : int
        At most so many.

    Returns
    -------
    RenderableType
        A grid with a row a token and a column a column.

    Raises
    ------
    DumpError
        A row that is read holds an impossible value.
    """
    names = table.schema.names
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        grid.add_column(name, justify="left" if name in ("arm", "token") else "right", no_wrap=True)
    stream = (row for batch in table.batches() for row in batch.to_pylist())
    shown = list(itertools.islice(stream, rows))
    for row in shown:
        grid.add_row(*(_cell(row[name]) for name in names))
    many = "no such row" if not shown else f"the first {len(shown)} rows"
    words = f"{many}; {table.rows:,} rows are read in all, {len(names)} columns"
    question = table.question
    head = Text(f"{title(question)} · {question.protocol}", style="bold")
    return Group(head, grid, Text(words))


def _cell(value: Any) -> str:
    """One value: floats to four digits, a dash for what is not known."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)
