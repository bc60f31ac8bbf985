"""Plain lines and tables are, character for character, what rich makes of them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deltad.analysis.grid import Grid, Line, Stack, plain_text


def by_rich(part: Line | Grid | Stack) -> str:
    """Rich's own rendering, without the spaces at the ends of lines."""
    buffer = io.StringIO()
    Console(file=buffer, width=500, markup=True, highlight=False).print(part)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def grid(headers: tuple[str, ...], *rows: tuple[str, ...]) -> Grid:
    """A table of some rows."""
    made = Grid(headers)
    for row in rows:
        made.add_row(*row, style="dim" if row[0] == "Σ" else "")
    return made


PARTS: dict[str, Line | Grid | Stack] = {
    "line": Line("δ = 0.15", "bold"),
    "lines": Line("two\n  lines\n"),
    "facts": grid((), ("a long fact", "1"), ("b", "2 of 3")),
    "facts of several lines": grid((), ("a", "1\n22\n333"), ("b\nbb", "2")),
    "table": grid(("what", "Ḋ", "−1 %"), ("x", "1.25", ""), ("Σ", "[b]1", "–")),
    "heads of several lines": grid(("x", "unsafe / kept\nratio", "\nrate"), ("1", "2", "3")),
    "short rows": grid(("x", "y", "z"), ("1",), ("1", "2\n2"), ("",)),
    "no rows": grid(("what", "where")),
}
PARTS["all"] = Stack([*PARTS.values(), Stack([Line("the end")])])


@pytest.mark.parametrize("name", PARTS)
def test_it_reads_as_rich_shows_it(name: str) -> None:
    assert plain_text(PARTS[name]) == by_rich(PARTS[name])


@pytest.mark.parametrize("words", ["漢", "e\N{COMBINING ACUTE ACCENT}", "tab\there", "\x1b[1m"])
def test_what_is_not_one_column_wide_is_left_to_rich(words: str) -> None:
    assert plain_text(Line(words)) is None
    assert plain_text(grid(("x",), (words,))) is None


def test_what_is_not_of_here_is_left_to_rich() -> None:
    assert plain_text("text") is None
