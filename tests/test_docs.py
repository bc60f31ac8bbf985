"""What the pages say, held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltad.dumps import check_dump
from deltad.masks import CRITERIA

ROOT = Path(__file__).parents[1]


def _expand(name: str) -> list[str]:
    """Every name that `a-{b,c}` stands for."""
    found = re.search(r"\{([^}]*)\}", name)
    if not found:
        return [name]
    return [
        full
        for choice in found[1].split(",")
        for full in _expand(name[: found.start()] + choice + name[found.end() :])
    ]


def test_definitions_list_every_criterion_and_no_other() -> None:
    page = (ROOT / "docs" / "definitions.md").read_text()
    rows = page.split("## Criteria")[1].split("## ")[0]
    named = re.findall(r"^\| `([^`]+)` \|", rows, flags=re.MULTILINE)
    assert {full for name in named for full in _expand(name)} == set(CRITERIA)


def test_probe_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "probe.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/probe.md", "exec"), names)
    assert "unsafe_keep_rate" in capsys.readouterr().out
    assert not check_dump(tmp_path / "run")
