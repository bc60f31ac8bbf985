"""What is wrong with a dump, said in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from deltad._checks import printable

# What pyarrow raises for a damaged file, depending on where the damage is.
DAMAGE: Final = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a dump.

    Attributes
    ----------
    path : str
        The file or folder.
    message : str
        What was expected and what was found there.
    row : int, optional
        Row within the file, counted from 0.
    column : str, optional
        Name of the column.
    kind : str
        Short name of the rule that is broken, the same for every value that breaks it.
    count : int
        1, and as many more as there are rows that break the same rule in the same column of
        the same file and are not listed one by one.
    """

    path: str
    message: str
    row: int | None = None
    column: str | None = None
    kind: str = "file"
    count: int = 1

    def __str__(self) -> str:
        """One line: where, then what."""
        where = self.path
        if self.row is not None:
            where += f", row {self.row}"
        if self.column is not None:
            where += f", column `{self.column}`"
        more = f" (and {self.count - 1} more such rows)" if self.count > 1 else ""
        return printable(f"{where}: {self.message}{more}")


class DumpError(ValueError):
    """A dump breaks the contract; the message is one sentence that names the file.

    Attributes
    ----------
    problem : Problem
        File, row and column, and what was expected and found.
    """

    def __init__(
        self,
        path: str | Path,
        message: str,
        *,
        row: int | None = None,
        column: str | None = None,
        kind: str = "file",
    ) -> None:
        self.problem = Problem(str(path), message, row, column, kind)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what the constructor takes, so that worker processes can raise it."""
        return _rebuild, (self.problem,)


def _rebuild(problem: Problem) -> DumpError:
    """Make the error of a pickled problem."""
    return DumpError(
        problem.path, problem.message, row=problem.row, column=problem.column, kind=problem.kind
    )


def first_line(error: BaseException) -> str:
    """Shorten the words of a library's error to one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def unreadable(path: str | Path, error: BaseException) -> DumpError:
    """Say that a file is damaged, or out of reach."""
    return DumpError(path, f"cannot be read as Parquet ({first_line(error)})", kind="unreadable")
