"""`kill -9` while a dump is recorded: what is there is whole, and what is not is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("trials", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_recordings_are_resumed_to_the_same_bytes(tmp_path: Path, trials: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.dumps.kill", str(trials), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
