"""Where dumps lie: folders, or places behind a URL. What differs between them is known here.

A folder stays a `pathlib.Path` and costs nothing more. A URL becomes a `RemotePath`, which has
the part of pathlib's interface that dumps need, and brings in fsspec; the code around it works
on either. Parquet files are read through `open_parquet`, which fetches only the byte ranges of
the wanted columns where the file is remote.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar, cast

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from .remote import RemotePath

Item = TypeVar("Item")
Found = TypeVar("Found")

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# What pathlib makes of a URL: it drops one of two slashes.
_MANGLED: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\][^/\\]")

_AT_ONCE: Final = 16
"""Folders or files of a remote dump that are asked for at the same time."""


class StorageError(OSError):
    """A place behind a URL is out of reach; the message is one sentence that names it."""


def place(run: str | os.PathLike[str] | RemotePath) -> Path:
    """A folder's path, or what stands for it behind a URL.

    Parameters
    ----------
    run : str or path
        A path, `file://` or any URL of fsspec: `s3://bucket/run`, `gs://…`, `memory://…`. A
        `UPath` of universal-pathlib is taken with its storage options. What this function
        returned is returned as it is.

    Returns
    -------
    Path
        For a URL a `RemotePath` instead, of which the same methods can be called.

    Raises
    ------
    StorageError
        The package that knows such URLs is not installed, there is none, or the URL went
        through `pathlib.Path`, which breaks it.
    """
    if isinstance(run, Path):
        if _MANGLED.match(str(run)) and not run.exists():
            raise StorageError(
                f"{str(run)!r} has one slash where a URL has two: a URL must be given as text, "
                "since `pathlib.Path` drops one"
            )
        return run
    if is_remote(run):
        return cast(Path, run)
    given: Any = run
    if hasattr(given, "storage_options"):
        from .remote import RemotePath

        return cast(Path, RemotePath.of(str(given), given.storage_options))
    text = os.fspath(given)
    if not _URL.match(text):
        return Path(text)
    if text.lower().startswith("file://"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        return Path(url2pathname(urlsplit(text).path))
    from .remote import RemotePath

    return cast(Path, RemotePath.of(text))


def is_remote(path: object) -> TypeGuard[RemotePath]:
    """Whether a place lies behind a URL."""
    return getattr(path, "is_remote", False) is True


def open_parquet(
    path: Path, columns: Iterable[str] | None = None, groups: Iterable[int] | None = None
) -> pq.ParquetFile:
    """Open a Parquet file for streaming.

    Parameters
    ----------
    path : Path
        Of a `place`.
    columns : iterable of str, optional
        What will be read. Of a remote file those byte ranges are fetched ahead, a row group at
        a time; without it each read is a request of its own.
    groups : iterable of int, optional
        Row groups that will be read, in their order; by default all.

    Returns
    -------
    ParquetFile
        To be closed; its pages' checksums are verified.

    Raises
    ------
    StorageError
        A remote file is out of reach.
    OSError
        It is no file.
    """
    import pyarrow.parquet as pq

    # With pre_buffer the whole file would stay in memory until its end.
    options: dict[str, Any] = {"page_checksum_verification": True, "pre_buffer": False}
    must_be_a_file(path)
    if not is_remote(path):
        return pq.ParquetFile(path, **options)
    from .ranges import RangeFile, row_group_ranges

    source = RangeFile(path)
    try:
        file = pq.ParquetFile(source, **options)
        if columns is not None:
            source.plan(row_group_ranges(file.metadata, set(columns), groups))
    except BaseException:
        source.close()
        raise
    return file


def must_be_a_file(path: Path) -> None:
    """Refuse a pipe, a device or a socket, whose opening could wait for ever.

    Raises
    ------
    OSError
        It is one of them.
    """
    if not is_remote(path) and path.exists() and not path.is_file():
        raise OSError(f"{path} must be a file")


def read_bytes(path: Path) -> bytes:
    """All bytes of a file; raises as `must_be_a_file`."""
    must_be_a_file(path)
    return path.read_bytes()


def in_order(
    function: Callable[[Item], Found], items: Iterable[Item], *, run: Path
) -> Iterator[Found]:
    """A function's results in the items' order; where RUN is remote, several are under way."""
    if not is_remote(run):
        yield from map(function, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(function, items)


def remove_tree(path: Path) -> None:
    """Remove a folder and all that lies in it, if it is there."""
    if is_remote(path):
        path.remove_tree()
    else:
        shutil.rmtree(path, ignore_errors=True)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder's files, folders in it too, between any two places; what is there gives way."""
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            copy_tree(entry, target / entry.name)
        else:
            target.mkdir(parents=True, exist_ok=True)
            (target / entry.name).write_bytes(entry.read_bytes())


def must_be_local(run: Path, what: str) -> None:
    """Refuse a URL where files are appended to, which object stores cannot do.

    Raises
    ------
    StorageError
        RUN lies behind a URL.
    """
    if is_remote(run):
        raise StorageError(
            f"{what} needs a folder, since it appends to files there, got {run}: give a folder "
            "and copy it when it is complete"
        )
