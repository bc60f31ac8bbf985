"""A writer that works in a thread, so that training does not wait for encoding and disks."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .errors import DumpError
from .layout import part_path
from .storage import place
from .writer import DumpWriter

QUEUE_BYTES: Final = 64 << 20
"""Rows that wait to be written, at most, in bytes: some 200,000 tokens of K = 20."""


class RecordingError(OSError):
    """What was recorded cannot be written; the message is one sentence that names the file."""


class BackgroundWriter:
    """A `DumpWriter` whose checking, encoding and writing are done by a thread.

    `append` copies the rows and returns. Where `queue_bytes` of them wait already, it waits until
    there is room, so that a slow disk slows training down and never fills the memory. The files
    are those of a `DumpWriter`, bit for bit.

    An error comes up in the next call of any method, and again in `close`, so that it cannot be
    missed: bad rows as the `DumpError` that a `DumpWriter` raises, what the file system refuses as
    one `RecordingError`. By then its file in work was thrown away, and complete ones stay.

    A process that was forked from this one cannot use the writer: there `append` raises, and
    closing does nothing. A writer that was never closed is closed when the interpreter exits.

    Parameters
    ----------
    run : str or Path
        RUN.
    arm, seed, rank : str, int, int
        See `DumpWriter`.
    queue_bytes : int
        Bytes of rows that may wait; a single larger `append` is let through alone.
    **options
        For `DumpWriter`.

    Raises
    ------
    ValueError, DumpError
        See `DumpWriter`; or `queue_bytes` is below 1.
    RecordingError
        RUN cannot be written.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        arm: str,
        seed: int,
        rank: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        **options: Any,
    ) -> None:
        if queue_bytes < 1:
            raise ValueError(f"`queue_bytes` must be at least 1, got {queue_bytes}")
        self._run = place(run)
        self._folder = part_path(self._run, arm, seed, rank, 0).parent
        self._discard_on_error = bool(options.get("discard_on_error", False))
        self._queue_bytes = queue_bytes
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._bytes = 0  # of the rows that wait or are in work
        self._ending = False
        self._error: Exception | None = None
        self._told = False
        self._thread: threading.Thread | None = None
        try:
            self._writer = DumpWriter(run, arm=arm, seed=seed, rank=rank, **options)
        except OSError as error:
            raise RecordingError(
                f"recording into {self._folder} cannot begin: {_reason(error)}"
            ) from error

    @property
    def paths(self) -> list[Path]:
        """Files that are complete, once all rows handed over so far were taken."""
        self._settle()
        return self._writer.paths

    @property
    def rows_seen(self) -> int:
        """Rows appended or skipped, once all of them were taken."""
        self._settle()
        return self._writer.rows_seen

    @property
    def rows_stored(self) -> int:
        """Rows kept of these."""
        self._settle()
        return self._writer.rows_stored

    def append(
        self,
        columns: Mapping[str, NDArray[Any]],
        *,
        vectors_stored: NDArray[np.bool_] | None = None,
    ) -> None:
        """Hand over any number of rows; see `DumpWriter.append`.

        Raises
        ------
        DumpError
            Rows of an earlier call break the contract.
        RecordingError
            Rows of an earlier call cannot be written.
        ValueError
            The writer is closed, or this process was forked from its own.
        """
        self._must_be_ours()
        copied = {name: _copy(each) for name, each in columns.items()}
        stored = None if vectors_stored is None else _copy(vectors_stored)
        size = sum(int(getattr(each, "nbytes", 0)) for each in (*copied.values(), stored))
        self._hand_over(
            _Work(lambda: self._writer.append(copied, vectors_stored=stored), max(size, 1))
        )

    def skip(self, rows: int, *, outside: int = 0) -> None:
        """Count rows that need not be handed over; see `DumpWriter.skip`."""
        self._must_be_ours()
        self._hand_over(_Work(lambda: self._writer.skip(rows, outside=outside), 1))

    def flush(self) -> None:
        """Wait until all rows handed over so far were taken.

        Raises
        ------
        DumpError, RecordingError
            As of `append`.
        """
        self._must_be_ours()
        self._settle()
        self._raise_error()

    def close(self) -> None:
        """Take what waits and complete the file; further calls do nothing but tell the error.

        Raises
        ------
        DumpError, RecordingError
            As of `append`, or the file cannot be completed.
        """
        if self._is_foreign():
            return
        self._end(drop=False)
        if self._error is not None and self._discard_on_error:
            self._writer.abort()
        try:
            self._writer.close()
        except (OSError, pa.ArrowException, DumpError) as error:
            self._error = self._refusal(error)
            raise self._error from self._error.__cause__
        self._raise_error()

    def abort(self, *, unfinished: bool = False) -> None:
        """Discard what waits and the file in work; see `DumpWriter.abort`."""
        if self._is_foreign():
            return
        self._end(drop=True)
        self._writer.abort(unfinished=unfinished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_foreign():
            return
        if kind is None:
            self.close()
            return
        self._end(drop=self._discard_on_error)
        self._writer.__exit__(kind, error, trace)
        if error is not None and self._error is not None and self._error is not error:
            error.add_note(f"{self._error}")

    def _must_be_ours(self) -> None:
        """Refuse a forked process, and use after the end."""
        if self._is_foreign():
            raise ValueError(
                f"the writer of {self._folder} belongs to process {self._process}, from which this "
                "one was forked: open a writer in the process that records, with a rank of its own"
            )
        self._raise_error()
        if self._ending:
            raise ValueError(f"the writer of {self._folder} is closed")

    def _is_foreign(self) -> bool:
        """Whether this process was forked from the writer's; the thread did not come along."""
        return os.getpid() != self._process

    def _raise_error(self) -> None:
        """Raise what went wrong in the thread."""
        if self._error is not None:
            self._told = True
            raise self._error

    def _hand_over(self, work: _Work) -> None:
        """Queue work, when there is room for it."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve,
                    name=f"deltad writes {self._folder.parent.name}",
                    daemon=True,
                )
                self._thread.start()
                _OPEN.add(self)
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or not self._bytes
                    or self._bytes + work.size <= self._queue_bytes
                )
            )
            self._raise_error()
            self._waiting.append(work)
            self._bytes += work.size
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait until nothing waits and nothing is in work."""
        if self._is_foreign():
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes)

    def _end(self, *, drop: bool) -> None:
        """Let the thread finish what waits, or drop that, and wait for its end."""
        with self._changed:
            self._ending = True
            if drop:
                self._bytes -= sum(work.size for work in self._waiting)
                self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        _OPEN.discard(self)

    def _serve(self) -> None:
        """Do what is handed over, in order, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            error = self._do(work)
            with self._changed:
                self._bytes -= work.size
                if error is not None:
                    self._error = error
                    self._bytes -= sum(each.size for each in self._waiting)
                    self._waiting.clear()
                self._changed.notify_all()
                if error is not None:
                    return

    def _do(self, work: _Work) -> Exception | None:
        """Do one piece of work; what went wrong, after the file in work was thrown away."""
        try:
            work.act()
        except Exception as error:
            if not (self._writer.failed or isinstance(error, (OSError, pa.ArrowException))):
                return error  # bad rows: those before them are not lost for it
            told = self._refusal(error)
            try:
                self._writer.abort(unfinished=True)
            except OSError as further:
                told.add_note(f"and its file could not be removed: {_reason(further)}")
            return told
        return None

    def _refusal(self, error: Exception) -> Exception:
        """One sentence about what cannot be written; another writer's doing speaks for itself."""
        gone = not self._run.is_dir()
        if isinstance(error, DumpError) and not gone:
            return error
        reason = f"{self._run} is gone ({_reason(error)})" if gone else _reason(error)
        told = RecordingError(
            f"recording into {self._folder} failed: {reason}; complete files stay, and what came "
            "after them is missing"
        )
        told.__cause__ = error
        return told


class _Work(NamedTuple):
    """Something for the thread to do, and the bytes that it holds meanwhile."""

    act: Callable[[], None]
    size: int


def _reason(error: Exception) -> str:
    """Why something failed, on one line."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(str(error).split())


def _copy(value: Any) -> Any:
    """Keep an array as it is now, whatever its owner does with it later."""
    return value.copy() if isinstance(value, np.ndarray) else value


_OPEN: Final[set[BackgroundWriter]] = set()
"""Writers whose threads run."""


@atexit.register
def _close_all() -> None:
    """Close what was never closed, as a `with` block would; tell what nobody was told."""
    error = getattr(sys, "last_value", None)
    for writer in list(_OPEN):
        told = writer._told
        try:
            writer.__exit__(None if error is None else type(error), error, None)
        except Exception as problem:
            if not told:
                sys.stderr.write(f"error: {problem}\n")
