"""Every form of every result, from its one list of columns."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from deltad.analysis import (
    Column,
    Question,
    QuestionError,
    Result,
    compare,
    condition_table,
    protocol_table,
    rate_table,
    sweep,
)
from deltad.analysis.paper import compares_with_paper
from deltad.analysis.result import DASH, ENDINGS, FORMS, Table, counted, form_of, number
from deltad.dumps import Dump
from tests.analysis.random_dumps import ARMS, FAR, write

RESULTS: dict[str, Callable[[Dump], Result]] = {
    "rates": rate_table,
    "rates by seed": lambda dump: replace(rate_table(dump), seed_rows=True),
    "rates of the user's": lambda dump: rate_table(dump, Question(0.1, criterion=FAR)),
    "protocols": protocol_table,
    "thresholds": sweep,
    "top-k": lambda dump: sweep(dump, over="top-k"),
    "sweep of protocols": lambda dump: sweep(dump, over="protocol"),
    "comparison": lambda dump: compare(dump, agreements=True),
    "comparison of one's own arms": lambda dump: compare(dump, Question(protocol="own")),
    "conditions": lambda dump: condition_table(dump, criteria=["sequence_truncate"]),
    "no token outside": lambda dump: compare(dump, Question(1e6)),
    "no condition": lambda dump: condition_table(dump, Question(1e6)),
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump that answers every protocol."""
    return write(
        tmp_path_factory.mktemp("results") / "run", rows=100, top_k=3, vocab_size=30, drift=1.5,
        ranks=1, parts=1, seeds=(0, 1, 5), null_vectors=0.1, arms=ARMS,
    )  # fmt: skip


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest, dump: Dump) -> Result:
    """Each of them."""
    return RESULTS[request.param](dump)


def alike(found: Any, expected: Any) -> bool:
    """Whether a value was read back; NaN and None are one."""
    if expected is None or (isinstance(expected, float) and math.isnan(expected)):
        return found in (None, "") or found != found
    return bool(found == expected) or str(found) == str(expected)


