"""Kill a recording at random times and look at what it left: `python -m tests.dumps.kill N RUN`.

Each recording is a fork of this process, which has imported everything once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from deltad.dumps import check_dump, part_numbers, unfinished

from .recording import ARMS, contents, record, resume


def forked(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Start some work in a fork; its process, and where its events can be read."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            work(partial(_tell, writing))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    return process, reading


def _tell(writing: int, event: str) -> None:
    """Tell an event to whom outlives this process."""
    os.write(writing, f"{event}\n".encode())


def events(reading: int) -> list[str]:
    """What a fork that has ended has told."""
    with os.fdopen(reading) as told:
        return told.read().splitlines()


def _recording(run: Path, tell: Callable[[str], None]) -> None:
    """Record one seed."""
    record(run, 0, tell=tell)


def _resuming(run: Path, tell: Callable[[str], None]) -> None:
    """Record what of it is missing."""
    resume(run, 1)


def done(run: Path, *, again: bool) -> float:
    """Record to the end in a fork; the seconds that it took."""
    begin = time.monotonic()
    process, reading = forked(partial(_resuming if again else _recording, run))
    _, status = os.waitpid(process, 0)
    events(reading)
    assert status == 0, status
    return time.monotonic() - begin


def look(run: Path, told: list[str], whole: dict[str, bytes]) -> None:
    """Hold what a killed recording left against what it had told by then."""
    if not run.is_dir():
        assert "opened none" not in told
        return
    found = contents(run)
    for name, content in found.items():
        assert content == whole[name], name  # complete, and as it would have been
        pq.read_table(run / name)
    notes = unfinished(run)
    for arm in ARMS:
        noted = any(each.arm == arm for each in notes)
        if f"opened {arm}" in told and f"closes {arm}" not in told:
            assert noted, (arm, told)
        if f"opens {arm}" not in told or f"closed {arm}" in told:
            assert not noted, (arm, told)
        if f"closed {arm}" in told:
            assert part_numbers(run, arm=arm, seed=0) == [0, 1, 2]
    problems = check_dump(run, strict=False)
    if not any(run.glob("arm=*")):
        begun = problems.pop(0)
        assert "holds no `arm=<name>` folder" in str(begun)
    assert {problem.kind for problem in problems} <= {"unfinished"}, problems
    for note, problem in zip(notes, problems, strict=True):
        there = len(part_numbers(run, arm=note.arm, seed=0))
        words = {0: "no file is", 1: "one file is"}.get(there, f"{there} files are")
        assert f"arm {note.arm}, seed 0, rank 0 is not finished: {words} complete" in str(problem)


def main(trials: int, folder: Path) -> None:
    """Kill `trials` recordings."""
    run = folder / "undisturbed"
    seconds = min(done(run, again=False) for _ in range(3))
    whole = contents(run)
    assert len(whole) == 6
    random_ = random.Random(0)
    killed = 0
    for trial in range(trials):
        run = folder / f"run-{trial}"
        process, reading = forked(partial(_recording, run))
        time.sleep(random_.uniform(0, 0.9 * seconds))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        killed += os.WIFSIGNALED(status)
        look(run, events(reading), whole)
        done(run, again=True)
        assert contents(run) == whole, "what was resumed differs"
        assert check_dump(run) == []
        assert not [entry for entry in run.iterdir() if entry.name.startswith("_")]
        shutil.rmtree(run)
    print(f"{killed} of {trials} killed before their end")
    assert killed >= trials / 4


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
