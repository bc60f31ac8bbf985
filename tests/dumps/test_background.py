"""The background writer: the same files, bounded memory, and no error that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.dumps import (
    BackgroundWriter,
    Dump,
    DumpError,
    DumpWriter,
    RecordingError,
    check_dump,
    unfinished,
)

from .recording import BATCHES, OPTIONS, ROWS, batches, contents, metadata, record

ROOT = Path(__file__).parents[2]


def writer(run: Path, **options: Any) -> BackgroundWriter:
    """A writer of small files."""
    return BackgroundWriter(
        run, **{"arm": "none", "seed": 0, "metadata": metadata("none"), **OPTIONS, **options}
    )


def append_all(target: BackgroundWriter) -> None:
    """Hand over all rows."""
    for rows in batches():
        target.append(rows)
    target.flush()


def left(run: Path) -> list[str]:
    """What lies in RUN beside arms."""
    return sorted(entry.name for entry in run.iterdir() if not entry.name.startswith("arm="))


def full(monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """Let the disk be full after some files: what follows is written to /dev/full."""
    begun = iter(range(1000))

    def aside(run: Path, name: str) -> Path:
        number = next(begun)
        path = run / f"_writing.{name}.{number}.tmp"
        if number >= after:
            path.symlink_to("/dev/full")
        return path

    monkeypatch.setattr("deltad.dumps.writer.aside_path", aside)


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def test_files_are_those_of_the_foreground_bit_for_bit(tmp_path: Path) -> None:
    record(tmp_path / "front", 0, background=False)
    for size in (1, 64 << 20):
        record(tmp_path / f"back-{size}", 0, queue_bytes=size)
        assert contents(tmp_path / f"back-{size}") == contents(tmp_path / "front")
    assert check_dump(tmp_path / "front") == []
    assert unfinished(tmp_path / "front") == []


def test_rows_are_as_they_were_when_they_were_handed_over(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as target:
        for rows in batches():
            target.append(rows)
            for column in rows.values():
                column[...] = 0
        assert target.rows_seen == target.rows_stored == BATCHES * ROWS
        assert len(target.paths) == 2
    with writer(tmp_path / "other") as target:
        append_all(target)
    assert contents(tmp_path / "run") == contents(tmp_path / "other")


def test_a_slow_disk_slows_the_caller_and_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, seen = threading.Semaphore(0), []
    append = DumpWriter.append

    def slow(self: DumpWriter, columns: Any, **options: Any) -> None:
        assert may_write.acquire(timeout=20)
        seen.append(len(handed))
        append(self, columns, **options)

    monkeypatch.setattr(DumpWriter, "append", slow)
    handed: list[int] = []
    one = sum(column.nbytes for column in next(batches()).values())
    target = writer(tmp_path / "run", queue_bytes=3 * one)

    def hand_over() -> None:
        for rows in batches():
            target.append(rows)
            handed.append(1)

    caller = threading.Thread(target=hand_over)
    caller.start()
    deadline = time.monotonic() + 10
    while len(handed) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(handed) == 3  # the fourth waits, before anything is written
    for written in range(BATCHES):
        may_write.release()
        while len(seen) <= written and time.monotonic() < deadline:
            time.sleep(0.005)
    caller.join(20)
    target.close()
    assert all(count <= written + 3 for written, count in enumerate(seen))
    assert Dump.open(tmp_path / "run").rows_seen("none", 0) == BATCHES * ROWS


@pytest.mark.parametrize("discard", [False, True])
def test_bad_rows_come_up_in_the_next_call_and_at_the_end(tmp_path: Path, discard: bool) -> None:
    target = writer(tmp_path / "run", discard_on_error=discard)
    good, bad, later = list(batches())[:3]
    bad["token_id"][3] = 99
    target.append(good)
    target.append(bad)
    with pytest.raises(DumpError, match="token_id"):
        target.flush()
    for _ in range(2):
        with pytest.raises(DumpError, match="token_id"):
            target.append(later)
    with pytest.raises(DumpError, match="token_id"):
        target.close()
    if discard:
        assert list(tmp_path.rglob("*.parquet")) == []
    else:  # as in the foreground: rows of the calls before
        assert Dump.open(tmp_path / "run").rows_seen("none", 0) == ROWS
    assert left(tmp_path / "run") == []


def test_bad_rows_at_the_very_end_are_not_lost(tmp_path: Path) -> None:
    (bad, *_) = batches()
    bad["token_id"][0] = -5
    with pytest.raises(DumpError, match="token_id"), writer(tmp_path, discard_on_error=True) as it:
        it.append(bad)
    assert left(tmp_path) == []


def test_an_error_of_the_block_passes_and_carries_that_of_the_rows(tmp_path: Path) -> None:
    (bad, *_) = batches()
    bad["token_id"][0] = -5

    def run() -> None:
        with writer(tmp_path, discard_on_error=False) as it:
            it.append(bad)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert any("token_id" in note for note in caught.value.__notes__)


@needs_full
@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    record(tmp_path / "whole", 0)
    full(monkeypatch, after=after)
    run = tmp_path / "run"
    target = writer(run)
    with pytest.raises(RecordingError, match=r"arm=none/seed=0 failed: No space left on device; "):
        append_all(target)
    with pytest.raises(RecordingError, match="No space left"):
        target.close()
    found = contents(run)
    assert len(found) == after
    assert found.items() <= contents(tmp_path / "whole").items()
    assert left(run) == ["_unfinished.arm=none.seed=0.rank=0"]
    if after:
        assert [problem.kind for problem in check_dump(run, strict=False)] == ["unfinished"]


def test_a_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    target = writer(run)
    target.append(next(batches()))
    target.flush()
    for entry in run.iterdir():
        entry.unlink()
    run.rmdir()
    with pytest.raises(RecordingError, match=rf"failed: {run} is gone"):
        append_all(target)
    with pytest.raises(RecordingError, match=rf"failed: {run} is gone"):
        target.close()
    assert not run.exists()


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs root")
def test_a_folder_that_may_not_be_written_is_named_at_once(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        os.seteuid(65534)
        try:
            with pytest.raises(RecordingError, match=r"cannot begin: Permission denied$"):
                writer(Path(folder) / "run")
        finally:
            os.seteuid(0)


def in_fork(work: Callable[[], None]) -> int:
    """Exit status of some work in a fork."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_cannot_write_nor_close_what_its_parent_opened(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with writer(whole) as target:
        append_all(target)
    run = tmp_path / "run"
    with writer(run) as target:
        first, *others = batches()
        target.append(first)

        def child() -> None:
            with pytest.raises(ValueError, match=f"belongs to process {os.getppid()}"):
                target.append(first)
            target.close()
            target.abort()
            target.__exit__(None, None, None)

        assert in_fork(child) == 0
        for rows in others:
            target.append(rows)
    assert contents(run) == contents(whole)


