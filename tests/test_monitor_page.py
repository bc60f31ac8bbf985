"""The pages on the monitor and the metrics, held against the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltad.cli import app
from deltad.masks import RULES
from deltad.steps import RATES

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[1]


def blocks(name: str) -> list[str]:
    page = (ROOT / "docs" / name).read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def run_page(name: str) -> dict[str, object]:
    names: dict[str, object] = {}
    for block in blocks(name):
        exec(compile(block, f"docs/{name}", "exec"), names)
    return names


def test_monitor_page_runs_and_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("monitor.md")
    assert "temperature" in capsys.readouterr().out
    found = json.loads(CliRunner().invoke(app, ["watch", "run", "--format", "json"]).stdout)
    ((newest),) = found["newest"]
    logged = names["logged"]
    assert isinstance(logged, list)
    step, scalars = logged[-1]
    assert (newest["arm"], newest["step"], newest["steps"]) == ("actual", step, 3)
    assert newest["scalars"] == scalars


def test_metrics_page_runs() -> None:
    assert "sums" in run_page("metrics.md")


def test_monitor_page_lists_every_rate_and_shows_what_watch_prints() -> None:
    page = (ROOT / "docs" / "monitor.md").read_text()
    for name, (above, below) in RATES.items():
        assert f"| `{name}` | `{above}` / `{below}` |" in page
    command = re.search(r"^\$ deltad (watch .*)$\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert command
    arguments = [
        str(ROOT / each) if each.startswith("data_dumps") else each for each in command[1].split()
    ]
    assert CliRunner().invoke(app, arguments).stdout.rstrip() == command[2].rstrip()


def test_metrics_page_lists_every_weight() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().split("## Weights")[1]
    named = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert set(named) == {name for name, rule in RULES.items() if rule.weight is not None}
