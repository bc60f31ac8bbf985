"""Seeds in worker processes: each by itself, whatever the others do.

A worker is a fresh interpreter (spawn). Workers ignore Ctrl-C: the parent hears it, tells them to
stop and waits until they have thrown away what was half-written.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from deltad.dumps import DumpError

from .recipe import RecipeError

Report = Callable[[str, float], None]
"""Progress of a piece of work: what it is, and the share done in [0, 1]."""

STOP_SECONDS = 20.0
"""How long a worker may take to throw away its open files before it is killed."""


class WorkerError(RuntimeError):
    """A seed failed or its worker died; what other seeds recorded is kept."""


class Job(Protocol):
    """What the workers do; must pickle."""

    def prepare(self, report: Report) -> None:
        """Do once, before any seed, what all of them share."""

    def open(self, report: Report) -> Callable[[Any, Report], None]:
        """Load what a worker needs and return the function that does one seed."""


@dataclass(frozen=True)
class Progress:
    """One message about a running job: `seed` is None while the shared work is prepared.

    Where a job's pieces are not seeds, `seed` is whatever names the piece.
    """

    seed: Any
    text: str
    fraction: float
    done: bool = False


@dataclass(frozen=True)
class _Failure:
    """An exception in a worker, as text."""

    seed: Any
    message: str
    trace: str
    ours: bool

    @classmethod
    def of(cls, seed: Any, error: Exception) -> _Failure:
        """Describe an exception that is being handled."""
        ours = isinstance(error, RecipeError | DumpError | OSError)
        message = str(error) if ours else _sentence(error)
        return cls(seed, message, traceback.format_exc(), ours)


@dataclass
class _Worker:
    """A process, our end of its pipe and the seed that it is at."""

    process: SpawnProcess
    connection: Connection
    seed: Any = None


def default_workers() -> int:
    """As many workers as this process may use cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(job: Job, seeds: Sequence[Any], *, workers: int, watch: Callable[[Progress], None]) -> None:
    """Do `job` for every seed.

    Parameters
    ----------
    job
        What to do.
    seeds
        In the order in which they are begun; numbers, or other pieces of work that pickle and
        whose `str` names them in errors.
    workers
        Processes; 0 does everything in this one.
    watch
        Called in this process with every piece of progress.

    Raises
    ------
    RecipeError
        The shared work cannot be done.
    WorkerError
        A seed failed or a worker died. Seeds that were running by then are finished first.
    KeyboardInterrupt
        After all workers have stopped.
    """
    if workers == 0:
        _run_here(job, seeds, watch)
        return
    pool: list[_Worker] = []
    try:
        pool.append(_start(job))
        _prepare(pool[0], watch)
        pool.extend(_start(job) for _ in range(min(workers, len(seeds)) - 1))
        _distribute(pool, deque(seeds), watch)
    except BaseException:
        for worker in pool:
            worker.process.terminate()
        raise
    finally:
        _stop(pool)


def _run_here(job: Job, seeds: Sequence[Any], watch: Callable[[Progress], None]) -> None:
    """Do everything in this process; failures look as they do from a worker."""
    at: Any = None
    try:
        job.prepare(lambda text, fraction: watch(Progress(None, text, fraction)))
        watch(Progress(None, "", 1.0, done=True))
        at = seeds[0]
        one_seed = job.open(_reporter(watch, at))
        for at in seeds:
            one_seed(at, _reporter(watch, at))
            watch(Progress(at, "", 1.0, done=True))
    except Exception as error:
        raise _error(_Failure.of(at, error)) from error


def _reporter(watch: Callable[[Progress], None], seed: Any) -> Report:
    """Report that speaks for one seed."""
    return lambda text, fraction: watch(Progress(seed, text, fraction))


