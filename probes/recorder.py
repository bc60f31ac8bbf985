"""From the probe's rows to the files of a dump."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, get_args

from deltad.dumps import BackgroundWriter, DumpWriter, Metadata

from .microbatch import Rows
from .sharded.part import Part

OnError = Literal["raise", "stop-recording"]
"""What follows where RUN cannot be written."""


class Recorder:
    """Writes what `UpdateProbe` reads: a writer for each arm, opened on first use.

    Call it with an arm and its columns, or give it to a probe as `record`. As a context manager
    it completes its files at the end of the block; after an exception nothing half-written
    stays.

    Parameters
    ----------
    run : str or Path
        RUN, the dump's folder.
    seed : int
        Independent repetition.
    metadata_for : callable
        Gives the metadata of an arm, when its first rows come; by then
        `UpdateProbe.readout_metadata` is complete.
    rank, ranks : int, optional
        Of this process among those that write, and their number. By default what the probe that
        records says of its model, else the rank and size of torch.distributed's default group;
        without one the only rank, 0.
    background : bool
        Check, encode and write in a thread of each arm (`deltad.dumps.BackgroundWriter`): an error
        in rows then comes up in the next call, or at the end.
    on_error : {"raise", "stop-recording"}
        Where the disk is full, say: let training stop with the error, or warn once and go on
        without recording. In either case complete files stay, nothing half-written does, and a
        note in RUN says that the recording is not finished. Rows that break the contract are
        raised always.
    **options
        For the writers: `rows_per_group`, `rows_per_part`, `existing`, `discard_on_error`,
        `queue_bytes` …

    Attributes
    ----------
    stopped : str or None
        Why recording stopped, with `on_error="stop-recording"`.

    Raises
    ------
    ValueError
        `on_error` is none of these.

    Notes
    -----
    `discard_on_error` is True unless given: a seed that failed half-way is not a seed.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        seed: int,
        metadata_for: Callable[[str], Metadata],
        rank: int | None = None,
        ranks: int | None = None,
        background: bool = True,
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        if on_error not in get_args(OnError):
            raise ValueError(
                f"`on_error` must be one of {', '.join(get_args(OnError))}, got {on_error!r}"
            )
        self.writers: dict[str, DumpWriter | BackgroundWriter] = {}
        self.stopped: str | None = None
        self._kind: Final = BackgroundWriter if background else DumpWriter
        self._on_error = on_error
        self._run = run
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._part: Part | None = None
        self._stored: Mapping[str, Any] = {"rule": "all"}
        self._sampling: Mapping[str, Any] | None = None
        self._metadata_for = metadata_for
        self._options: dict[str, Any] = {"discard_on_error": True, **options}

    def settle(self, part: Part) -> None:
        """Take the place that the probe found for this process, where none was given."""
        self._part = part

    def select(self, stored: Mapping[str, Any], sampling: Mapping[str, Any] | None) -> None:
        """Take what the probe keeps: `stored` and `sampling` of metadata that do not say so."""
        self._stored, self._sampling = stored, sampling

    def __call__(self, arm: str, rows: Rows) -> None:
        """Append the rows of one micro-batch."""
        self._do(lambda: self.writer(arm).append(rows))

    def skip(self, arm: str, rows: int, *, outside: int = 0) -> None:
        """Count rows of a micro-batch that were looked at and not kept; see `DumpWriter.skip`."""
        self._do(lambda: self.writer(arm).skip(rows, outside=outside))

    def writer(self, arm: str) -> DumpWriter | BackgroundWriter:
        """Open the writer of an arm, or get it; also for an arm of which no row may come."""
        if arm not in self.writers:
            metadata = self._metadata_for(arm)
            rank, ranks = self._place()
            if ranks is not None and metadata.ranks is None:
                metadata = dataclasses.replace(metadata, ranks=ranks)
            if metadata.stored["rule"] == "all":
                metadata = dataclasses.replace(metadata, stored=self._stored)
            if metadata.sampling is None:
                metadata = dataclasses.replace(metadata, sampling=self._sampling)
            self.writers[arm] = self._kind(
                self._run,
                arm=arm,
                seed=self._seed,
                metadata=metadata,
                rank=rank,
                **self._options,
            )
        return self.writers[arm]

    def _do(self, act: Callable[[], None]) -> None:
        """Do something with a writer, and what was chosen where the file system refuses."""
        if self.stopped is not None:
            return
        try:
            act()
        except OSError as error:
            if self._on_error == "raise":
                raise
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        """Warn, and record no more: arms that go on alone could not be compared."""
        self.stopped = str(error)
        for writer in self.writers.values():
            try:
                writer.abort(unfinished=True)
            except OSError as further:
                self.stopped += f"; {further}"
        warnings.warn(
            f"{self.stopped}; training goes on without recording", RuntimeWarning, stacklevel=4
        )

    def _place(self) -> tuple[int, int | None]:
        """Rank of this process, and the number of ranks where it is known."""
        if self._rank is not None:
            return self._rank, self._ranks
        part = self._part or Part.of_process()
        return (0, self._ranks) if part is None else (part.rank, part.ranks)

    def close(self) -> None:
        """Complete all files."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.stopped is not None:
            return
        failure: Exception | None = None
        for writer in self.writers.values():
            try:
                # Once one file could not be completed, the others must not stand alone.
                if failure is None:
                    writer.__exit__(kind, error, trace)
                else:
                    writer.abort(unfinished=True)
            except Exception as problem:
                failure = problem
        if isinstance(failure, OSError) and self._on_error == "stop-recording":
            self._stop(failure)
        elif failure is not None:
            raise failure
