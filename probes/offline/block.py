"""Rows of an import on their way into the dump, checked a block at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import DumpError, DumpWriter, Metadata
from deltad.dumps.batch import Batch
from deltad.dumps.consistency import applied
from deltad.dumps.finding import Finding
from deltad.dumps.footers import PartFile
from deltad.dumps.incoming import incoming
from deltad.dumps.validate import row_findings

from .assemble import Response
from .faults import LISTED, Faults

BLOCK: Final = 8192
"""Rows that are checked and written at once."""


class UpdateError(ValueError):
    """The metadata contradict the arm's name, or do not tell the mask that they name."""


class LookFirstError(Exception):
    """A token has no list, or a longer one, than the first response let expect."""


class Block:
    """Rows on their way into the writer, with where they came from."""

    def __init__(
        self,
        writer: DumpWriter,
        metadata: Metadata,
        readings: tuple[str, ...],
        nullable: bool,
        faults: Faults,
        arm: str,
    ) -> None:
        self.responses = self.without_lists = 0
        self._writer, self._metadata, self._readings = writer, metadata, readings
        self._nullable, self._faults, self._arm = nullable, faults, arm
        self._held: list[Response] = []
        self._rows = 0
        self._names: frozenset[str] | None = None

    def add(self, response: Response) -> None:
        """Take a response."""
        names = frozenset(response.columns)
        self._names = self._names or names
        if apart := sorted(names ^ self._names):
            lacks = "lacks" if apart[0] in self._names else "has"
            fault = response.record.fault(
                f"{lacks} it, unlike the responses before: all must have the same fields",
                name=apart[0],
            )
            self._faults.add(fault)
            return
        self._held.append(response)
        self._rows += len(response)
        if self._rows >= BLOCK:
            self.flush()

    def flush(self) -> None:
        """Check what is held, and write it while nothing is wrong."""
        held, self._held, self._rows = self._held, [], 0
        if not held:
            return
        columns = {
            name: np.concatenate([each.columns[name] for each in held]) for name in held[0].columns
        }
        vectors = np.concatenate([each.vectors for each in held])
        try:
            batch = incoming(
                columns, vectors, top_k=self._metadata.top_k, label="", readings=self._readings
            )
        except DumpError as error:
            # Of a block, not of a row: too large a number, half a surrogate pair.
            problem = error.problem
            for each in held:
                self._blame(each, problem.column, problem.message)
            return
        for finding in self._findings(batch):
            for row in finding.rows[: LISTED + 1].tolist():
                response, place = _at(held, row)
                record, name = response.sources.get(
                    finding.column, (response.record, finding.column)
                )
                position = int(response.columns["position"][place])
                self._faults.add(record.fault(finding.describe(row), position=position, name=name))
            self._faults.count += max(0, len(finding.rows) - LISTED - 1)
        if self._faults.count:
            return
        if not vectors.all() and not self._nullable:
            raise LookFirstError
        self._writer.append(columns, vectors_stored=vectors if self._nullable else None)
        self.responses += len(held)
        self.without_lists += int(np.count_nonzero(~vectors))

    def _findings(self, batch: Batch) -> list[Finding]:
        """What is wrong with rows; the first block tells whether the update's mask is known."""
        names = tuple(batch.columns)
        part = PartFile(Path(), self._arm, 0, 0, 0, len(batch), self._metadata, names)
        try:
            mask = applied(part)
        except ValueError as error:
            raise UpdateError(str(error)) from error
        return row_findings(part, batch, mask)

    def _blame(self, response: Response, column: str | None, message: str) -> None:
        """Make a fault of a column whose type or size is wrong, where it is this response's."""
        values = response.columns.get(column or "")
        kind = getattr(values, "dtype", None)
        if values is not None and kind is not None and kind.kind == "i":
            bad = np.flatnonzero((values < -(2**31)) | (values >= 2**31))
            if not len(bad):
                return
        record, name = response.sources.get(column or "", (response.record, column or ""))
        self._faults.add(record.fault(message, name=name))


def _at(held: list[Response], row: int) -> tuple[Response, int]:
    """The response that a row of a block is of, and the row within it."""
    ends: NDArray[np.intp] = np.cumsum([len(each) for each in held])
    index = int(np.searchsorted(ends, row, side="right"))
    return held[index], row - (int(ends[index - 1]) if index else 0)
