"""From the probe's rows to the files of a dump."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deltad.dumps import DumpWriter, Metadata

from .microbatch import Rows


class Recorder:
    """Writes what `UpdateProbe` reads: a `DumpWriter` for each arm, opened on first use.

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
    rank : int
        Of this process.
    **options
        For `DumpWriter`: `rows_per_group`, `rows_per_part`, `existing`, `discard_on_error`.

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
        rank: int = 0,
        **options: Any,
    ) -> None:
        self.writers: dict[str, DumpWriter] = {}
        self._run = run
        self._seed = seed
        self._rank = rank
        self._metadata_for = metadata_for
        self._options: dict[str, Any] = {"discard_on_error": True, **options}

    def __call__(self, arm: str, rows: Rows) -> None:
        """Append the rows of one micro-batch."""
        self.writer(arm).append(rows)

    def writer(self, arm: str) -> DumpWriter:
        """Open the writer of an arm, or get it; also for an arm of which no row may come."""
        if arm not in self.writers:
            self.writers[arm] = DumpWriter(
                self._run,
                arm=arm,
                seed=self._seed,
                metadata=self._metadata_for(arm),
                rank=self._rank,
                **self._options,
            )
        return self.writers[arm]

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
        failure: BaseException | None = None
        for writer in self.writers.values():
            try:
                # Once one file could not be completed, the others must not stand alone.
                if failure is None:
                    writer.__exit__(kind, error, trace)
                else:
                    writer.abort()
            except Exception as problem:
                failure = problem
        if failure is not None:
            raise failure
