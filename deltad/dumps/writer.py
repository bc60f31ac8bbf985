"""Writing a dump: rows are buffered, checked and flushed; a file appears whole or not at all."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deltad._checks import is_integer

from .aside import aside_path, publish, remove_leftovers
from .batch import to_arrow
from .columns import OPTIONAL, READINGS, schema
from .content import Content, Vectors
from .errors import DumpError
from .incoming import incoming
from .layout import check_arm, check_seed, part_path
from .metadata import METADATA_KEY, Metadata
from .parquet import parquet_writer
from .storage import place
from .unfinished import (
    END_NOTE_KEY,
    Unfinished,
    drop_parts,
    leave_end_note,
    next_part,
    part_numbers,
)
from .values import check_batch

Existing = Literal["refuse", "replace", "append"]
"""What a writer does where files of its arm, seed and rank are there already."""

ROWS_PER_GROUP: Final = 32_768
"""Rows a row group: below 16 thousand reading slows down, above 64 nothing is gained."""

ROWS_PER_PART: Final = 1_000_000
"""Rows a file, at most."""


class DumpWriter:
    """Writes one arm of one seed, a file or more, never holding more than a row group.

    A file is written under `RUN/_writing…` and renamed into its place when it is complete, so
    that neither a reader nor a crash ever leaves half a file there. What an interrupted writer
    left is removed by the next writer of the same arm, seed and rank. From its opening to its
    closing a note in RUN says that its recording is not finished; when it closes, an end note next
    to its files says how many there are (`deltad.dumps.unfinished`).
    Where RUN is a URL, a file is written in the folder for temporary files and uploaded when it
    is complete. As a context manager it closes at the end of the block.

    Parameters
    ----------
    run : str or Path
        RUN, a folder or a URL, made if need be.
    arm : str
        Name of the update that was applied.
    seed : int
        Independent repetition.
    metadata : Metadata
        `rows_seen` is counted here and `created` filled in if it is empty.
    rank : int
        Of the process that writes; ranks are numbered from 0 without gaps.
    rows_per_group, rows_per_part : int
        Rows a row group and rows a file, at most.
    discard_on_error : bool
        After an exception in the block, discard the file that is being written instead of
        completing it with the rows of all `append` calls that returned. A file in the middle of
        a row group is discarded in any case, and one of no rows too.
    existing : {"refuse", "replace", "append"}
        What to do where this rank's files exist: refuse, remove them, or number on.
    readings : collection of {"pre", "post"}
        Readings of the policy that were made: without "post" there is no ΔD, and without "pre"
        (which "post" needs) no D either; their columns are then not in the files.
    derived : bool
        Fill the derived columns (see `deltad.dumps.derived`) of what is stored. Their divergence
        is that of `vectors`, else of the metadata's `stored` or `update`, else KL. Without "pre"
        there are none.
    vectors : "all" or Near
        Which rows keep their vectors; with `Near` the others' are NULL in the file.

    Attributes
    ----------
    paths : list of Path
        Files that are complete.
    rows_seen, rows_stored : int
        Rows appended or skipped, and rows kept of them, over all files.

    Raises
    ------
    ValueError
        The arm's name or a number is not possible, "post" is given without "pre", or vectors
        are to be left out that derived columns do not replace.
    DumpError
        This rank's files exist.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        arm: str,
        seed: int,
        metadata: Metadata,
        rank: int = 0,
        rows_per_group: int = ROWS_PER_GROUP,
        rows_per_part: int = ROWS_PER_PART,
        discard_on_error: bool = False,
        existing: Existing = "refuse",
        readings: Collection[str] = tuple(READINGS),
        derived: bool = True,
        vectors: Vectors = "all",
    ) -> None:
        check_arm(arm)
        check_seed(seed)
        for name, value, least in (
            ("rank", rank, 0),
            ("rows_per_group", rows_per_group, 1),
            ("rows_per_part", rows_per_part, 1),
        ):
            if not is_integer(value) or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")
        if existing not in get_args(Existing):
            raise ValueError(
                f"`existing` must be one of {', '.join(get_args(Existing))}, got {existing!r}"
            )
        if tuple(readings) not in ((), ("pre",), ("pre", "post")):
            raise ValueError(
                f"`readings` must be of pre, post, and post not without pre; got {readings!r}"
            )
        if not readings and metadata.stored_above is not None:
            raise ValueError("rows above a D cannot be chosen where the reading 'pre' is missing")
        self._readings = tuple(readings)
        if metadata.ranks is not None and rank >= metadata.ranks:
            raise ValueError(
                f"`rank` must be below the metadata's `ranks`, got {rank} of {metadata.ranks}"
            )
        self._content = Content(
            metadata, seed=int(seed), readings=self._readings, derived=derived, vectors=vectors
        )
        metadata = self._content.metadata
        metadata.to_json()  # fails now rather than after hours of recording
        self.paths: list[Path] = []
        self.rows_seen = 0
        self.rows_stored = 0
        self._run, self._arm, self._seed, self._rank = place(run), arm, int(seed), rank
        self._metadata = metadata
        self._rows_per_group, self._rows_per_part = rows_per_group, rows_per_part
        self._discard_on_error = discard_on_error
        self._schema: pa.Schema | None = None
        self._appended = 0
        self._pending: list[tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]] = []
        self._pending_rows = 0
        self._dropped = 0  # rows seen and not stored since the last complete file
        self._sink: pq.ParquetWriter | None = None
        self._aside: Path | None = None
        self._part_rows = 0
        self._flushing = False
        self._closed = False
        self._run.mkdir(parents=True, exist_ok=True)
        self._aside_name = f"arm={arm}.seed={self._seed}.part-{rank}-"
        remove_leftovers(self._run, self._aside_name)
        self._note = Unfinished(self._run, arm, self._seed, rank)
        self._noted = b""
        self._part = self._first_part(existing)

    def append(
        self,
        columns: Mapping[str, NDArray[Any]],
        *,
        vectors_stored: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take any number of rows.

        Parameters
        ----------
        columns : mapping of str to array
            Every required column and the same optional ones in each call; shape (token,), for
            vectors (token, topk). Floats of 32 or 64 bits are stored as declared; integers of
            any size must fit. What lies at padding is not read.
        vectors_stored : array of bool, shape (token,), optional
            False where the vectors are stored as NULL. Whoever needs it gives it in every call;
            not where `vectors` of the writer says it.

        Raises
        ------
        DumpError
            Columns missing, unknown or of a wrong type or shape, or values that the contract
            does not allow; no row of the call is taken then.
        ValueError
            The writer is closed, or has failed.
        """
        self._must_be_open()
        if vectors_stored is not None and self._content.near is not None:
            raise ValueError("`vectors_stored` is found by the writer that was given `vectors`")
        label = f"{self._target()} (append {self._appended}, not yet written)"
        batch = incoming(
            columns,
            vectors_stored,
            top_k=self._metadata.top_k,
            label=label,
            readings=self._readings,
        )
        taken, vectors = batch.columns, batch.vectors
        names = frozenset((*taken, *self._content.added(batch))) & frozenset(OPTIONAL)
        layout = self._schema
        if layout is None:
            layout = schema(
                self._metadata.top_k,
                vectors_nullable=vectors_stored is not None or self._content.near is not None,
                optional=names,
                readings=self._readings,
            )
        elif names != frozenset(layout.names) & frozenset(OPTIONAL):
            raise DumpError(
                label,
                "every append must give the same optional columns, got "
                f"{', '.join(sorted(names)) or 'none'}",
            )
        if not vectors.all() and not layout.field("topk_ids").nullable:
            raise DumpError(label, "`vectors_stored` must be given from the first append on")
        check_batch(batch, self._metadata)
        chosen = self._content.choose(batch)
        kept = {name: each if chosen is None else each[chosen] for name, each in taken.items()}
        kept_vectors = vectors if chosen is None else vectors[chosen]
        self._schema = layout
        self._appended += 1
        self.rows_seen += len(vectors)
        self._dropped += len(vectors) - len(kept_vectors)
        self.rows_stored += len(kept_vectors)
        self._pending_rows += len(kept_vectors)
        self._pending.append((kept, kept_vectors))
        if self._pending_rows >= self._rows_per_group:
            self._flush(whole_groups=True)

    def skip(self, rows: int, *, outside: int = 0) -> None:
        """Count rows that were looked at and need not be handed over, the rule leaving them out.

        Parameters
        ----------
        rows : int
            How many.
        outside : int
            How many of them lie outside the region of the rule "disagreement".

        Raises
        ------
        ValueError
            A number is negative, no integer or too large, all rows are to be stored, or the
            writer is closed.
        """
        self._must_be_open()
        stored = self._metadata.stored
        if not is_integer(rows) or rows < 0 or self._metadata.stored_above is None:
            raise ValueError(
                "rows can be skipped where `stored` has the rule 'above' or 'disagreement', and "
                f"at least 0 of them; got {rows} under {stored['rule']!r}"
            )
        most = rows if stored["rule"] == "disagreement" else 0
        if not is_integer(outside) or not 0 <= outside <= most:
            raise ValueError(
                f"`outside` must be an integer in [0, {most}] of {rows} rows skipped under "
                f"{stored['rule']!r}, got {outside!r}"
            )
        self.rows_seen += int(rows)
        self._dropped += int(rows)
        self._content.outside += int(outside)

    def close(self) -> None:
        """Complete the file, of no rows if nothing was stored; further calls do nothing.

        Raises
        ------
        DumpError
            Another writer has taken the file's place, or removed what this one wrote.
        OSError
            The file system refuses; nothing is left in the file's place then.
        """
        if self._closed:
            return
        if self._flushing:
            self.abort(unfinished=True)
            raise DumpError(self._target(), "was not completed: writing it failed before")
        try:
            self._flush(whole_groups=False)
            if self._sink is not None or self._dropped or not self.paths:
                self._commit()
        except BaseException:
            self.abort(unfinished=True)
            raise
        leave_end_note(self._target().parent, self._rank, self._part)
        self._note.take(self._noted)
        self.abort()

    def abort(self, *, unfinished: bool = False) -> None:
        """Discard the file that is being written; complete ones stay. Further calls do nothing.

        Parameters
        ----------
        unfinished : bool
            Let RUN say that the recording is not finished, even where no file of it is complete.
        """
        if not self._closed and not self.paths and not unfinished:
            self._note.take(self._noted)
        self._closed = True
        self._pending.clear()
        sink, self._sink = self._sink, None
        aside, self._aside = self._aside, None
        if sink is not None:
            with contextlib.suppress(pa.ArrowException, OSError):  # it is thrown away
                sink.close()
        if aside is not None:
            aside.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        nothing = self._sink is None and not self._pending_rows and not self._dropped
        if kind is not None and (self._discard_on_error or self._flushing or nothing):
            self.abort(unfinished=self._flushing)
        else:
            self.close()

    @property
    def failed(self) -> bool:
        """Whether writing failed in the middle of a row group, so that nothing can follow."""
        return self._flushing

    def _must_be_open(self) -> None:
        """Refuse use after the end, and after a row group of which a part may be written."""
        if self._closed:
            raise ValueError(f"the writer of {self._target()} is closed")
        if self._flushing:
            raise ValueError(f"writing {self._target()} failed before, so it cannot go on")

    def _target(self) -> Path:
        """Where the file that is being written will lie."""
        return part_path(self._run, self._arm, self._seed, self._rank, self._part)

    def _first_part(self, existing: str) -> int:
        """Number of the first file, after what exists was dealt with."""
        folder = part_path(self._run, self._arm, self._seed, self._rank, 0).parent
        found = part_numbers(self._run, arm=self._arm, seed=self._seed, rank=self._rank)
        if found and existing == "refuse":
            raise DumpError(
                folder / f"part-{self._rank}-{found[0]}.parquet",
                "exists already; replace it, append to it, or choose another folder",
            )
        first = 0
        if existing == "append":
            first = next_part(self._run, arm=self._arm, seed=self._seed, rank=self._rank)
        self._noted = self._note.leave()
        if existing != "append":
            drop_parts(folder, self._rank)
        return first

    def _flush(self, *, whole_groups: bool) -> None:
        """Write pending rows as row groups; with `whole_groups` keep what does not fill one."""
        if not self._pending_rows:
            return
        columns = {
            name: np.concatenate([each[name] for each, _ in self._pending])
            for name in self._pending[0][0]
        }
        vectors = np.concatenate([each for _, each in self._pending])
        self._flushing = True
        start = 0
        while len(vectors) - start >= (self._rows_per_group if whole_groups else 1):
            count = min(
                self._rows_per_group, self._rows_per_part - self._part_rows, len(vectors) - start
            )
            rows = slice(start, start + count)
            self._write({name: each[rows] for name, each in columns.items()}, vectors[rows])
            start += count
        rest = slice(start, None)
        self._pending = [
            ({name: each[rest].copy() for name, each in columns.items()}, vectors[rest])
        ]
        self._pending_rows = len(vectors) - start
        self._flushing = False

    def _write(self, columns: dict[str, NDArray[Any]], vectors: NDArray[np.bool_]) -> None:
        """Write one row group, and complete the file where that fills it."""
        sink = self._open()
        columns, vectors = self._content.fill(columns, vectors)
        sink.write_table(to_arrow(columns, vectors, sink.schema), row_group_size=len(vectors))
        self._part_rows += len(vectors)
        if self._part_rows >= self._rows_per_part:
            self._commit()

    def _open(self) -> pq.ParquetWriter:
        """Begin a file aside, if there is none."""
        if self._sink is None:
            layout = self._schema or schema(self._metadata.top_k, readings=self._readings)
            self._aside = aside_path(self._run, f"{self._aside_name}{self._part}")
            self._sink = parquet_writer(self._aside, layout)
            self._part_rows = 0
        return self._sink

    def _commit(self) -> None:
        """Complete the file and put it into its place."""
        sink = self._open()
        aside, target = self._aside, self._target()
        if aside is None:
            raise DumpError(target, "was not begun")
        stored = self._metadata.stored
        if self._metadata.stored_pair is not None:
            stored = {**stored, "outside": self._part_rows + self._content.outside}
        metadata = dataclasses.replace(
            self._metadata,
            stored=stored,
            rows_seen=self._part_rows + self._dropped,
            created=self._metadata.created or datetime.now(UTC).isoformat(timespec="seconds"),
        )
        text = metadata.to_json()
        # Arrow's copy of the schema carries the metadata too, for whoever looks for it there.
        arrow = sink.schema.with_metadata({METADATA_KEY: text}).serialize().to_pybytes()
        sink.add_key_value_metadata(
            {
                METADATA_KEY.decode(): text,
                END_NOTE_KEY.decode(): "",
                "ARROW:schema": base64.b64encode(arrow).decode(),
            }
        )
        sink.close()
        publish(aside, target)
        self.paths.append(target)
        self._sink = self._aside = None
        self._part_rows = self._dropped = self._content.outside = 0
        self._part += 1
