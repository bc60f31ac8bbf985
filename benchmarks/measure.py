"""How times and memory are taken: things side by side in one run, CPU time, medians."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Times:
    """CPU seconds of several things that were timed in turn.

    Attributes
    ----------
    seconds : mapping of str to tuple of float
        By name, one value a round.
    """

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Median of a thing, in seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """Ratio of two medians."""
        return self.median(name) / self.median(to)

    def spread(self, name: str, to: str) -> tuple[float, float]:
        """Smallest and largest ratio within a round."""
        found = [a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)]
        return min(found), max(found)


def interleaved(
    things: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.process_time,
) -> Times:
    """Time things in turn, A B C A B C …, after a round that is not counted.

    Parameters
    ----------
    things : mapping of str to callable
        What they return is dropped before the next begins.
    rounds : int
        Counted rounds.
    clock : callable
        CPU time of this process by default; of all its threads.

    Returns
    -------
    Times
        Of each thing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in things}
    for counted in range(rounds + 1):
        for name, thing in things.items():
            begin = clock()
            thing()
            taken = clock() - begin
            if counted:
                seconds[name].append(taken)
    return Times({name: tuple(values) for name, values in seconds.items()})


def interleaved_processes(
    commands: Mapping[str, Sequence[str]],
    *,
    rounds: int = 5,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    warm: bool = False,
) -> Times:
    """Time whole processes in turn: user and system CPU seconds of each, children included.

    With `warm` they have run before, and no round is left uncounted.

    Raises
    ------
    RuntimeError
        A command failed; with the end of what it said.
    """
    env = {**os.environ, **(environment or {})}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for counted in range(1 if warm else 0, rounds + 1):
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                said = (done.stderr or done.stdout).decode(errors="replace")[-600:]
                raise RuntimeError(f"{name} failed with status {done.returncode}: {said}")
            if counted:
                seconds[name].append(
                    after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
                )
    return Times({name: tuple(values) for name, values in seconds.items()})


def peak_extra_mb(thing: Callable[[], Any]) -> float:
    """Growth of the resident set while a thing runs in a forked child, in MB.

    The child begins with everything that the parent has made, so that only what the thing itself
    takes is counted.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        before = _high_water()
        thing()
        sender.send((_high_water() - before) / 1024)

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        found = float(receiver.recv())
    except EOFError as error:
        raise RuntimeError("the process whose memory was to be measured died") from error
    finally:
        process.join()
    return found


def _high_water() -> float:
    """Largest resident set of this process so far, in KB; a fork begins anew."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1])


def one_thread() -> None:
    """Let this process compute on one thread; call it before torch or a peer is imported."""
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "POLARS_MAX_THREADS",
    ):
        os.environ[name] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    import platform

    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": cpu,
        "cores": str(os.cpu_count()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.2f} at the start",
    }
