"""Recordings of a recipe that are killed, resumed, or begun twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltad.dumps import check_dump, unfinished
from deltad.dumps.lock import InUseError, locked
from deltad.probes.recipes import record
from deltad.probes.recipes.record import is_complete

from .micro import micro
from .test_record import contents, same

ROOT = Path(__file__).parents[3]

RECORD = """
import sys
from pathlib import Path
from deltad.probes.recipes import record
from tests.probes.recipes.micro import micro
if __name__ == "__main__":
    print("begins", flush=True)
    record(
        micro(), sys.argv[1], seeds=2, workers=int(sys.argv[2]), resume=Path(sys.argv[1]).exists(),
        store="all", quiet=True,
    )
"""


@pytest.mark.parametrize("resume", [False, True])
def test_two_recordings_into_one_folder_are_kept_apart(
    cache: Path, tmp_path: Path, resume: bool
) -> None:
    with (
        locked(tmp_path / "run"),
        pytest.raises(InUseError, match=r"run is being recorded into by process \d+ on "),
    ):
        record(micro(), tmp_path / "run", seeds=1, workers=0, resume=resume, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_seed_whose_writer_was_killed_is_not_complete(whole_dump: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.symlink_to(whole_dump)
    assert is_complete(micro(), run, 1)
    note = whole_dump / "_unfinished.arm=ratio.seed=1.rank=0"
    try:
        note.write_text("{}")
        assert not is_complete(micro(), run, 1)
        assert is_complete(micro(), run, 0)
    finally:
        note.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_random_times_and_resumed_it_is_the_same_dump(
    cache: Path, whole_dump: Path, tmp_path: Path, workers: int
) -> None:
    script = tmp_path / "record_micro.py"
    script.write_text(RECORD)
    run = tmp_path / "run"

    def start(run: Path = run) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(script), str(run), str(workers)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout as told:
            assert told.readline() == "begins\n"
        return process

    whole = contents(whole_dump)
    times = random.Random(workers)
    began = time.monotonic()
    assert start(tmp_path / "undisturbed").wait() == 0
    length = time.monotonic() - began
    killed = 0
    for _ in range(5):
        process = start()
        time.sleep(times.uniform(0.1, 0.5) * length)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        if not run.exists():
            continue
        time.sleep(0.5)  # for its workers to end with it
        for name, table in contents(run).items():
            assert repr(table.to_pylist()) == repr(whole[name].to_pylist())
        noted = {each.arm for each in unfinished(run)}
        said = [str(problem) for problem in check_dump(run, strict=False)]
        assert all(any(f"recording of arm {arm}," in text for text in said) for arm in noted)
    assert killed >= 2
    assert start().wait() == 0
    assert same(run, whole_dump)
    assert check_dump(run) == []
    assert unfinished(run) == []
