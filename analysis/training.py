"""Trainings side by side: what each mask came to, seed by seed against one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltad.curves import CURVES, TRAINING, read_lines, read_options
from deltad.dumps import DumpError
from deltad.dumps.storage import place
from deltad.masks import criterion

from . import statistics
from .question import QuestionError
from .result import Result
from .statistics import Interval, Paired
from .trained_run import Floats, Setting, TrainedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

DEFAULT_BASELINE: Final = "ratio"


@dataclass(frozen=True, eq=False)
class MaskRow:
    """One mask of one setting over its seeds.

    Attributes
    ----------
    setting : Setting
        Which training.
    mask, baseline : str
        Which, and what it is compared with.
    runs : tuple of TrainedRun
        Complete ones, by seed.
    against : tuple of TrainedRun
        Complete runs of the baseline.
    bootstrap_seed : int
        Of the intervals' random numbers.
    """

    setting: Setting
    mask: str
    baseline: str
    runs: tuple[TrainedRun, ...]
    against: tuple[TrainedRun, ...]
    bootstrap_seed: int = 0

    def measure(self, name: str) -> float:
        """Mean over seeds of one of `MEASURES`; NaN without a complete run."""
        return statistics.mean([run.measure(name) for run in self.runs])

    def ci95(self, name: str) -> Interval:
        """Its bootstrap interval over seeds; NaN with fewer than two."""
        values = [run.measure(name) for run in self.runs]
        return statistics.bootstrap_mean(values, seed=self.bootstrap_seed)

    def total(self, name: str) -> float:
        """Mean over seeds of a curve's quotient over all batches."""
        return statistics.mean([run.total(name) for run in self.runs])

    def paired(self, name: str = "final") -> Paired:
        """Compare with the baseline in the seeds that both have.

        Parameters
        ----------
        name : str
            One of `MEASURES`.

        Returns
        -------
        Paired
            `difference` is mask − baseline; of nothing for the baseline itself.
        """
        theirs = {run.seed: run.measure(name) for run in self.against}
        both = [] if self.mask == self.baseline else [r for r in self.runs if r.seed in theirs]
        return statistics.compare_paired(
            [run.measure(name) for run in both],
            [theirs[run.seed] for run in both],
            bootstrap_seed=self.bootstrap_seed,
        )


@dataclass(frozen=True, eq=False)
class TrainingTable(Result):
    """Trainings of one or several RUNs, a row a setting and mask.

    Attributes
    ----------
    runs : tuple of TrainedRun
        All that were found, complete or not.
    baseline : str
        The mask that the others are compared with, within their own setting.
    bootstrap_seed : int
        Of the intervals' random numbers.
    """

    runs: tuple[TrainedRun, ...] = field(repr=False)
    baseline: str = DEFAULT_BASELINE
    bootstrap_seed: int = 0

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """In the order of the RUNs."""
        return tuple({run.setting.folder: run.setting for run in self.runs}.values())

    @cached_property
    def masks(self) -> tuple[str, ...]:
        """Every mask once, those without a prediction first."""
        found = {run.mask for run in self.runs}
        first = [name for name in ("none", "clip-higher", "ratio") if name in found]
        return (*first, *sorted(found - set(first), key=_by_tail))

    def name_of(self, setting: Setting) -> str:
        """A setting in words; with its folder where another has the same words."""
        same = [each for each in self.settings if each.name == setting.name]
        return setting.name if len(same) == 1 else f"{setting.name} ({setting.folder})"

    def of(self, setting: Setting, mask: str, *, complete: bool = True) -> tuple[TrainedRun, ...]:
        """The runs of a setting and mask, by seed."""
        found = [
            run
            for run in self.runs
            if run.setting.folder == setting.folder
            and run.mask == mask
            and (run.complete or not complete)
        ]
        return tuple(sorted(found, key=lambda run: run.seed))

    @cached_property
    def rows(self) -> tuple[MaskRow, ...]:
        """By setting, then mask; without those that have no complete run."""
        return tuple(
            MaskRow(
                setting, mask, self.baseline, runs, self.of(setting, self.baseline),
                self.bootstrap_seed,
            )
            for setting in self.settings
            for mask in self.masks
            if (runs := self.of(setting, mask))
        )  # fmt: skip

    @property
    def incomplete(self) -> tuple[TrainedRun, ...]:
        """Runs that take no part, because they were not trained to their end."""
        return tuple(run for run in self.runs if not run.complete)

    def corrected(self, setting: Setting, name: str = "final") -> dict[str, float]:
        """Sign-test p of each mask of a setting against the baseline, by Holm's rule."""
        mine = [row for row in self.rows if row.setting is setting and row.mask != self.baseline]
        values = statistics.holm([row.paired(name).sign_test_p for row in mine])
        return {row.mask: float(p) for row, p in zip(mine, values, strict=True)}

    def course(self, setting: Setting, mask: str, curve: str) -> tuple[Floats, Floats]:
        """One curve of all complete runs of a mask.

        Parameters
        ----------
        setting : Setting
            One of `settings`.
        mask : str
            One of `masks`.
        curve : str
            One of `deltad.curves.CURVES`.

        Returns
        -------
        steps : ndarray of float64, shape (point,)
            Optimizer steps made before, where any run has a number.
        values : ndarray of float64, shape (seed, point)
            NaN where a run has none.
        """
        runs = self.of(setting, mask)
        if not runs:
            return np.empty(0), np.empty((0, 0))
        steps = np.array([line.step for line in runs[0].lines], dtype=np.float64)
        values = np.array([run.curves[curve] for run in runs])
        there = ~np.isnan(values).all(axis=0)
        return steps[there], values[:, there]

    @property
    def batches(self) -> TrainingBatches:
        """Every rollout batch of every run, with all curves."""
        return TrainingBatches(self)

    def columns(self) -> dict[str, list[Any]]:
        """A row a setting and mask, the columns of `TRAINING_COLUMNS`."""
        from .forms.training import training_columns

        return training_columns(self)

    def to_json_object(self) -> dict[str, Any]:
        """Settings with their options, the rows, and every complete run's measures."""
        from .forms.training import training_object

        return training_object(self)

    def text(self) -> RenderableType:
        """A grid a setting; see `deltad.analysis.forms.training`."""
        from .forms.training import training_text

        return training_text(self)

    def figure(self) -> Figure:
        """Curves with bands over seeds."""
        from .figures.training import training_figure

        return training_figure(self)


