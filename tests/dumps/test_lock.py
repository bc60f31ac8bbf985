"""One process at a time records into a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.dumps.lock import LOCK, InUseError, is_empty, locked

HOLD = """
import sys
from pathlib import Path
from deltad.dumps.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def holder(run: Path) -> subprocess.Popen[str]:
    """A process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_the_second_is_told_who_is_first_and_gets_the_lock_after_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holder(run) as first:
        with (
            pytest.raises(InUseError, match=rf"run is .* by process {first.pid} on "),
            locked(run),
        ):
            pass
        assert is_empty(run)
        first.communicate()
    assert not run.exists()  # it was empty but for the lock
    with locked(run):
        (run / "file").write_text("x")
    assert [entry.name for entry in run.iterdir()] == ["file"]


def test_a_killed_process_has_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert not (tmp_path / LOCK).exists()


def test_a_folder_in_the_locks_place_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    named = r"_lock must be a file, .* folder: remove it$"
    with pytest.raises(IsADirectoryError, match=named), locked(tmp_path):
        pytest.fail("the block must not run")
    assert (tmp_path / LOCK).is_dir()
