"""From options to trained runs: which are missing, workers that train them, progress."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltad.dumps.aside import remove_leftovers
from deltad.dumps.lock import locked
from deltad.dumps.storage import must_be_local, place
from deltad.probes.recipes.recipe import RecipeError
from deltad.probes.recipes.record import threads_put_back, use_one_thread
from deltad.probes.recipes.workers import Report, default_workers, run

from .files import Run, RunFiles, claim, settle_start
from .options import MASKS, Training
from .progress import shown

DEFAULT_SEEDS = 8


@dataclass(frozen=True)
class TrainJob:
    """What a worker process is handed."""

    training: Training
    folder: Path

    def prepare(self, report: Report) -> None:
        """Do what all runs share, and see that trained ones started from the same policy."""
        from deltad.probes.recipes.describe import arithmetic, start_of

        use_one_thread()
        recipe = self.training.recipe
        recipe.prepare(report)
        start = start_of(recipe, recipe.load().model.state_dict())
        settle_start(self.folder, start, arithmetic())

    def open(self, report: Report) -> Callable[[Run, Report], None]:
        """Load the model; the function trains one run."""
        from .loop import Trainer

        use_one_thread()
        trainer = Trainer.load(self.training)
        return lambda piece, report: trainer.train(self.folder, piece, report)


def train(
    training: Training,
    run_folder: str | Path,
    *,
    masks: Sequence[str] = MASKS,
    seeds: int | Iterable[int] = DEFAULT_SEEDS,
    workers: int | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> list[Run]:
    """Train with every mask and seed.

    Parameters
    ----------
    training
        What to do.
    run_folder
        RUN; made if need be.
    masks
        Names of criteria, each a run of its own for every seed.
    seeds
        How many, from 0, or which. Runs of one seed see the same prompts, whatever the mask.
    workers
        Processes; by default as many as cores. 0 works in this process. The numbers are the same
        whatever their number.
    resume
        Go on where a training of the same options stopped, from each run's newest checkpoint;
        masks and seeds may be others. The numbers are those of an undisturbed training.
    quiet
        No progress bar.

    Returns
    -------
    list of Run
        What was trained now.

    Raises
    ------
    RecipeError
        The folder is not empty and `resume` is not set, or it holds a training of other
        options, a mask cannot be trained with, or something is missing that the recipe needs.
    WorkerError
        A run failed or a worker died; what else was trained is kept.
    InUseError
        Another process trains into the folder.
    KeyboardInterrupt
        Everything up to the last complete rollout batch is kept.
    """
    must_be_local(place(run_folder), "a training")
    folder = Path(run_folder)
    wanted = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not wanted or min(wanted) < 0 or len(set(wanted)) < len(wanted):
        raise RecipeError(f"`seeds` must be at least one distinct number from 0 on, got {seeds}")
    if not masks or len(set(masks)) < len(masks):
        raise RecipeError(f"`masks` must be distinct and at least one, got {list(masks)}")
    for mask in masks:
        training.mask(mask)
    if workers is not None and workers < 0:
        raise RecipeError(f"`workers` must be at least 0, got {workers}")
    with locked(folder):
        claim(folder, training, resume=resume, versions=_versions())
        missing = [
            piece
            for piece in (Run(mask, seed) for seed in wanted for mask in masks)
            if not RunFiles(folder, piece).is_complete(training)
        ]
        if not missing:
            return []
        count = default_workers() if workers is None else workers
        try:
            with shown(training, len(missing), quiet=quiet) as watch, threads_put_back(count == 0):
                run(TrainJob(training, folder), missing, workers=count, watch=watch)
        finally:
            for mask in masks:
                remove_leftovers(RunFiles(folder, Run(mask, 0)).dump, "")
    return missing


def _versions() -> dict[str, str]:
    """What the numbers were made with."""
    names = ("torch", "transformers", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": platform.python_version()}
