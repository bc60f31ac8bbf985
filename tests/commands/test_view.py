"""The command that makes a page: its options, its file, its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deltad.analysis.report import page as pages
from tests.commands.app import assert_refused, deltad
from tests.dumps.factory import edit_value, make_dump, part_files


@pytest.fixture(autouse=True)
def few_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the summary and what fails first: the others are tested where they are made."""
    monkeypatch.setattr(pages, "SECTIONS", pages.SECTIONS[:3:2])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small dump."""
    return make_dump(tmp_path / "run", ranks=1, parts=1, row_group_size=60)


def test_options_reach_the_page(run: Path, tmp_path: Path) -> None:
    page, mine = tmp_path / "report.html", tmp_path / "mine.py"
    mine.write_text("from deltad import Rule\nfar = Rule('far', threshold=0.4)\n")
    result = deltad(
        "view", run, "-o", page, "--threshold", 0.3, "--criterion", "predictive-kl-exact",
        "--baseline", "binary-tv", "--protocol", "shared:ratio", "--seed", 1, "--tokens", 40,
        "--criteria", f"{mine}:far", "--quiet",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.split() == [str(page)]
    html = page.read_text(encoding="utf-8")
    found = re.search(r'id="deltad-header">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    header = json.loads(found.group(1))
    assert (header["criterion"], header["baseline"]) == ("predictive-kl-exact", "binary-tv")
    assert header["arms"][0] == "ratio"
    assert [seed["seed"] for seed in header["seeds"]] == [1]
    assert 0 < header["rows"] <= 40
    assert [each["threshold"] for each in header["rules"] if each["name"] == "far"] == [0.4]
    assert "predictive-kl-exact against binary-tv · outside: top-K KL &gt; 0.3 nats" in html


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--protocol", "shared:nobody"], "there is no arm 'nobody'"),
        (["--seed", "9"], "there is no seed 9"),
        (["--criteria", "nonsense"], "there is no criterion 'nonsense'"),
        (["-o", "run/report.html"], "lies in the dump"),
    ],
)
def test_bad_options_end_with_2_and_no_page(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(run.parent)
    assert_refused(deltad("view", "run", *words), 2, said)
    assert not [*run.parent.rglob("*.html")]


def test_bad_rows_end_with_1_and_a_page_that_says_so(run: Path, tmp_path: Path) -> None:
    edit_value(next(p for p in part_files(run) if "none" in str(p)), "pre_logprob", 3, 0.5)
    page = tmp_path / "report.html"
    result = deltad("view", run, "-o", page, "--quiet")
    assert result.exit_code == 1
    assert {line.partition(" could")[0] for line in result.stderr.splitlines()} == {
        "error: section Figure 4",
        "error: section Tokens",
    }
    assert page.read_text(encoding="utf-8").count("Not made: ") == 2