@dataclass(frozen=True, eq=False)
class TrainingBatches(Result):
    """Every line of every run of some trainings, complete or not.

    Attributes
    ----------
    table : TrainingTable
        Which.
    """

    table: TrainingTable

    def columns(self) -> dict[str, list[Any]]:
        """A row a line: setting, mask, seed, batch, step, then every curve."""
        lines = [(run, line, line.values()) for run in self.table.runs for line in run.lines]
        return {
            "setting": [self.table.name_of(run.setting) for run, _, _ in lines],
            "mask": [run.mask for run, _, _ in lines],
            "seed": [run.seed for run, _, _ in lines],
            "batch": [line.batch for _, line, _ in lines],
            "step": [line.step for _, line, _ in lines],
            **{name: [values[name] for _, _, values in lines] for name in CURVES},
        }

    def to_json_object(self) -> dict[str, Any]:
        """The same as a list of objects, under `batches`."""
        from .export import FORMAT, without_nan

        columns = self.columns()
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found: dict[str, Any] = without_nan({"format": FORMAT, "batches": rows})
        return found

    def text(self) -> RenderableType:
        """The same as one grid."""
        from .text import plain_grid
        from .words import number

        columns = self.columns()
        grid = plain_grid(*columns)
        for row in zip(*columns.values(), strict=True):
            grid.add_row(*(number(v) if isinstance(v, float) else str(v) for v in row))
        return grid


def training_table(
    folders: Sequence[str | Path], *, baseline: str = "", bootstrap_seed: int = 0
) -> TrainingTable:
    """Read the logs of trainings.

    Parameters
    ----------
    folders : sequence of str or Path
        RUNs that `deltad train` has written, finished or not.
    baseline : str
        The mask that the others are compared with; by default the ratio rule, or where that
        was not trained with the first mask there is.
    bootstrap_seed : int
        Seed of the intervals' random numbers.

    Returns
    -------
    TrainingTable
        Statistics are computed when they are asked for.

    Raises
    ------
    QuestionError
        No folder, one twice, or a baseline that no run was trained with.
    DumpError
        A folder holds no training, or a line of a log is malformed; says where.
    """
    places = [place(folder) for folder in folders]
    if not places or len({each.resolve() for each in places}) < len(places):
        raise QuestionError("name at least one RUN, and each once")
    runs: list[TrainedRun] = []
    for run in places:
        found = read_options(run)
        setting = Setting(run, found["options"], str(found.get("model", "")))
        for path in sorted(run.glob(f"{TRAINING}/mask=*/seed=*.jsonl")):
            mask, number = path.parent.name[len("mask=") :], path.stem[len("seed=") :]
            if not number.isdecimal() or str(seed := int(number)) != number:
                raise DumpError(path, "must be named seed=<n>.jsonl, n a whole number")
            criterion(mask)  # so that a file of another kind is no mask
            runs.append(TrainedRun(setting, mask, seed, tuple(read_lines(path))))
    if not runs:
        raise QuestionError(f"no run has begun in {', '.join(map(str, places))}")
    table = TrainingTable(tuple(runs), baseline or DEFAULT_BASELINE, bootstrap_seed)
    if baseline and baseline not in table.masks:
        raise QuestionError(
            f"`baseline` must be a mask that was trained with, {', '.join(table.masks)}, "
            f"got {baseline!r}"
        )
    if table.baseline not in table.masks:
        return TrainingTable(table.runs, table.masks[0], bootstrap_seed)
    return table


def _by_tail(name: str) -> tuple[int, str]:
    """Order of the predictive criteria: as the paper discusses their tails."""
    tails = ("aggregated", "uniform", "exact", "full")
    tail = name.rpartition("-")[2]
    return (tails.index(tail) if tail in tails else len(tails), name)
