"""The gate and the full run: which tests they select, and what becomes of a part that fails."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.test_environments import RUN

ROOT = Path(__file__).parents[1]
README = """
<!-- test command -->
```bash
echo made >> made && true && echo tested
```
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit, whose full run is short."""
    script = (ROOT / ".ci" / "parts.py").read_text(encoding="utf-8")
    checks = """
CHECKS = {"lint": "test -e made"}
MORE_CHECKS = {"marked": "test -e ../repaired"}
FULL_CHECKS = {"slow": "echo slow >> made"}
"""
    found = tmp_path / "checkout"
    (found / ".ci").mkdir(parents=True)
    (found / ".ci" / "parts.py").write_text(
        script.replace("\n\ndef all_parts", f"{checks}\n\ndef all_parts")
    )
    (found / "README.md").write_text(README)
    git = ["git", "-C", str(found), "-c", "user.name=a", "-c", "user.email=a@b"]
    chromium = tmp_path / "chromium"  # so that none is installed
    chromium.touch(0o755)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "One"]):
        subprocess.run([*git, *command], check=True)
    return found


def call(checkout: Path, *arguments: str) -> tuple[int, list[tuple[str, str]]]:
    """Exit status, and the parts that ran with how they ended."""
    done = subprocess.run(
        [sys.executable, checkout / ".ci" / "parts.py", *arguments],
        capture_output=True,
        text=True,
        env={
            "PATH": f"{checkout.parent}:/usr/bin:/bin",
            "DELTAD_FULL_STATE": str(checkout.parent / "state"),
        },
        check=False,
    )
    return done.returncode, re.findall(r"^== (passed|FAILED) .* s  (\S+)$", done.stdout, re.M)


@pytest.mark.process
def test_the_gate_stops_at_what_fails_and_the_full_run_goes_on(checkout: Path) -> None:
    begun = [("passed", "install"), ("passed", "lint"), ("passed", "tests"), ("FAILED", "marked")]
    assert call(checkout, "gate") == (1, begun)
    assert call(checkout, "full") == (1, [*begun, ("passed", "slow")])


@pytest.mark.process
def test_the_full_run_is_taken_up_where_it_failed(checkout: Path) -> None:
    call(checkout, "full")
    assert call(checkout, "full") == (1, [("FAILED", "marked")])
    assert call(checkout, "full", "lint", "slow") == (0, [("passed", "lint"), ("passed", "slow")])
    (state,) = (checkout.parent / "state").iterdir()
    assert (state / "clone" / "made").read_text().split() == ["made", "slow", "slow"]
    (state / "repaired").touch()
    assert call(checkout, "full") == (0, [("passed", "marked")])
    assert call(checkout, "full") == (0, [])
    assert len(call(checkout, "full", "--fresh")[1]) == 5
    assert call(checkout, "full", "types") == (1, [])


def test_every_mark_is_run_by_some_part() -> None:
    parts: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "parts.py"))
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {line.partition(":")[0] for line in options["markers"]}
    environments = {each.marker: each.name for each in RUN.ENVIRONMENTS.values()}
    assert set(options["addopts"][-1][5:-1].split(" or ")) == marks
    assert "'(process or pages or browser) and not slow'" in parts["MORE_CHECKS"]["marked"]
    (elsewhere,) = re.findall(r"'slow and not \((.*)\)'", parts["FULL_CHECKS"]["slow"])
    assert set(elsewhere.split(" or ")) == {"ray", "gpu", *environments}
    assert parts["FULL_CHECKS"]["ray"] == "pytest -q -rs -m ray"
    assert marks - set(environments) == {"process", "pages", "browser", "slow", "ray", "gpu"}
    assert set(parts["FULL_CHECKS"]) == {"slow", "ray", *environments.values()}
