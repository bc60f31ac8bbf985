"""The page as a file: what it holds, what it never reaches for, what it does when things fail."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from deltad.analysis import Question, QuestionError
from deltad.analysis.report import Report, page, report
from deltad.dumps import Dump
from deltad.masks import CriterionError, Rule
from tests.analysis.report.texts import HOSTILE
from tests.dumps.factory import edit_value, make_dump, part_files

FOLDER = Path(page.__file__).parent


def test_hostile_text_opens_and_ends_no_element(html: str) -> None:
    assert html.count("<script") == html.count("</script>")
    kinds = re.findall(r"<script ([^>]*)>", html)
    assert [kind for kind in kinds if 'type="text/plain"' not in kind] == [
        'type="application/json" id="deltad-header"',
        'type="module"',
    ]
    assert "<img" not in html
    assert "run<b>" not in html
    assert "onerror=alert(2)&gt;" in html  # in the summary, as text


def test_hostile_text_arrives_as_it_was(html: str, hostile: Dump) -> None:
    found = re.search(r'id="deltad-header">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    header = json.loads(found.group(1))
    assert header["texts"] == [HOSTILE]
    assert header["prompts"][0]["prompt"] == header["prompts"][0]["answer"] == HOSTILE
    assert HOSTILE in unescape(html.partition("deltad-header")[0])


def test_page_refers_to_nothing_outside_of_itself(html: str) -> None:
    told = re.sub(r'<script type="text/plain".*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"https?:|wss?:|[\"'`(]//", told)
    assert not re.search(r"<(?:link|iframe|object|embed|base)\b|@import|url\((?!#)", told)
    for reference in re.findall(r'(?:src|href)="([^"]*)"', told):
        assert reference.startswith(("#", "data:image/png;base64,")), reference[:80]


def test_only_the_script_of_the_page_may_run(html: str) -> None:
    policy = re.search(r'Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy.group(1).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy.group(1)
    script = html.partition('<script type="module">')[2]
    assert all(path.read_text().rstrip() in script for path in FOLDER.glob("*.js"))
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
    ):
        assert word not in script


def test_a_section_that_fails_is_shown_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> str:
        raise RuntimeError("no <luck>")

    def refused(_: object) -> str:
        raise QuestionError("this dump cannot tell")

    few = (
        ("broken", "Broken", "", (page.Part(broken), page.Part(refused))),
        ("other", "Other", "Why.", (page.Part(refused),)),
    )
    monkeypatch.setattr(page, "SECTIONS", few)
    dump = Dump.open(make_dump(tmp_path / "run", ranks=1, parts=1, rows=10))
    made = report(dump)
    assert [title for title, _ in made.failures] == ["Broken"]
    assert "Not made: no &lt;luck&gt; (RuntimeError)" in made.html
    assert made.html.count('<p class="absent">this dump cannot tell</p>') == 2
    assert 'id="viewer"' in made.html


def test_a_dump_with_bad_rows_has_a_page_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SECTIONS", page.SECTIONS[:3])
    path = make_dump(tmp_path / "run", ranks=1, parts=1, rows=20)
    edit_value(next(p for p in part_files(path) if "none" in str(p)), "pre_logprob", 3, 0.5)
    made = report(Dump.open(path))
    failed = {title: error for title, error in made.failures}
    assert failed.keys() == {"Figure 4", "Tokens"}
    assert "row 3" in str(failed["Tokens"])
    assert "nothing wrong found" not in made.html
    assert 'id="viewer"' not in made.html


def test_a_rule_that_fails_is_refused_by_its_name(hostile: Dump) -> None:
    broken = Rule("broken", region=lambda tokens: tokens.nothing)
    with pytest.raises(QuestionError, match=r"rule broken .*'nothing'.* at rows 0 to"):
        report(hostile, criteria=[broken])
    with pytest.raises(QuestionError, match="needs the column `no_such`"):
        report(hostile, criteria=[Rule("needy", needs=("no_such",))])
    with pytest.raises(CriterionError, match="two different rules are named ratio"):
        report(hostile, criteria=[Rule("ratio", "zero", origin="mine.py")])


def test_a_question_that_the_dump_cannot_answer_is_refused(hostile: Dump) -> None:
    with pytest.raises(QuestionError, match="there is no arm"):
        report(hostile, Question(protocol="shared:nobody"))


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(html: str) -> None:
    made = Report(html)
    shown = made._repr_html_()
    found = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="([^"]*)"[^<>]*></iframe>', shown)
    assert found is not None
    assert unescape(found.group(1)) == made.html
    assert "allow-same-origin" not in found.group(2)


def test_the_package_holds_every_kind_of_file_of_the_folder() -> None:
    import tomllib

    tool = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = tool["tool"]["setuptools"]["package-data"]["deltad.analysis.report"]
    kinds = {f"*{path.suffix}" for path in FOLDER.iterdir() if path.is_file()} - {"*.py"}
    assert kinds <= set(patterns)