def test_text_fits_eighty_columns_and_a_prompt_shows_ten_lines(result: Result) -> None:
    text = result.text(width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii() or not re.search(r"[^\S\n ]", text)
    assert len(repr(result).splitlines()) <= 10
    wide = result.text(wide=True)
    assert len(wide.splitlines()) <= len(text.splitlines())
    words = [re.sub(r"[\s─]", "", each) for each in (wide, text)]
    assert sorted(set(words[0])) == sorted(set(words[1]))


def test_html_says_what_the_text_says(result: Result) -> None:
    found = ET.fromstring(result._repr_html_())
    shown = re.sub(r"\s+", "", "".join(found.itertext()))
    for word in result.text(wide=True).split():
        if set(word) - set("─"):
            assert word in shown
    assert list(found.iter("table"))


def test_every_form_holds_the_columns(result: Result) -> None:
    columns, (rows,) = result.to_dict(), {len(v) for v in result.to_dict().values()}
    forms = {name: result.form(name).decode() for name in FORMS if name != "parquet"}
    assert json.loads(forms["json"]) == json.loads(json.dumps(result.to_json_object()))
    assert json.loads(forms["json"])["format"] == 1
    parquet = pq.read_table(io.BytesIO(result.form("parquet"))).to_pydict()
    for form, delimiter in (("csv", ","), ("tsv", "\t")):
        head, *lines = csv.reader(io.StringIO(forms[form]), delimiter=delimiter)
        assert head == list(columns) == list(parquet)
        read = dict(zip(head, zip(*lines, strict=True), strict=False))
        for name, values in columns.items():
            assert all(map(alike, parquet[name], values)), name
            assert all(map(alike, read.get(name, ()), values)), name
    assert len(forms["markdown"].splitlines()) == 2 + rows
    latex = forms["latex"]
    assert latex.isascii()
    assert len(re.findall(r"(?<!\\)&", latex)) == (1 + rows) * (len(columns) - 1)
    assert not re.search(r"(?<!\\)[_%#]", latex)
    assert len(re.findall(r"\\\\\n", latex)) == 1 + rows


def test_a_frame_has_a_row_for_each_row_and_a_long_one_for_each_number(result: Result) -> None:
    keys = [each.name for each in result.columns if each.key]
    frame, long = result.to_frame(), result.to_frame(long=True)
    assert list(frame.columns) == [each.name for each in result.columns]
    assert len(long) == len(frame) * (len(frame.columns) - len(keys))
    assert list(long.columns) == [*keys, "quantity", "number"]
    assert all(each.meaning for each in result.columns)


@dataclass(frozen=True)
class Made(Result):
    """A result of given cells."""

    cells: tuple[Any, ...]

    @property
    def columns(self) -> list[Column]:
        """One column of them, one of numbers."""
        return [
            Column("a_b", "text", lambda row: row, "a_b", key=True),
            Column("size", "a number", lambda row: -0.1 - 0.2 if row else math.nan, "size"),
        ]

    @property
    def rows(self) -> tuple[Any, ...]:
        """The cells."""
        return self.cells

    def objects(self) -> dict[str, Any]:
        """The cells."""
        return {"cells": self.to_dict()}

    def parts(self) -> Iterable[str | Table]:
        """The cells as a table."""
        return ["<b>", Table.of(self.columns, self.rows)]


HOSTILE = ("=1+1", "+x", "-x", "@x", "\tx", "a|b", "50 % & $_#", "x\ny", "\x1b[31m", "", "−1–Δ")


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_no_text_becomes_a_formula_and_numbers_stay(form: str) -> None:
    written = Made(HOSTILE).form(form).decode()
    lines = list(csv.reader(io.StringIO(written), delimiter="\t" if form == "tsv" else ","))
    for text, (cell, size) in zip(HOSTILE, lines[1:], strict=True):
        assert cell[:1] not in tuple("=+-@\t\r")
        assert cell.lstrip("'") == text
        assert size == ("-0.30000000000000004" if text else "")


def test_no_text_breaks_out_of_its_cell() -> None:
    made = Made(HOSTILE)
    latex, markdown = (made.form(form).decode().splitlines() for form in ("latex", "markdown"))
    assert all(len(re.findall(r"(?<!\\)&", line)) == 1 for line in latex[2:-2] if "&" in line)
    assert len(latex) == len(HOSTILE) + 6
    assert len(markdown) == len(HOSTILE) + 2
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in markdown)
    assert r"50 \% \& \$\_\# & $-$0.3" in "\n".join(latex)
    assert "| a\\|b | −0.3 |" in markdown
    assert ET.fromstring(made.form("html").decode()).findtext("p") == "<b>"
    for form in ("text", "latex", "markdown", "html"):
        assert "\x1b" not in made.form(form).decode()
    assert json.loads(made.form("json"))["cells"]["size"][-2] is None


@pytest.mark.parametrize("name", ["table", "table.xlsx", "table.json.gz", ".csv"])
def test_an_ending_that_stands_for_nothing_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(QuestionError, match=r"must end in one of \.txt, \.json, .*, got"):
        Made(HOSTILE).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_result_is_saved_in_the_form_of_the_ending(tmp_path: Path) -> None:
    made = Made(("x",))
    for ending, form in ENDINGS.items():
        if form in FORMS:
            path = tmp_path / f"table{ending.upper()}"
            made.save(path)
            assert path.read_bytes() == made.form(form)
    assert form_of("x.CSV") == "csv"
    with pytest.raises(QuestionError, match=r"one of \.csv, got"):
        form_of("x.json", ["csv"])


def test_undefined_numbers_are_dashes() -> None:
    assert [number(each) for each in (None, math.nan, -0.5)] == [DASH, DASH, "−0.500"]
    assert [counted(each, "seed") for each in (0, 1, 2, 1e6)] == [
        "0 seeds", "1 seed", "2 seeds", "1000000 seeds"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("criterion", "baseline", "same"),
    [
        ("predictive-kl-uniform", "ratio", True),
        ("ratio", "predictive-kl-aggregated", False),
        ("binary-kl", "ratio", False),
    ],
)
def test_the_papers_numbers_stand_next_to_its_pair_alone(
    dump: Dump, criterion: str, baseline: str, same: bool
) -> None:
    asked = Question(criterion=criterion, baseline=baseline)
    assert compares_with_paper(asked) is same
    assert ("paper" in protocol_table(dump, asked).text(wide=True)) is same
