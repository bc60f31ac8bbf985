"""Where work on a dump is done: the spans that it falls into, and what runs them side by side.

A dump is counted span by span, a span being some row groups of one file, and what the spans
gave is joined in their order. Counting a span is a function of the span alone, so the result is
the same to the bit whatever ran it, on how many cores or machines, and in which order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from deltad.dumps import Dump, PartFile

Item = TypeVar("Item")
Found = TypeVar("Found")

Progress = Callable[[int], None]
"""Called with the number of rows just read."""

SPAN_ROWS: Final = 131_072
"""Rows a span, at least, where a file has more: a fraction of a second's work, against which
opening the file once more costs nothing."""

_IN_FLIGHT: Final = 2
"""Spans handed out per worker: one in work and one waiting."""


@dataclass(frozen=True)
class Span:
    """Row groups of one file, one after the other; may be pickled.

    Attributes
    ----------
    part : PartFile
        The file.
    first, end : int
        Row groups from `first` to before `end`.
    """

    part: PartFile
    first: int
    end: int

    @property
    def groups(self) -> range:
        """Its row groups, by their places in the file."""
        return range(self.first, self.end)

    @property
    def rows(self) -> int:
        """Rows of its row groups."""
        return sum(self.part.groups[self.first : self.end])

    @property
    def rows_seen(self) -> int:
        """Tokens looked at for the file, all of them counted with its first span."""
        return self.part.metadata.rows_seen if self.first == 0 else 0


def spans_of(dump: Dump, arms: Iterable[str], *, least_rows: int = SPAN_ROWS) -> tuple[Span, ...]:
    """Divide the files of some arms into spans.

    Parameters
    ----------
    dump : Dump
        Only its footers are looked at.
    arms : iterable of str
        In the order wanted.
    least_rows : int
        Rows a span, at least; a file with fewer is one span.

    Returns
    -------
    tuple of Span
        By arm, then sorted as the dump's files are; a file without rows has a span too.
    """
    found = []
    for arm in arms:
        for part in dump.files(arm):
            first = rows = 0
            for at, group in enumerate(part.groups, 1):
                rows += group
                if rows >= least_rows and at < len(part.groups):
                    found.append(Span(part, first, at))
                    first, rows = at, 0
            found.append(Span(part, first, len(part.groups)))
    return tuple(found)


class Engine(Protocol):
    """Runs one function on many items, somewhere."""

    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function to every item.

        Parameters
        ----------
        function : callable
            Of an item alone; it and its results can be pickled.
        items : sequence
            Any number.
        progress : callable, optional
            Told every item when it is done, by the thread that iterates, in any order.

        Yields
        ------
        object
            What the function gave, in the order of the items.

        Raises
        ------
        Exception
            What the function raised for the first item, in their order, for which it raised
            anything; nothing is left running.
        """
        ...


class LocalEngine:
    """Threads of this process: decoding and NumPy let each other run.

    Parameters
    ----------
    workers : int, optional
        Threads; by default one for each core that this process may use.

    Raises
    ------
    ValueError
        Fewer workers than 1.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = usable_cores() if workers is None else workers
        if self.workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers}")

    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function to every item; see `Engine.map`.

        No more than two items a worker are handed out and not yet yielded, so that what is
        kept in memory does not grow with their number.
        """
        if min(self.workers, len(items)) < 2:
            for item in items:
                found = function(item)
                if progress is not None:
                    progress(item)
                yield found
            return
        waiting = iter(items)
        flying: deque[tuple[Item, Future[Found]]] = deque()
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        pool = ThreadPoolExecutor(min(self.workers, len(items)), "deltad")
        try:
            while True:
                for item in waiting:
                    flying.append((item, pool.submit(function, item)))
                    if len(flying) >= _IN_FLIGHT * self.workers:
                        break
                if not flying:
                    return
                item, future = flying.popleft()
                found = future.result()
                if progress is not None:
                    progress(item)
                yield found
        finally:  # an error, an interruption, or nobody wants the rest
            pool.shutdown(cancel_futures=True)


def read_arms(
    function: Callable[[Span], Found],
    dump: Dump,
    arms: Iterable[str],
    *,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, int], list[Found]]:
    """Apply a function to every span of some arms.

    Parameters
    ----------
    function : callable
        Of a span alone.
    dump : Dump
        An open dump.
    arms : iterable of str
        Which of its arms.
    engine : Engine, optional
        Where to run; by default on this machine's cores.
    progress : callable, optional
        Told the number of rows of every span that is done.

    Returns
    -------
    dict of (arm, seed) to list
        What the function gave, in the order of the spans.
    """
    spans = spans_of(dump, arms)

    def tell(span: Span) -> None:
        if progress is not None:
            progress(span.rows)

    found = (engine or LocalEngine()).map(function, spans, progress=tell)
    return by_seed(spans, found)


def by_seed(spans: Iterable[Span], found: Iterable[Found]) -> dict[tuple[str, int], list[Found]]:
    """Group what spans gave by arm and seed, in the order of the spans."""
    grouped: dict[tuple[str, int], list[Found]] = {}
    for span, each in zip(spans, found, strict=True):
        grouped.setdefault((span.part.arm, span.part.seed), []).append(each)
    return grouped


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