NEVER_CLOSED = """
import sys
from pathlib import Path
from tests.dumps.recording import batches
from tests.dumps.test_background import writer
target = writer(Path(sys.argv[1]), discard_on_error=True)
for rows in batches():
    if sys.argv[2] == "bad rows":
        rows["token_id"][0] = -5
    target.append(rows)
    if sys.argv[2] == "bad rows":
        break
if sys.argv[2] == "error":
    raise ZeroDivisionError
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["end", "error", "bad rows"])
def test_a_writer_that_is_never_closed_is_closed_at_exit(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED, str(run), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if how == "end":
        assert done.stderr == ""
        record(tmp_path / "whole", 0)
        whole = contents(tmp_path / "whole")
        assert contents(run) == {name: whole[name] for name in whole if "arm=none" in name}
        assert left(run) == []
    elif how == "error":
        assert "ZeroDivisionError" in done.stderr
        found = contents(run)  # of what waited nothing is written any more
        assert len(found) <= 2
        assert left(run) == (["_unfinished.arm=none.seed=0.rank=0"] if found else [])
    else:
        assert done.stderr.startswith("error: ")
        assert "token_id" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert contents(run) == {}


RANK = """
import sys
from pathlib import Path
from dataclasses import replace
from tests.dumps.recording import batches, metadata
from tests.dumps.test_background import writer
rank = int(sys.argv[2])
about = replace(metadata("none"), ranks=3)
with writer(Path(sys.argv[1]), rank=rank, metadata=about) as target:
    for at, rows in enumerate(batches()):
        if at % 3 == rank:
            target.append(rows)
"""


@pytest.mark.process
def test_many_ranks_write_into_one_folder_without_knowing_of_each_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, str(run), str(rank)], cwd=ROOT)
        for rank in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0] * 3
    assert check_dump(run) == []
    dump = Dump.open(run)
    assert {part.rank for part in dump.files("none")} == {0, 1, 2}
    rows = [batch["token_id"] for batch in dump.batches("none", 0)]
    expected = np.concatenate([each["token_id"] for each in batches()])
    assert sorted(np.concatenate(rows)) == sorted(expected)


@pytest.mark.parametrize("size", [0, -1])
def test_the_queue_must_hold_something(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match="queue_bytes"):
        writer(tmp_path, queue_bytes=size)


def test_use_after_the_end_is_refused(tmp_path: Path) -> None:
    target = writer(tmp_path)
    target.close()
    target.close()
    target.abort()
    with pytest.raises(ValueError, match="is closed"):
        target.append(next(batches()))
