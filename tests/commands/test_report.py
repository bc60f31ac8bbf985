"""The command that makes a page: its options, its file, its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deltad.analysis.report import sections
from deltad.cli import app
from tests.dumps.factory import edit_value, make_dump, part_files


@pytest.fixture(autouse=True)
def few_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the summary: the others are the analysis's, and tested there."""
    few = {name: sections.SECTIONS[name] for name in ("run", "figure4")}
    monkeypatch.setattr(sections, "SECTIONS", few)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small dump."""
    return make_dump(tmp_path / "run", ranks=1, parts=1, row_group_size=60)


def deltad(*words: object) -> Result:
    """Run the command line."""
    return CliRunner().invoke(app, [str(word) for word in words])


def header_of(html: str) -> dict[str, Any]:
    """What the page's viewer was told."""
    found = re.search(r'id="deltad-header">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    header: dict[str, Any] = json.loads(found.group(1))
    return header


def test_options_reach_the_page(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = deltad(
        "report", run, "-o", page, "--threshold", 0.3, "--criterion", "predictive-kl-exact",
        "--baseline", "binary-tv", "--protocol", "shared:ratio", "--seed", 1, "--tokens", 40,
    )  # fmt: skip
    assert (result.exit_code, result.output) == (0, "")
    html = page.read_text(encoding="utf-8")
    header = header_of(html)
    assert header["asked_threshold"] == 0.3
    assert (header["criterion"], header["baseline"]) == ("predictive-kl-exact", "binary-tv")
    assert header["arms"][0] == "ratio"
    assert [seed["seed"] for seed in header["seeds"]] == [1]
    assert 0 < header["rows"] <= 40
    assert "predictive-kl-exact against binary-tv · outside: top-K KL &gt; 0.3 nats" in html


def test_page_goes_to_standard_output_without_a_file(run: Path) -> None:
    result = deltad("report", run)
    assert result.exit_code == 0
    assert result.stdout.startswith("<!DOCTYPE html>")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--protocol", "shared:nobody"], "there is no arm 'nobody'"),
        (["--seed", "9"], "there is no seed 9"),
        (["--criterion", "nonsense"], "there is no criterion 'nonsense'"),
        (["--tokens", "0"], "tokens"),
    ],
)
def test_bad_options_end_with_2_and_no_page(
    run: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    page = tmp_path / "report.html"
    result = deltad("report", run, "-o", page, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not page.exists()


def test_a_page_into_the_dump_is_refused(run: Path) -> None:
    result = deltad("report", run, "-o", run / "report.html")
    assert result.exit_code == 2
    assert "lies in the dump" in result.stderr
    assert deltad("report", run / "nowhere").exit_code == 2


def test_bad_rows_end_with_1_and_a_page_that_says_so(run: Path, tmp_path: Path) -> None:
    edit_value(next(p for p in part_files(run) if "none" in str(p)), "pre_logprob", 3, 0.5)
    page = tmp_path / "report.html"
    result = deltad("report", run, "-o", page)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert [line.partition(" could")[0] for line in lines] == [
        "error: section Figure 4",
        "error: section Tokens",
    ]
    assert page.read_text(encoding="utf-8").count("Not made: ") == 2
