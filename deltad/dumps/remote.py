"""A place behind a URL: what dumps need of pathlib, over fsspec.

Listings are always asked for anew, since files come while one looks. Whatever goes wrong on the
way becomes one sentence that names the URL: `FileNotFoundError` where there is nothing,
`StorageError` for all else.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from .storage import StorageError
from .stores import REFUSES, WHOLE, filesystem_of, protocols, reaching


class Stat(NamedTuple):
    """Size in bytes and time of the last change in nanoseconds, 0 where the store tells none."""

    st_size: int
    st_mtime_ns: int


class RemotePath:
    """A file or folder behind a URL.

    Made by `deltad.dumps.storage.place`. Compares, sorts and pickles by its URL.

    Parameters
    ----------
    url : str
        As people write it.
    fs : fsspec filesystem
        What reaches it.
    path : str
        Its name there.
    options : mapping
        Storage options that `fs` was made with.
    found : mapping, optional
        What a listing has just told of it, so that it need not be asked for again.
    """

    is_remote: Final = True

    def __init__(
        self,
        url: str,
        fs: Any,
        path: str,
        options: Mapping[str, Any],
        found: Mapping[str, Any] | None = None,
    ) -> None:
        self.fs = fs
        self.path = path
        self._url, self._options, self._found = url, dict(options), found

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any] | None = None) -> RemotePath:
        """Find the filesystem of a URL, contacting nobody.

        Raises
        ------
        StorageError
            fsspec, or the package that it needs, is missing, or no one knows the protocol.
        """
        fs, path = filesystem_of(url, options or {})
        return cls(url.rstrip("/"), fs, path.rstrip("/"), options or {})

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __reduce__(self) -> tuple[object, ...]:
        return RemotePath.of, (self._url, self._options)

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return self._child(str(name))

    def _child(self, name: str, found: Mapping[str, Any] | None = None) -> RemotePath:
        """What lies under this; `name` may have several parts."""
        return RemotePath(
            f"{self._url}/{name}", self.fs, f"{self.path}/{name}", self._options, found
        )

    @property
    def name(self) -> str:
        """Last part of the name."""
        return self._url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """Name without its ending."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """Ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder that it lies in."""
        return RemotePath(
            self._url.rpartition("/")[0], self.fs, self.path.rpartition("/")[0], self._options
        )

    @property
    def appears_whole(self) -> bool:
        """Whether an upload under the final name is never seen half-way."""
        return any(each in WHOLE for each in protocols(self.fs))

    def as_posix(self) -> str:
        """The URL."""
        return self._url

    def resolve(self) -> RemotePath:
        """Itself: there are no links."""
        return self

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        """The rest of the name under a folder.

        Raises
        ------
        ValueError
            It does not lie there.
        """
        start = f"{other}/"
        if not self._url.startswith(start):
            raise ValueError(f"{self} does not lie in {other}")
        return PurePosixPath(self._url.removeprefix(start))

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Whether there is a folder."""
        found = self._info()
        return found is not None and found["type"] == "directory"

    def is_file(self) -> bool:
        """Whether there is a file."""
        found = self._info()
        return found is not None and found["type"] != "directory"

    def stat(self) -> Stat:
        """Size and time of a file.

        Raises
        ------
        FileNotFoundError
            There is none.
        """
        found = self._info()
        if found is None:
            raise FileNotFoundError(f"{self} does not exist")
        changed = next((found[key] for key in ("LastModified", "mtime") if found.get(key)), 0)
        seconds = changed.timestamp() if isinstance(changed, datetime) else changed
        try:
            return Stat(int(found["size"] or 0), int(float(seconds) * 1e9))
        except (TypeError, ValueError):  # a time in some form of the store's own
            return Stat(int(found["size"] or 0), 0)

    def iterdir(self) -> Iterator[RemotePath]:
        """Files and folders in a folder, which know what they are.

        Raises
        ------
        FileNotFoundError, NotADirectoryError
            There is no folder.
        """
        with reaching(self._url):
            self.fs.invalidate_cache(self.path)
            listed = self.fs.ls(self.path, detail=True)
        for found in listed:
            inner = str(found["name"]).rstrip("/")
            if inner == self.path:
                if found["type"] != "directory":
                    raise NotADirectoryError(f"{self} is a file")
                continue  # a marker, which stands for the folder itself
            yield self._child(inner.rpartition("/")[2], found)

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Files and folders under it by a pattern whose parts are separated by slashes."""
        first, _, rest = pattern.partition("/")
        try:
            entries = [entry for entry in self.iterdir() if fnmatchcase(entry.name, first)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if not rest:
                yield entry
            elif entry.is_dir():
                yield from entry.glob(rest)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open a file for reading bytes.

        Raises
        ------
        ValueError
            Another mode.
        FileNotFoundError
            There is no file.
        """
        if mode != "rb":
            raise ValueError(f"files behind a URL are opened with mode 'rb', got {mode!r}")
        from .ranges import RangeFile

        return io.BufferedReader(RangeFile(self))

    def read_bytes(self) -> bytes:
        """All bytes of a file."""
        with reaching(self._url):
            return bytes(self.fs.cat_file(self.path))

    def read_text(self, encoding: str = "utf-8") -> str:
        """All text of a file."""
        return self.read_bytes().decode(encoding)

    def fetch(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Bytes of some ranges of a file, asked for at the same time where the store can."""
        names = [self.path] * len(ranges)
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        with reaching(self._url):
            found = self.fs.cat_ranges(names, starts, stops, on_error="raise")
        for each, (start, stop) in zip(found, ranges, strict=True):
            if len(each) != stop - start:
                raise StorageError(
                    f"{self} gave {len(each)} bytes where {stop - start} were asked for: it was "
                    "written anew meanwhile"
                )
        return list(found)

    def write_bytes(self, content: bytes) -> None:
        """Write a small file; folders are made where the store has any."""
        with reaching(self._url):
            self._make_folder(self.parent.path)
            self.fs.pipe_file(self.path, content)

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make sure that files can be written here, before hours are spent on them.

        An object store has no folders: an empty object is written and removed instead.

        Raises
        ------
        FileNotFoundError, StorageError
            There is no such bucket, no permission, or no way there.
        """
        import secrets

        probe = self / f"_writing.probe.{secrets.token_hex(8)}.tmp"
        with reaching(self._url):
            self._make_folder(self.path)
            self.fs.pipe_file(probe.path, b"")
        with contextlib.suppress(Exception):  # who may not delete may still write
            self.fs.rm_file(probe.path)

    def upload(self, local: Path, *, beside: RemotePath, replace: bool) -> None:
        """Put a local file's content here, so that it appears whole or not at all.

        Where the store shows an upload half-way it is made `beside`, then renamed.

        Raises
        ------
        FileExistsError
            There is a file, and `replace` is False.
        """
        if not replace and self.exists():
            raise FileExistsError(f"{self} exists already")
        with reaching(self._url):
            if not self.appears_whole:
                self._put_and_rename(local, beside.path, replace)
            elif replace or not self._refuses:
                self.fs.put_file(str(local), self.path)
            else:
                self._put_where_nothing_is(local)
            self.fs.invalidate_cache(self.path)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            with reaching(self._url):
                self.fs.invalidate_cache(self.path)
                self.fs.rm_file(self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Remove an empty folder, where the store has folders."""
        if not self.appears_whole:
            with reaching(self._url):
                self.fs.rmdir(self.path)

    def remove_tree(self) -> None:
        """Remove a folder and all that lies in it, if it is there."""
        with reaching(self._url), contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache(self.path)
            self.fs.rm(self.path, recursive=True)

    @property
    def _refuses(self) -> bool:
        """Whether the store itself can refuse to overwrite, which no other writer can outrun."""
        return any(each in REFUSES for each in protocols(self.fs))

    def _info(self) -> Mapping[str, Any] | None:
        """What the store tells of it; None where there is nothing."""
        if self._found is not None:
            return self._found
        try:
            with reaching(self._url):
                self.fs.invalidate_cache(self.path)
                found: Mapping[str, Any] = self.fs.info(self.path)
                return found
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _make_folder(self, path: str) -> None:
        """Make a folder, where the store has folders; a bucket is never made."""
        if not self.appears_whole:
            self.fs.makedirs(path, exist_ok=True)

    def _put_where_nothing_is(self, local: Path) -> None:
        """Upload on the condition that no other writer was first, where the store knows of it."""
        try:
            self.fs.put_file(str(local), self.path, mode="create")
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            self.fs.put_file(str(local), self.path)

    def _put_and_rename(self, local: Path, aside: str, replace: bool) -> None:
        """Upload under another name, then rename."""
        try:
            self.fs.put_file(str(local), aside)
            self._make_folder(self.parent.path)
            if replace and self.fs.exists(self.path):
                self.fs.rm_file(self.path)
            self.fs.mv(aside, self.path)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.fs.rm_file(aside)
            raise
