"""Where work on a dump is done: the spans that it falls into, and what runs them side by side.

A dump is read span by span, a span being some row groups of one file, and what the spans gave is
joined in their order. Reading a span is a function of the span alone, so the result is the same
to the bit whatever ran it, on how many cores or machines, and in which order.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from deltad import __version__
from deltad.dumps import DumpError

if TYPE_CHECKING:
    from concurrent.futures import Future

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
    """Row groups of one file, one after the other; may be pickled.

    Attributes
    ----------
    part : PartFile
        The file.
    first, end : int
        Row groups from `first` to before `end`.
    verified : tuple of int
        Those of them whose recorded D and Ḋ are computed again before they are believed.
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


class Backend(Protocol):
    """Runs one function on many items, somewhere."""

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of the items that `map` will run the function on."""
        ...

    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function to every item, and give what it gave in the order of the items.

        The function, the items and what it gives can be pickled. `progress` is told every item
        when it is done, by the thread that iterates, in any order. What the function raised for
        the first item in their order is raised, and nothing is left running.
        """
        ...


class LocalBackend:
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

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """All of them."""
        return items

    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function to every item; see `Backend.map`.

        No more than two items per worker are handed out and not yet yielded, so that what is
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
                    if len(flying) >= 2 * self.workers:
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


class RayBackend:
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

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """All of them."""
        return items

    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function to every item; see `Backend.map`.

        Raises
        ------
        DumpError
            A worker died on a span each time that it was tried; names the file.
        BackendError
            The same of another item; or the workers have no deltad, or another version.
        """
        ray = self._ray
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)
        window = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting = iter(items)
        flying: deque[tuple[Item, Any]] = deque()
        unseen: dict[Any, Item] = {}
        # Where an error or the caller ends this early, what is in flight runs out unseen: to cancel
        # a task that has just ended can make Ray (2.60) end this process.
        while True:
            for item in waiting:
                reference = task.remote(function, item, __version__)
                flying.append((item, reference))
                unseen[reference] = item
                if len(flying) >= window:
                    break
            if not flying:
                return
            item, reference = flying[0]
            while reference in unseen:
                done, _ = ray.wait(list(unseen), num_returns=1)
                for each in done:
                    over = unseen.pop(each)
                    if progress is not None:
                        progress(over)
            found = self._result(item, reference)
            flying.popleft()
            yield found

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            raise BackendError(f"there is no Ray cluster at {address} ({_line(error)})") from error

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
                f"the cluster's workers cannot run deltad ({_line(cause)}): install version "
                f"{__version__} there"
            ) from None
        except ray.exceptions.RayError as error:
            said = f"its worker was lost each of {RETRIES + 1} times ({_line(error)})"
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


def _run(function: Callable[[Item], Found], item: Item, version: str) -> Found:
    """Do the work of a task, in a worker."""
    if version != __version__:
        raise BackendError(f"the workers have deltad {__version__}, and {version} asks them")
    return function(item)


def _line(error: BaseException) -> str:
    """The first line of an error's words."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
