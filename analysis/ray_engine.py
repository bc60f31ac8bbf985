"""Counting on a Ray cluster: the same function on the same spans, one task a span.

What the tasks give is taken in the order of the spans, so the result is the single machine's to
the bit. Ray runs the tasks of a worker or a node that was lost once more elsewhere.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from deltad import __version__
from deltad.dumps import DumpError

from .engine import Span, usable_cores

Item = TypeVar("Item")
Found = TypeVar("Found")

RETRIES: Final = 3
"""Times that a task is run again whose worker died."""

OBJECT_STORE_BYTES: Final = 80 * 2**20
"""Shared memory of a local cluster: what tasks give is kept there for a moment, and is small."""

_IN_FLIGHT: Final = 4
"""Tasks handed out and not yet yielded, per core of the cluster."""


_QUIET: Final = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".*"}
"""Keeps Ray from printing to standard output, where a command's data goes, that a worker died."""

_ALONE: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A cluster of this machine reports to nobody and listens on loopback only."""


class EngineError(RuntimeError):
    """The cluster cannot do the work; the message is one sentence."""


class RayEngine:
    """Runs each item as a task on Ray; see `deltad.analysis.engine.Engine`.

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
    EngineError
        Ray is not installed, or there is no cluster at that address.
    """

    def __init__(self, address: str | None = None, *, workers: int | None = None) -> None:
        address = address or os.environ.get("RAY_ADDRESS", "local")
        with _environment(_QUIET if address != "local" else {**_QUIET, **_ALONE}):
            try:
                import ray
            except ImportError as error:
                raise EngineError(
                    f"counting on Ray needs Ray ({error}): pip install 'deltad[ray]'"
                ) from error
            self._ray = ray
            self._mine = not ray.is_initialized()
            if self._mine:
                self._connect(address, workers)

    def map(
        self,
        function: Callable[[Item], Found],
        items: Sequence[Item],
        *,
        progress: Callable[[Item], None] | None = None,
    ) -> Iterator[Found]:
        """Apply a function to every item; see `Engine.map`.

        Raises
        ------
        DumpError
            A worker died on a span each time that it was tried; names the file.
        EngineError
            The same of another item; or the workers have no deltad, or another version.
        """
        ray = self._ray
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)
        window = _IN_FLIGHT * max(1, int(ray.cluster_resources().get("CPU", 1)))
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
            raise EngineError(f"there is no Ray cluster at {address} ({_line(error)})") from error

    def _result(self, item: Any, reference: Any) -> Any:
        """What a task gave, or what it raised."""
        ray = self._ray
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception) and not isinstance(cause, ImportError):
                raise cause from None
            raise EngineError(
                f"the cluster's workers cannot run deltad ({_line(cause)}): install version "
                f"{__version__} there"
            ) from None
        except ray.exceptions.RayError as error:
            said = f"its worker was lost each of {RETRIES + 1} times ({_line(error)})"
            if isinstance(item, Span):
                raise DumpError(item.part.path, said, kind="unreadable") from None
            raise EngineError(f"{item}: {said}") from None


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
        raise EngineError(f"the workers have deltad {__version__}, and {version} asks them")
    return function(item)


def _line(error: BaseException) -> str:
    """The first line of an error's words."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
