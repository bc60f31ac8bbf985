"""The doctor's exit statuses and forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.doctor import write_injected
from tests.commands.app import DUMPS, as_json, deltad

RECORDED = DUMPS / "tiny-whole"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded dump with NaN in some rows."""
    out = tmp_path_factory.mktemp("doctor") / "run"
    return write_injected(RECORDED, out, "nan-row", 0.05, arms=["none"], seeds=[0])


def test_nothing_found_exits_0() -> None:
    found = as_json("doctor", RECORDED, "--seed", 1)
    assert found == {"format": 1, "healthy": True, "findings": [], "not_judged": []}
    assert deltad("doctor", RECORDED, "--seed", 1).stdout.startswith("nothing wrong found")


def test_findings_exit_3_and_values_that_check_refuses_are_evidence(
    broken: Path, tmp_path: Path
) -> None:
    assert deltad("check", broken).exit_code == 1
    target = tmp_path / "answer.json"
    done = deltad("doctor", broken, "-o", target)
    assert (done.exit_code, done.stdout) == (3, "")
    answer = deltad("doctor", broken, "--format", "json")
    assert (answer.exit_code, answer.stdout) == (3, target.read_text())
    text = deltad("doctor", broken)
    assert text.exit_code == 3
    for words in ("sentinel", "confidence", "NaN", "remedy: ", "looked at 1411 of 1411"):
        assert words in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 80
