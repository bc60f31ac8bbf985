"""The scaling note's model: linear in tokens, and between its marks on the page."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling import BYTES, LINK, MARKS, PER_TOKEN, Line, modelled, number

LINES = [
    Line("K, size", "20", 250.0, BYTES),
    Line("tokens, from vectors", "1", 1_800.0, PER_TOKEN),
    Line("vectors near the region alone, size", "20", 50.0, BYTES),
    Line("tokens, from scalars", "1", 72.0, PER_TOKEN),
]


def test_the_model_is_arithmetic_on_what_was_measured() -> None:
    rows = list(modelled(LINES))
    assert [row[0] for row in rows] == ["10⁹", "10¹⁰", "10¹¹"] * 2
    assert rows[0][2:5] == ("0.25 TB", "7,629", "0.5 h")  # 1e9 × 250 bytes, 1,800 s
    assert rows[2][2:5] == ("25 TB", "762,939", "50 h")
    assert rows[5][2:5] == ("5 TB", "762,939", "2 h")
    assert rows[2][6] == f"{number(1e11 * 250 / LINK / 60)} min"


def test_the_page_has_a_place_for_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert [page.count(mark) for mark in MARKS] == [1, 1]
