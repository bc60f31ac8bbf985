"""Reading a remote Parquet file by byte ranges: those of the wanted columns, and no others."""

from __future__ import annotations

import bisect
import io
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .remote import RemotePath

Range = tuple[int, int]
"""First byte, and the one after the last."""

GAP: Final = 1 << 16
"""Unwanted bytes that are fetched along rather than asking twice; a request costs more."""


def row_group_ranges(
    metadata: Any, columns: Collection[str], groups: Iterable[int] | None = None
) -> list[list[Range]]:
    """Where the wanted columns lie in a Parquet file.

    Parameters
    ----------
    metadata : pyarrow.parquet.FileMetaData
        Of its footer.
    columns : collection of str
        Names of whole columns, lists too.
    groups : iterable of int, optional
        Row groups; by default all.

    Returns
    -------
    list of list of (int, int)
        For each row group ascending ranges, those joined that lie at most `GAP` apart.
    """
    found = []
    for number in range(metadata.num_row_groups) if groups is None else groups:
        group = metadata.row_group(number)
        ranges = []
        for place in range(group.num_columns):
            chunk = group.column(place)
            if chunk.path_in_schema.partition(".")[0] in columns:
                start = chunk.data_page_offset
                if chunk.dictionary_page_offset:
                    start = min(start, chunk.dictionary_page_offset)
                ranges.append((start, start + chunk.total_compressed_size))
        found.append(joined(ranges))
    return found


def joined(ranges: Sequence[Range], gap: int = GAP) -> list[Range]:
    """Ascending ranges, those joined that lie at most `gap` apart."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


class RangeFile(io.RawIOBase):
    """A remote file, read by ranges.

    What `plan` names is fetched group by group, the next one while the last is used, and let go
    when the one after the next is asked for; any other read is a request for just its bytes.

    Parameters
    ----------
    path : RemotePath
        A file; its size is asked for unless a listing has told it.
    """

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path = path
        self._size = path.stat().st_size
        self._at = 0
        self._groups: list[list[Range]] = []
        self._order: list[tuple[int, int]] = []  # first byte of a range, its group
        self._coming: dict[int, Future[list[bytes]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def plan(self, groups: Sequence[Sequence[Range]]) -> None:
        """Say what will be read, in this order."""
        self._groups = [list(group) for group in groups]
        self._order = sorted(
            (start, number) for number, group in enumerate(self._groups) for start, _ in group
        )

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, from the start, from here or from the end."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Up to so many bytes; all that follow with -1."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        start, self._at = self._at, max(self._at, stop)
        if stop <= start:
            return b""
        return self._planned(start, stop) or self._path.fetch([(start, stop)])[0]

    def readall(self) -> bytes:
        """All bytes from here on."""
        return self.read(-1)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there are bytes."""
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Let go of what was fetched, and wait for what is under way."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self._coming.clear()
        super().close()

    def _planned(self, start: int, stop: int) -> bytes:
        """Bytes within a range of the plan; none where they lie in no one range."""
        place = bisect.bisect_right(self._order, (start, len(self._groups))) - 1
        if place < 0:
            return b""
        number = self._order[place][1]
        group = self._groups[number]
        inner = bisect.bisect_right(group, start, key=lambda each: each[0]) - 1
        first, last = group[inner]
        if stop > last:
            return b""
        fetched = self._fetched(number)[inner]
        return fetched if (start, stop) == (first, last) else fetched[start - first : stop - first]

    def _fetched(self, number: int) -> list[bytes]:
        """Ranges of one group; the next is sent for."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltad-ranges")
        for each in (number, number + 1):
            if each not in self._coming and each < len(self._groups):
                self._coming[each] = self._pool.submit(self._path.fetch, self._groups[each])
        for each in [each for each in self._coming if each < number - 1]:
            del self._coming[each]
        return self._coming[number].result()
