"""A few threads, each of which computes on one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

A = TypeVar("A")
R = TypeVar("R")


class Map(Protocol):
    """`map` that returns a list."""

    def __call__(self, function: Callable[[A], R], items: Iterable[A]) -> list[R]:
        """Call the function on each item; results are in the order of the items."""


@contextmanager
def single_threaded(workers: int) -> Iterator[Map]:
    """Threads that share out work between them, without intra-op threads of their own.

    `torch.set_num_threads` sets OpenMP's and MKL's number for the thread that calls it, and
    besides a number for all, which a thread takes over when it first computes or asks. So each
    worker calls it with 1 and asks, and once all have, the caller calls it with what it had
    before: the workers stay at one thread, the caller and every later thread at what they had.

    Parameters
    ----------
    workers : int
        Number of threads; with 1 the caller's own computes, with the threads that torch has.

    Yields
    ------
    Map
        Gradients are off within; the first exception is raised again.
    """
    if workers == 1:
        yield _in_turn
        return
    before = torch.get_num_threads()
    ready = threading.Barrier(workers + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # from now on the number for all does not matter here
        ready.wait()

    def quiet(function: Callable[[A], R], item: A) -> R:
        with torch.no_grad():
            return function(item)

    def shared_out(function: Callable[[A], R], items: Iterable[A]) -> list[R]:
        return [done.result() for done in [pool.submit(quiet, function, item) for item in items]]

    with ThreadPoolExecutor(workers, "readout", begin) as pool:
        for _ in range(workers):
            pool.submit(bool)  # the pool starts a thread a task, as long as none is idle
        ready.wait()
        torch.set_num_threads(before)
        yield shared_out


def _in_turn(function: Callable[[A], R], items: Iterable[A]) -> list[R]:
    """One after the other."""
    return [function(item) for item in items]
