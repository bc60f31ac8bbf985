"""What a training leaves in RUN: a log and steps that grow, checkpoints, parts of a dump.

A run that was ended at any moment is put back to its newest checkpoint: what was written after
it is cut off, so that going on writes what an undisturbed run would have written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltad._checks import parse_json
from deltad.curves import FORMAT, BatchLine, log_path, options_path, read_lines, read_options
from deltad.dumps.lock import is_empty
from deltad.dumps.unfinished import drop_parts
from deltad.probes.recipes.recipe import RecipeError
from deltad.probes.recipes.record import refuse_another_start
from deltad.steps import steps_path

from .options import Training

if TYPE_CHECKING:
    import torch

CHECKPOINTS: Final = "_checkpoints"
PROBES: Final = "_probes"
"""Folders in RUN; below the latter there is a dump a mask."""


@dataclass(frozen=True)
class Run:
    """One training of a command: a mask and a seed."""

    mask: str
    seed: int

    def __str__(self) -> str:
        return f"{self.mask}, seed {self.seed}"


@dataclass(frozen=True)
class RunFiles:
    """The files of one run.

    Attributes
    ----------
    folder : Path
        RUN.
    run : Run
        Which.
    """

    folder: Path
    run: Run

    @property
    def log(self) -> Path:
        """The log, a line a rollout batch."""
        return log_path(self.folder, self.run.mask, self.run.seed)

    @property
    def steps(self) -> Path:
        """The steps in numbers, for `deltad watch`."""
        return steps_path(self.folder, self.run.mask, self.run.seed, 0)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.folder / CHECKPOINTS / f"mask={self.run.mask}" / f"seed={self.run.seed}.pt"

    @property
    def dump(self) -> Path:
        """The dump that is recorded on the way."""
        return self.folder / PROBES / self.run.mask

    def is_complete(self, training: Training) -> bool:
        """Whether the log ends with the evaluation after the last batch."""
        lines = list(read_lines(self.log)) if self.log.exists() else []
        return bool(lines) and lines[-1].batch == training.batches

    def write_line(self, line: BatchLine) -> None:
        """Append a line to the log, at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as file:
            file.write(line.to_json().encode() + b"\n")

    def save(self, batch: int, weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
        """Write a checkpoint, whole or not at all.

        Parameters
        ----------
        batch : int
            Rollout batches done.
        weights : dict of str to Tensor
            The float32 master weights.
        optimizer : dict
            Its `state_dict`.
        """
        import torch

        path = self.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        # A checkpoint must not outlive the lines of the batches that it has seen.
        for written in (self.log, self.steps):
            if written.exists():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                torch.save({"batch": batch, "weights": weights, "optimizer": optimizer}, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """Read the checkpoint; None where there is none.

        Raises
        ------
        RecipeError
            It cannot be read.
        """
        import torch

        try:
            found: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        except FileNotFoundError:
            return None
        except Exception as error:  # torch raises whatever its unpickler meets
            raise RecipeError(
                f"the checkpoint {self.checkpoint} cannot be read ({error}): delete it to begin "
                "this run anew"
            ) from error
        return found

    def cut(self, batch: int, training: Training) -> None:
        """Take away all that was written from a rollout batch on.

        Parameters
        ----------
        batch : int
            Rollout batches that the checkpoint has seen.
        training : Training
            How many steps a batch has, and which are recorded.

        Raises
        ------
        RecipeError
            The log lacks batches that the checkpoint has seen.
        """
        _keep_lines(self.log, lambda line: line["batch"] < batch)
        logged = [line.batch for line in read_lines(self.log)] if self.log.exists() else []
        if logged != list(range(batch)):
            raise RecipeError(
                f"the checkpoint {self.checkpoint} has seen {batch} rollout batches and "
                f"{self.log} holds {len(logged)} of them: delete the checkpoint to begin this run "
                "anew"
            )
        _keep_lines(self.steps, lambda line: line["step"] < batch * training.minibatches)
        kept = recorded_parts(training, batch)
        for place in self.dump.glob(f"arm=*/seed={self.run.seed}"):
            drop_parts(place, 0, kept)
            if not any(place.iterdir()):
                place.rmdir()


def recorded_parts(training: Training, batch: int) -> int:
    """Parts of the dump that so many rollout batches leave: one for each that records steps."""
    every = training.probe_every
    if not every:
        return 0
    size = training.minibatches
    return sum(any(s % every == 0 for s in range(b * size, (b + 1) * size)) for b in range(batch))


def claim(folder: Path, training: Training, *, resume: bool, versions: dict[str, str]) -> None:
    """Write a training's options into a new RUN, or see that they are those of before.

    Raises
    ------
    RecipeError
        The folder is not empty and is not resumed, or holds something else.
    """
    path = options_path(folder)
    options = json.loads(json.dumps(training.to_json()))
    if not resume or not path.exists():
        if not is_empty(folder):
            raise RecipeError(
                f"{folder} is not empty: resume it, or choose another folder for a new training"
                if not resume
                else f"{folder} is not empty and holds no training: choose another folder"
            )
        path.parent.mkdir(parents=True)
        text = json.dumps(
            {
                "format": FORMAT,
                "options": options,
                "precision": training.settings.meaning,
                "model": training.recipe.model_facts()["model"],
                "versions": versions,
                "start": None,  # known once the model is loaded: `settle_start`
            },
            indent=1,
        )
        path.write_text(text + "\n", encoding="utf-8")
        return
    before = read_options(folder).get("options", {})
    for name in [*options, *before]:
        if options.get(name) != before.get(name):
            raise RecipeError(
                f"{folder} was trained with other options: {name} is {before.get(name)!r} there "
                f"and {options.get(name)!r} now; choose another folder, or the options of before"
            )


def settle_start(folder: Path, start: Mapping[str, Any], arithmetic: Mapping[str, Any]) -> None:
    """Write into a new training's options which policy it starts from, or compare it with those.

    Raises
    ------
    RecipeError
        An earlier part of the training started from another policy, or did not say from which.
    """
    path = options_path(folder)
    options = read_options(folder)
    begun = any(path.parent.glob("mask=*"))
    if options.get("start", {}) is not None or begun:
        refuse_another_start(path, options.get("start"), start)
        return
    options |= {"start": dict(start), "arithmetic": dict(arithmetic)}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def _keep_lines(path: Path, wanted: Callable[[Any], bool]) -> None:
    """Keep the lines of a file that are wanted; half a line at the end goes too."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
    kept = b"".join(line for line in whole if line.strip() and wanted(parse_json(line)))
    if kept == text:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(kept)
    aside.replace(path)
