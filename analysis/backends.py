"""Where work on a dump is done: the spans that it falls into, and what runs them side by side.

A dump is read span by span, a span being some row groups of one file, and what the spans gave is
joined in their order. Reading a span is a function of the span alone, so the result is the same
to the bit whatever ran it, on how many cores or machines, and in which order.
"""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from deltad import __version__
from deltad.dumps import DumpError
from deltad.dumps.errors import first_line

if TYPE_CHECKING:
    from deltad.dumps import Dump, PartFile

Item = TypeVar("Item")
Found = TypeVar("Found")

Progress = Callable[[int], None]
"""Called with the number of rows just read."""

SPAN_ROWS: Final = 131_072
"""Rows per span, at least, where a file has more: a fraction of a second's work, against which
opening the file once more costs nothing."""

RETRIES: Final = 3
"""How often a task on Ray is run again whose worker died."""

OBJECT_STORE_BYTES: Final = 80 * 2**20
"""Shared memory of a local Ray cluster: what tasks give is kept there for a moment."""

_QUIET: Final = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".*"}
"""Keeps Ray from printing to standard output, where a command's data goes, that a worker died."""

_ALONE: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A cluster of this machine reports to nobody and listens on loopback only."""


@dataclass(frozen=True)
class Span:
    """Row groups of one file, from `first` to before `end`; may be pickled.

    Recorded D and Ḋ of those `verified` are computed again before they are believed.
    """

    part: PartFile
    first: int
    end: int
    verified: tuple[int, ...] = ()

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
    """Divide the files of some arms into spans: by arm, then as the dump's files are sorted.

    A file without rows has a span too.
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


class BackendError(RuntimeError):
    """The backend cannot do the work; the message is one sentence."""


class Backend(ABC):
    """Runs one function on many items, somewhere."""

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of the items that `map` will run the function on: all."""
        return items

    @abstractmethod
    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function of an item alone to every item: what it gave, in their order.

        The function and its results can be pickled; `progress` is told every item when it is done,
        by the thread that iterates. What the function raised for the first item for which it raised
        anything is raised here, and nothing is left running.
        """


class LocalBackend(Backend):
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

    def map(self, function: Any, items: Sequence[Any], *, progress: Any = None) -> Iterator[Any]:
        """Apply a function to every item, no more than two per worker ahead of what was taken."""
        workers = min(self.workers, len(items))
        if workers < 2:
            for item in items:
                found = function(item)
                if progress is not None:
                    progress(item)
                yield found
            return
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        pool = ThreadPoolExecutor(workers, "deltad")
        try:
            for item, future in _ahead(
                items, lambda each: pool.submit(function, each), 2 * workers
            ):
                found = future.result()
                if progress is not None:
                    progress(item)
                yield found
        finally:  # an error, an interruption, or nobody wants the rest
            pool.shutdown(cancel_futures=True)


class RayBackend(Backend):
    """Runs each item as a task on Ray; an item whose worker dies is run again elsewhere.

    Parameters
    ----------
    address : str, optional
        Of a cluster, as `ray.init` takes it: "auto", "host:6379", "ray://host:10001". By
        default the connection that this process has, else what RAY_ADDRESS says, else a cluster
        of this machine alone, started now and stopped by `close`.
    workers : int, optional
        Cores of a local cluster; by default those that this process may use.

    Raises
    ------
    BackendError
        Ray is not installed, or there is no cluster at that address.
    """

    def __init__(self, address: str | None = None, *, workers: int | None = None) -> None:
        address = address or os.environ.get("RAY_ADDRESS", "local")
        with _environment(_QUIET if address != "local" else {**_QUIET, **_ALONE}):
            try:
                import ray
            except ImportError as error:
                raise BackendError(
                    f"counting on Ray needs Ray ({error}): pip install 'deltad[ray]'"
                ) from error
            self._ray = ray
            self._mine = not ray.is_initialized()
            if self._mine:
                self._connect(address, workers)
        # Rules of a user's file are no modules that a worker could import.
        for name, module in list(sys.modules.items()):
            if name.startswith("deltad_rules_"):
                ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]

    def map(self, function: Any, items: Sequence[Any], *, progress: Any = None) -> Iterator[Any]:
        """Apply a function to every item.

        A span on which a worker died each time that it was tried is a DumpError that names the
        file, another item, or workers without this version of deltad, a BackendError.
        """
        ray = self._ray
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)
        most = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        # Where an error or the caller ends this early, what is in flight runs out unseen: to cancel
        # a task that has just ended can make Ray (2.60) end this process.
        submit = partial(task.remote, function, __version__)
        for item, reference in _ahead(items, submit, most):
            found = self._result(item, reference)
            if progress is not None:
                progress(item)
            yield found

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _connect(self, address: str, workers: int | None) -> None:
        """Join a cluster, or start one on this machine that nobody else reaches."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            options |= {
                "num_cpus": workers or usable_cores(),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            self._ray.init(address=address, **options)
        except Exception as error:  # of many kinds
            raise BackendError(
                f"there is no Ray cluster at {address} ({first_line(error)})"
            ) from error

    def _result(self, item: Any, reference: Any) -> Any:
        """What a task gave, or what it raised."""
        ray = self._ray
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception) and not isinstance(cause, ImportError):
                raise cause from None
            raise BackendError(
                f"the cluster's workers cannot run deltad ({first_line(cause)}): install version "
                f"{__version__} there"
            ) from None
        except ray.exceptions.RayError as error:
            said = f"its worker was lost each of {RETRIES + 1} times ({first_line(error)})"
            if isinstance(item, Span):
                raise DumpError(item.part.path, said, kind="unreadable") from None
            raise BackendError(f"{item}: {said}") from None


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the block, those that are set already left alone."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _ahead(
    items: Iterable[Item], submit: Callable[[Item], Any], most: int
) -> Iterator[tuple[Item, Any]]:
    """Every item with what `submit` gave for it, so many of which are handed out at a time."""
    waiting = iter(items)
    flying = deque((item, submit(item)) for item in islice(waiting, most))
    while flying:
        yield flying.popleft()
        flying.extend((item, submit(item)) for item in islice(waiting, 1))


def _run(function: Callable[[Item], Found], version: str, item: Item) -> Found:
    """Do the work of a task, in a worker."""
    if version != __version__:
        raise BackendError(f"the workers have deltad {__version__}, and {version} asks them")
    return function(item)
