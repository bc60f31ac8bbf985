"""Files that appear whole or not at all: written aside under RUN, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from .errors import DumpError


def aside_path(run: Path, name: str) -> Path:
    """Make up a name under RUN that no dataset reader takes; `name` says whose it is."""
    return run / f"_writing.{name}.{secrets.token_hex(8)}.tmp"


def remove_leftovers(run: Path, name: str) -> None:
    """Remove what an interrupted writer left under names that begin like this."""
    for leftover in run.glob(f"_writing.{name}*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def publish(aside: Path, target: Path, *, replace: bool = False) -> None:
    """Put a complete file into its place, together with the folders that it is the first in.

    An empty folder would read as a missing file, so that folders too appear with what is in
    them, and a crash of the machine cannot tear either.

    Parameters
    ----------
    aside : Path
        The file, by a name of `aside_path`.
    target : Path
        Its place, in the same file system.
    replace : bool
        Whether the place may be taken.

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
    while not target.parent.is_dir():
        if _publish_with_folders(aside, target):
            _sync_folder(target.parent.parent)
            return
    os.replace(aside, target)
    _sync_folder(target.parent)


def _publish_with_folders(aside: Path, target: Path) -> bool:
    """Rename a folder that holds the file into place; False where another writer was first."""
    first = target.parent
    while not first.parent.is_dir():
        first = first.parent
    staging = aside.with_suffix(".folder.tmp")
    inner = staging / target.relative_to(first)
    try:
        inner.parent.mkdir(parents=True)
        os.replace(aside, inner)
        _sync_folder(inner.parent)
        try:
            os.rename(staging, first)
        except OSError:
            os.replace(inner, aside)
            if not first.is_dir():
                raise
            return False
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already where all went well
    return True


def _sync_folder(folder: Path) -> None:
    """Make a rename in this folder last; elsewhere than on POSIX folders cannot be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
