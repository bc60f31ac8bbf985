"""The quickstart as it stands in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.dumps import Dump, check_dump
from tests.probes.verl.verl_here import imported

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "verl_ppo.py"


@pytest.mark.verl
def test_the_quickstart_runs_as_written(tmp_path: Path) -> None:
    imported("verl")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "run")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "deltad's plugin is loaded; policy loss predictive_kl" in done.stderr + done.stdout
    assert "unsafe-keep rate" in done.stdout
    check_dump(tmp_path / "run")
    assert len(Dump.open(tmp_path / "run").files("actual")) == 4


def test_the_quickstart_has_at_most_ten_lines_of_deltad() -> None:
    lines = EXAMPLE.read_text().splitlines()
    ours = [line for line in lines if not line.startswith(("#", " ")) and "verl_cpu." not in line]
    named = [line for line in ours if any(word in line for word in ("deltad", "DELTAD", "dump"))]
    assert 3 <= len(named) + 1 <= 10  # and the line that prints the table


def test_the_page_shows_the_quickstart() -> None:
    assert "--8<--\nexamples/verl_ppo.py\n" in (ROOT / "docs" / "verl.md").read_text()