def _start(job: Job) -> _Worker:
    """Start a worker process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _prepare(worker: _Worker, watch: Callable[[Progress], None]) -> None:
    """Let one worker do the shared work, and wait for it."""
    worker.connection.send("prepare")
    while True:
        try:
            message = worker.connection.recv()
        except EOFError:
            raise _death(worker) from None
        if isinstance(message, _Failure):
            raise _error(message)
        watch(message)
        if message.done:
            return


def _distribute(
    pool: list[_Worker], waiting: deque[Any], watch: Callable[[Progress], None]
) -> None:
    """Hand out seeds until all are done; after a failure only let the running ones finish."""
    first_error: RecipeError | WorkerError | None = None
    for worker in pool:
        _next_seed(worker, waiting)
    while busy := {worker.connection: worker for worker in pool if worker.seed is not None}:
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            error: RecipeError | WorkerError
            try:
                message = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                error = _death(worker)
                worker.seed = None
            else:
                if isinstance(message, Progress):
                    watch(message)
                    if message.done:
                        _next_seed(worker, waiting)
                    continue
                error = _error(message)
                worker.seed = None
            first_error = first_error or error
            waiting.clear()
    if first_error is not None:
        raise first_error


def _next_seed(worker: _Worker, waiting: deque[Any]) -> None:
    """Send a worker its next seed, if there is one."""
    worker.seed = waiting.popleft() if waiting else None
    if worker.seed is not None:
        # A worker that died meanwhile shows as the end of its pipe.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send(worker.seed)


def _error(failure: _Failure) -> RecipeError | WorkerError:
    """Error to raise for an exception in a worker, its trace kept as a note."""
    if failure.seed is None and failure.ours:
        return RecipeError(failure.message)
    where = "" if failure.seed is None else f"{_name(failure.seed)}: "
    error = WorkerError(f"{where}{failure.message}")
    error.add_note(failure.trace)
    return error


def _death(worker: _Worker) -> WorkerError:
    """Error of a worker that is gone without a word."""
    worker.process.join(STOP_SECONDS)
    code = worker.process.exitcode
    if code is not None and code < 0:
        with suppress(ValueError):
            code_text = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                code_text += ", as happens where memory runs out (try fewer workers)"
            return WorkerError(f"the worker at {_at(worker)} {code_text}")
    return WorkerError(f"the worker at {_at(worker)} ended with exit status {code}")


def _at(worker: _Worker) -> str:
    """What a worker was doing."""
    return "the shared preparation" if worker.seed is None else _name(worker.seed)


def _name(seed: Any) -> str:
    """A piece of work, as errors call it."""
    return f"seed {seed}" if isinstance(seed, int) else str(seed)


def _stop(pool: list[_Worker]) -> None:
    """End all workers: idle ones hear the end of their pipe; who does not end is killed."""
    for worker in pool:
        worker.connection.close()
    for worker in pool:
        worker.process.join(STOP_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(connection: Connection, job: Job) -> None:
    """Work of a process: wait for orders, do them, tell how they went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SystemExit unwinds the stack, so open files are thrown away on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_parent, name="deltad watches its parent", daemon=True).start()
    one_seed: Callable[[Any, Report], None] | None = None
    seed: Any = None

    def report(text: str, fraction: float) -> None:
        connection.send(Progress(seed, text, fraction))

    try:
        while True:
            order: Any = connection.recv()
            seed = None if order == "prepare" else order
            if seed is None:
                job.prepare(report)
            else:
                if one_seed is None:
                    one_seed = job.open(report)
                one_seed(seed, report)
            connection.send(Progress(seed, "", 1.0, done=True))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone or wants no more
    except Exception as error:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(_Failure.of(seed, error))
    finally:
        # Nothing is open any more, and an exit handler interrupted would print its trace.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_with_parent() -> None:
    """End at once where the parent was killed: nobody keeps others out of its folder any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(128 + signal.SIGKILL)


def _sentence(error: Exception) -> str:
    """Kind, place and message of an exception that is not one of ours."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"{type(error).__name__} at {place}: {error}"
