"""The dump of a training that saves checkpoints, stops, and is resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from deltad.dumps import Metadata, part_numbers
from deltad.dumps.layout import part_path
from deltad.dumps.storage import is_remote, open_parquet, place
from deltad.dumps.unfinished import drop_parts
from deltad.dumps.writer import Existing
from deltad.probes.errors import ProbeError
from deltad.probes.recorder import Recorder
from deltad.probes.rows import Rows


class RunRecorder:
    """Writes one arm of one seed on one rank, a file for each stretch between checkpoints.

    A file is complete when a checkpoint is saved, when `train()` returns, and when it raises: all
    rows of complete steps are kept then. Who resumes from a checkpoint makes the steps after it
    once more; files of theirs are removed first, so that no step is recorded twice.

    Parameters
    ----------
    run : str or Path
        RUN, the dump's folder.
    arm : str
        Name of the update.
    seed, rank : int
        Independent repetition, and number of this process.
    metadata : callable
        Gives the metadata when the first rows come.
    existing : {"refuse", "replace", "append"}
        What to do with files of this seed and rank where the training begins anew.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        arm: str,
        seed: int,
        rank: int,
        metadata: Callable[[str], Metadata],
        existing: Existing = "refuse",
    ) -> None:
        self.run = place(run)
        self._arm = arm
        self._seed = seed
        self._rank = rank
        self._metadata = metadata
        self._existing: Existing = existing
        self._recorder: Recorder | None = None
        self._wrote = False

    def begin(self, step: int, *, resumed: bool) -> None:
        """Before the first step of a training.

        Parameters
        ----------
        step : int
            Number of its first optimizer step.
        resumed : bool
            Whether it goes on from a checkpoint.

        Raises
        ------
        ProbeError
            RUN cannot be written to; files of another training are there, or one that holds
            steps of both sides of the checkpoint.
        """
        try:
            self.run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProbeError(
                f"`run` must be a folder that can be made, got {self.run}: "
                f"{error.strerror or error}"
            ) from error
        if not is_remote(self.run) and not os.access(self.run, os.W_OK):
            raise ProbeError(f"`run` must be a folder that can be written to, got {self.run}")
        if resumed:
            self._forget_from(step)
            self._existing = "append"
        found = self._parts()
        if found and not self._wrote and self._existing == "refuse":
            raise ProbeError(
                f"{found[-1]} exists already: give another folder or seed, or existing='replace' "
                "or 'append'"
            )

    def __call__(self, rows: Rows) -> None:
        """Append the rows of one micro-batch."""
        self._open()(self._arm, rows)

    def cut(self, *, whole: bool = False) -> None:
        """Complete the file that is being written, if there is one.

        Parameters
        ----------
        whole : bool
            Whether the training is over: then a rank without any row writes a file of none, so
            that no rank is missing.
        """
        if self._recorder is None and whole and not self._wrote:
            self._open().writer(self._arm)
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(kind, error, trace)

    def _open(self) -> Recorder:
        """The recorder of the file that is being written."""
        if self._recorder is None:
            self._recorder = Recorder(
                self.run,
                seed=self._seed,
                rank=self._rank,
                metadata_for=self._metadata,
                existing="append" if self._wrote else self._existing,
                discard_on_error=False,
            )
            self._wrote = True
        return self._recorder

    def _parts(self) -> list[Path]:
        """Complete files, in order."""
        where = {"arm": self._arm, "seed": self._seed, "rank": self._rank}
        return [
            part_path(self.run, self._arm, self._seed, self._rank, number)
            for number in part_numbers(self.run, **where)  # type: ignore[arg-type]
        ]

    def _forget_from(self, step: int) -> None:
        """Remove the files of steps that will be made once more."""
        for number, part in reversed(list(enumerate(self._parts()))):  # numbered without gaps
            with open_parquet(part, ["step"]) as file:
                steps = file.read(columns=["step"])["step"].to_numpy()
            if not len(steps) or steps.max() < step:
                return
            if steps.min() < step:
                raise ProbeError(
                    f"{part} holds steps {steps.min()} to {steps.max()} and training resumes at "
                    f"step {step}: it was not recorded up to this checkpoint; give another folder"
                )
            drop_parts(part.parent, self._rank, number)
