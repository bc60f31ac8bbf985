"""The recipe for Slurm, run by a stand-in for `sbatch` that does at once what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.app import deltad
from tests.dumps.factory import make_dump

pytestmark = pytest.mark.process

SUBMIT = Path(__file__).parents[2] / "examples" / "slurm" / "submit.sh"

SBATCH = """#!/usr/bin/env bash
# Runs every task of an array, or a single job; what they print goes to a log.
set -euo pipefail
echo "$@" >> "$LOG/calls"
array=
while [[ $1 == --* ]]; do
  case $1 in --array=1-*) array=${1#--array=1-} ;; esac
  shift
done
if [[ -n $array ]]; then
  for task in $(seq "$array"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_COUNT=$array bash "$@" >> "$LOG/log" 2>&1
  done
else
  bash "$@" >> "$LOG/log" 2>&1
fi
echo 17
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `sbatch` is the stand-in and `deltad` this one."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LOG": str(tmp_path)}


def test_an_array_job_and_a_merge_give_the_very_table(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    run = make_dump(tmp_path / "run", rows=60, drift=1.5, arms=("none", "ratio"))
    subprocess.run(
        [SUBMIT, "2", run, "table.json", "--protocol", "all", "--threshold", "0.1"],
        check=True, cwd=tmp_path, env=environment, capture_output=True,
    )  # fmt: skip
    whole = deltad("table", run, "--protocol", "all", "--threshold", 0.1, "--format", "json")
    found = (tmp_path / "table.json").read_text("utf-8")
    assert json.loads(found)["protocols"]
    assert found == whole.stdout
    array, merge = (tmp_path / "calls").read_text().splitlines()
    assert array.startswith("--parsable --array=1-2 ")
    assert merge.startswith("--parsable --dependency=afterok:17 ")
    (folder,) = tmp_path.glob("shards-*")
    assert len(list(folder.iterdir())) == 2


def test_a_task_that_fails_stops_everything(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [SUBMIT, "1", tmp_path / "none", "table.json"],
        cwd=tmp_path, env=environment, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "none does not exist" in (tmp_path / "log").read_text()
    assert not (tmp_path / "table.json").exists()
