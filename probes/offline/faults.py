"""What is wrong with files of scores, place by place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltad._checks import printable
from deltad.probes.errors import ProbeError

LISTED: Final = 20
"""Faults that are listed one by one; the others are counted."""


@dataclass(frozen=True)
class Origin:
    """Where a record came from.

    Attributes
    ----------
    path : Path
        The file.
    number : int
        Its line or entry, counted from 1, or its row, counted from 0.
    unit : {"line", "entry", "row"}
        Which of them.
    """

    path: Path
    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


@dataclass(frozen=True)
class Fault:
    """One thing that cannot be taken into a dump.

    Attributes
    ----------
    origin : Origin or Path
        The record, or a file as a whole.
    message : str
        What must hold, what came, and what to do where that is not plain.
    sequence : int or str, optional
        The response.
    position : int, optional
        Token within it.
    field : str, optional
        Name in the record.
    """

    origin: Origin | Path
    message: str
    sequence: int | str | None = None
    position: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        """One line: where, then what."""
        where = str(self.origin)
        if self.sequence is not None:
            where += f", sequence {self.sequence}"
        if self.position is not None:
            where += f", position {self.position}"
        if self.field is not None:
            where += f", field `{self.field}`"
        return printable(f"{where}: {self.message}")


class OfflineError(ProbeError):
    """Files that make no dump; nothing was written.

    Attributes
    ----------
    faults : tuple of Fault
        What is wrong, at most `LISTED` of it; empty where one sentence says it all.
    """

    def __init__(self, message: str, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what the constructor takes."""
        return type(self), (str(self), self.faults)


class BadValueError(ValueError):
    """A value of a record that is none; becomes a `Fault` where the record is known.

    Attributes
    ----------
    index : int or None
        Entry of the list, which is a token unless the record says otherwise.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class Faults:
    """Faults as they are found: the first few are kept, all are counted.

    Attributes
    ----------
    found : list of Fault
        At most `LISTED`.
    count : int
        All.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []
        self.count = 0

    def add(self, fault: Fault) -> None:
        """Note one."""
        self.count += 1
        if len(self.found) < LISTED:
            self.found.append(fault)

    def check(self) -> None:
        """Raise what was found, if anything was.

        Raises
        ------
        OfflineError
            With the faults; its words are the first one and the number of the others.
        """
        if not self.count:
            return
        more = f" (and {self.count - 1} more faults)" if self.count > 1 else ""
        raise OfflineError(f"{self.found[0]}{more}", tuple(self.found))
