"""Files that appear whole or not at all: written aside under RUN, then renamed.

Where RUN is a URL they are written in the folder for temporary files, then uploaded.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DumpError
from .storage import is_remote

if TYPE_CHECKING:
    from .remote import RemotePath


def aside_path(run: Path, name: str) -> Path:
    """Make up a name under RUN that no dataset reader takes; `name` says whose it is.

    Where RUN is a URL the name is of a local file, in the folder for temporary files.
    """
    folder, start = _asides(run, name)
    return folder / f"{start}.{secrets.token_hex(8)}.tmp"


def remove_leftovers(run: Path, name: str) -> None:
    """Remove what an interrupted writer left under names that begin like this."""
    folder, start = _asides(run, name)
    leftovers: list[Path | RemotePath] = list(folder.glob(f"{start}*.tmp"))
    if is_remote(run):  # of stores where an upload is renamed
        leftovers += run.glob(f"{start}*.tmp")
    for leftover in leftovers:
        if isinstance(leftover, Path) and leftover.is_dir():
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
        Its place, two folders below RUN.
    replace : bool
        Whether the place may be taken.

    Raises
    ------
    DumpError
        The place is taken, or the file aside is gone: another writer is at work there.
    """
    if is_remote(target):
        _upload(aside, target, replace)
        return
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


def _asides(run: Path, name: str) -> tuple[Path, str]:
    """The folder of the files aside, and how their names begin."""
    if not is_remote(run):
        return run, f"_writing.{name}"
    whose = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()), f"_writing.{whose}.{name}"


def _upload(aside: Path, target: RemotePath, replace: bool) -> None:
    """Put a complete file into its place behind a URL, and remove it here."""
    run = target.parent.parent.parent
    try:
        beside = run / f"_writing.{aside.name.removeprefix('_writing.')}"
        target.upload(aside, beside=beside, replace=replace)
    except FileExistsError as error:
        raise DumpError(
            str(target), "exists already: another writer has put it there meanwhile"
        ) from error
    aside.unlink(missing_ok=True)


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
