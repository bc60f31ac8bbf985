"""One process at a time records into a folder; the next is told which process is at work."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deltad._checks import parse_json

from .storage import is_remote, read_bytes

LOCK: Final = "_lock"
"""The file in RUN that is locked; dataset readers skip it."""


class InUseError(BlockingIOError):
    """Another process records into the folder; the message is one sentence that names it."""


def is_empty(run: Path) -> bool:
    """Whether nothing lies in a folder but its lock, or there is no folder."""
    return not run.exists() or all(entry.name == LOCK for entry in run.iterdir())


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep other processes that ask for the same lock out of RUN while the block runs.

    The operating system frees the lock of a process that was killed. Behind a URL, and where the
    system has no `flock`, nothing is locked.

    Parameters
    ----------
    run : Path
        RUN, made if need be; removed at the end if it is empty then.

    Raises
    ------
    InUseError
        Another process has the lock.
    OSError
        The file system refuses.
    """
    try:
        import fcntl
    except ImportError:  # not on POSIX
        yield
        return
    if is_remote(run):
        yield
        return
    path = run / LOCK
    while True:
        run.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except IsADirectoryError as error:
            raise IsADirectoryError(
                f"{path} must be a file, which is locked while {run} is recorded into, and is a "
                "folder: remove it"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InUseError(
                f"{run} is being recorded into by {_owner(path)}: wait for its end, or end it"
            ) from None
        # Who had it before may have removed the file between our opening and locking it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    try:
        about = {"process": os.getpid(), "host": socket.gethostname()}
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps(about).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # something is in it, as it should
            run.rmdir()


def _owner(path: Path) -> str:
    """Who has the lock."""
    try:
        found = parse_json(read_bytes(path))
        return f"process {found['process']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just being written or removed
        return "another process"
