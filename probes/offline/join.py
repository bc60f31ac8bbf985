"""Finding a response's record in files whose order is their own, in bounded memory."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from .faults import Fault, Faults
from .files import Progress, ScoringFiles
from .records import Key, Record

IN_MEMORY: Final = 4096
"""Records that wait in memory for their turn; those beyond wait in a temporary file."""


class Waiting:
    """Records that were read before they were asked for.

    Parameters
    ----------
    in_memory : int
        Records held in memory; the others are written to a temporary file, of which only the
        places are remembered.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._records: dict[Key, Record] = {}
        self._places: dict[Key, int] = {}
        self._file: IO[bytes] | None = None

    def __contains__(self, key: Key) -> bool:
        """Whether such a record waits."""
        return key in self._records or key in self._places

    def add(self, record: Record) -> None:
        """Let a record wait."""
        if len(self._records) < self._in_memory:
            self._records[record.key] = record
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does it)
        self._places[record.key] = self._file.seek(0, 2)
        pickle.dump(record, self._file, protocol=5)

    def pop(self, key: Key) -> Record | None:
        """Take a record out; None where none of this key waits."""
        if key in self._places and self._file is not None:
            self._file.seek(self._places.pop(key))
            found: Record = pickle.load(self._file)  # what `add` has written
            return found
        return self._records.pop(key, None)

    def left(self) -> Iterator[Record]:
        """Take out all that still wait."""
        for key in [*self._records, *self._places]:
            record = self.pop(key)
            if record is not None:
                yield record

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()


class Joined:
    """The records of some files, asked for by response.

    Files in the order in which they are asked are read along with the asking; what comes too
    early waits. As a context manager it closes at the end of the block.

    Parameters
    ----------
    files : ScoringFiles
        What to read.
    label : str
        What the files are, for faults: "the file of scores before the step".
    faults : Faults
        Takes what is wrong.
    progress : callable, optional
        Told the number of bytes read.
    in_memory : int
        Records that may wait in memory.
    """

    def __init__(
        self,
        files: ScoringFiles,
        label: str,
        faults: Faults,
        progress: Progress | None = None,
        *,
        in_memory: int = IN_MEMORY,
    ) -> None:
        self._label, self._faults = label, faults
        self._names = ", ".join(map(str, shortened(files.paths)))
        self._stream = files.records(faults, progress)
        self._waiting = Waiting(in_memory)
        self._taken: set[Key] = set()

    def take(self, wanted: Record) -> Record | None:
        """Find the record of a response.

        Parameters
        ----------
        wanted : Record
            Of another file.

        Returns
        -------
        Record or None
            None where there is none, which becomes a fault of `wanted`.
        """
        key = wanted.key
        found = self._waiting.pop(key)
        while found is None:
            record = next(self._stream, None)
            if record is None:
                self._faults.add(
                    wanted.fault(f"must be in {self._label} ({self._names}) too, at step {key[0]}")
                )
                return None
            if record.key in self._taken or record.key in self._waiting:
                self._faults.add(record.fault(TWICE))
            elif record.key == key:
                found = record
            else:
                self._waiting.add(record)
        self._taken.add(key)
        return found

    def finish(self, *, complete: bool = True) -> None:
        """Make faults of the records that nobody asked for.

        Parameters
        ----------
        complete : bool
            Whether all responses could be read; otherwise these records may be theirs.
        """
        for record in self._stream:
            if record.key in self._taken or record.key in self._waiting:
                self._faults.add(record.fault(TWICE))
            else:
                self._waiting.add(record)
        for record in self._waiting.left() if complete else ():
            self._faults.add(
                Fault(
                    record.origin,
                    f"is in {self._label} and at step {record.step} not among the responses",
                    record.sequence,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waiting.close()


TWICE: Final = (
    "occurs already: a response must be unique within the step, and its tokens must stand together"
)
"""What is said of a response that comes again."""


def shortened(paths: list[Path]) -> list[str]:
    """Names of files, the first few."""
    return [*map(str, paths[:3]), *(["…"] if len(paths) > 3 else [])]
