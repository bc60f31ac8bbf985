"""Tables of a notebook: every cell is there, as text, in elements that mean what they are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deltad.analysis import Question, TokenTable, protocol_table, rate_table
from deltad.analysis.forms.tokens import token_text
from deltad.analysis.html import as_html
from deltad.dumps import Dump
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A small dump."""
    path = tmp_path_factory.mktemp("html") / "run"
    return Dump.open(make_dump(path, ranks=1, parts=1, row_group_size=60, null_vectors=0.2))


def parsed(html: str) -> ET.Element:
    """HTML that is well-formed."""
    return ET.fromstring(html)


def test_a_table_keeps_its_cells_alignment_and_styles() -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name\nof it")
    table.add_column("share", justify="right", no_wrap=True)
    table.add_row("<b>&", Text.assemble("0.5 ", ("[0, 1]", "dim")))
    table.add_row("paper", "0.3", style="dim")
    found = parsed(as_html(Group(Text("head", style="bold"), table)))
    assert [each.text for each in found.iter("th")] == ["name\nof it", "share", "<b>&", "paper"]
    cells = list(found.iter("td"))
    assert "".join(cells[0].itertext()) == "0.5 [0, 1]"
    assert "opacity" in next(cells[0].iter("span")).attrib["style"]
    assert "opacity" in cells[1].attrib["style"]
    assert all("text-align:right" in cell.attrib["style"] for cell in cells)
    head = found.find("p/span")
    assert head is not None
    assert "font-weight" in head.attrib["style"]


def test_what_is_no_table_is_preformatted_and_escaped() -> None:
    html = as_html(Panel("1 < 2"))
    assert "1 &lt; 2" in html
    assert "<pre" in html


def test_results_are_shown_with_all_that_their_text_says(dump: Dump) -> None:
    for result in (rate_table(dump), protocol_table(dump)):
        html = result._repr_html_()
        words = re.sub(r"\s+", "", "".join(parsed(html).itertext()))
        for line in str(result).splitlines():
            for word in line.split():
                if set(word) - set("─━"):
                    assert word in words
        assert "<table" in html
        assert "color:#" not in html.replace("currentColor", "")


def test_a_token_table_shows_its_first_rows_and_how_many_there_are(dump: Dump) -> None:
    table = TokenTable(dump, Question(protocol="shared:none"))
    found = parsed(table._repr_html_())
    rows = list(found.iter("tr"))
    assert len(rows) == 1 + 10
    assert [each.text for each in rows[0]] == table.schema.names
    frame = table.to_frame()
    place = table.schema.names.index("d_pre")
    shown = [row[place].text for row in rows[1:]]
    expected = [f"{value:.4g}" if value == value else "–" for value in frame["d_pre"][:10]]
    assert shown == expected
    assert "120 rows are read in all" in "".join(found.itertext())
    none = TokenTable(dump, Question(threshold=1e6, protocol="shared:none"), outside=True)
    assert "no such row" in none._repr_html_()
    assert len(list(parsed(as_html(token_text(table, rows=3))).iter("tr"))) == 1 + 3


def test_a_result_at_the_prompt_is_its_table(tmp_path: Path) -> None:
    table = rate_table(Dump.open(make_dump(tmp_path / "run", rows=30, seeds=(0, 1))))
    assert repr(table) == str(table).rstrip("\n")
    assert "shared:none" in repr(table)
