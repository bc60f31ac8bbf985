"""Files that appear whole or not at all: written aside under RUN, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from .errors import DumpError


def aside_path(run: Path, name: str) -> Path:
    """A new name under RUN that no dataset reader takes; `name` says whose it is."""
    return run / f"_writing.{name}.{secrets.token_hex(8)}.tmp"


def remove_leftovers(run: Path, name: str) -> None:
    """Remove what an interrupted writer left under names that begin like this."""
    for leftover in run.glob(f"_writing.{name}*.tmp"):
        leftover.unlink(missing_ok=True)


def publish(aside: Path, target: Path, *, replace: bool = False) -> None:
    """Put a complete file into its place, so that a crash of the machine cannot tear it.

    Raises
    ------
    DumpError
        The place is taken, or the file aside is gone: another writer is at work there.
    """
    if target.exists() and not replace:
        raise DumpError(target, "exists already: another writer has put it there meanwhile")
    try:
        descriptor = os.open(aside, os.O_RDWR)
    except FileNotFoundError as error:
        raise DumpError(
            target, "cannot be completed: another writer of this part removed it meanwhile"
        ) from error
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: others have files there
            target.parent.rmdir()  # an empty folder reads as a missing file
            target.parent.parent.rmdir()
        raise
    if os.name == "posix":  # elsewhere folders cannot be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
