"""Trainings side by side: what each mask came to, seed by seed against one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis import statistics
from deltad.analysis.pairs import named, ratio
from deltad.analysis.question import QuestionError
from deltad.analysis.result import (
    Column,
    Result,
    Table,
    number,
    p_value,
    record,
    with_interval,
)
from deltad.curves import CURVES, TRAINING, BatchLine, read_lines, read_options
from deltad.dumps import DumpError
from deltad.dumps.storage import place
from deltad.masks import RULES

if TYPE_CHECKING:
    from deltad.analysis.statistics import Interval, Paired

Floats = NDArray[np.float64]

DEFAULT_BASELINE: Final = "ratio"

MEASURES: Final[Mapping[str, str]] = {
    "final": "held-out accuracy after the last batch",
    "best": "highest held-out accuracy of all evaluations",
    "mean": "mean held-out accuracy of all evaluations after the first",
}
"""What a run is judged by."""


@dataclass(frozen=True)
class Setting:
    """The folder, the options and the model that all runs of one RUN share."""

    folder: Path
    options: Mapping[str, Any]
    model: str

    @property
    def name(self) -> str:
        """Recipe, precision, threshold and K in words."""
        options = self.options
        region = "" if options["divergence"] == "kl" else f" ({options['divergence'].upper()})"
        return (
            f"{options['recipe']}, {options['precision']}, δ = {options['threshold']:g}{region}, "
            f"K = {options['top_k']}"
        )


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """One mask and seed of a training, with its lines in order."""

    setting: Setting
    mask: str
    seed: int
    lines: tuple[BatchLine, ...]

    @property
    def complete(self) -> bool:
        """Whether it was trained to its end."""
        return bool(self.lines) and self.lines[-1].batch == int(self.setting.options["batches"])

    @cached_property
    def curves(self) -> dict[str, Floats]:
        """Every curve over the lines, shape (line,); NaN where a line has no such number."""
        values = [line.values() for line in self.lines]
        return {name: np.array([each[name] for each in values]) for name in CURVES}

    def measure(self, name: str) -> float:
        """One of `MEASURES`; NaN of a run that is not complete."""
        accuracy = self.curves["accuracy"]
        accuracy = accuracy[~np.isnan(accuracy)]
        if not self.complete or not len(accuracy):
            return math.nan
        found = {"final": accuracy[-1], "best": accuracy.max(), "mean": accuracy[1:].mean()}
        return float(found[name])

    def total(self, name: str) -> float:
        """A curve's quotient over all batches together; NaN where there is none."""
        curve = CURVES[name]
        sums = [line.sums for line in self.lines if curve.below in line.sums]
        above, below = (sum(e.get(part, 0.0) for e in sums) for part in (curve.above, curve.below))
        return ratio(above, below)


@dataclass(frozen=True, eq=False)
class MaskRow:
    """One mask of one setting: its complete runs by seed."""

    table: TrainingTable
    setting: Setting
    mask: str
    runs: tuple[TrainedRun, ...]
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    def measure(self, name: str) -> float:
        """Mean over seeds of one of `MEASURES`; NaN without a complete run."""
        return statistics.mean([run.measure(name) for run in self.runs])

    def ci95(self, name: str) -> Interval:
        """Its bootstrap interval over seeds; NaN with fewer than two."""
        values = [run.measure(name) for run in self.runs]
        return statistics.bootstrap_mean(values, seed=self.table.bootstrap_seed)

    def total(self, name: str) -> float:
        """Mean over seeds of a curve's quotient over all batches."""
        return statistics.mean([run.total(name) for run in self.runs])

    def paired(self, name: str = "final") -> Paired:
        """Compare one of `MEASURES` with the baseline's in the seeds that both have.

        `difference` is mask − baseline; of nothing for the baseline itself.
        """
        if name not in self._known:
            against = self.table.of(self.setting, self.table.baseline)
            theirs = {run.seed: run.measure(name) for run in against}
            mine = () if self.mask == self.table.baseline else self.runs
            both = [run for run in mine if run.seed in theirs]
            self._known[name] = statistics.compare_paired(
                [run.measure(name) for run in both],
                [theirs[run.seed] for run in both],
                bootstrap_seed=self.table.bootstrap_seed,
            )
        found: Paired = self._known[name]
        return found

    def holm_p(self, name: str = "final") -> float:
        """Sign-test p, corrected for the masks of the setting; NaN of the baseline."""
        return self.table.corrected(self.setting, name).get(self.mask, math.nan)


@dataclass(frozen=True, eq=False)
class TrainingTable(Result):
    """Trainings of one or several RUNs, a row per setting and mask.

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
        """Every mask once: without any, by the ratio alone, then in the order of the rules."""
        found = {run.mask for run in self.runs}
        order = dict.fromkeys(("none", "clip-higher", "ratio", *RULES))
        return (*(name for name in order if name in found), *sorted(found - set(order)))

    def name_of(self, setting: Setting) -> str:
        """A setting in words; with its folder where another has the same words."""
        same = [each for each in self.settings if each.name == setting.name]
        return setting.name if len(same) == 1 else f"{setting.name} ({setting.folder})"

    def of(self, setting: Setting, mask: str) -> tuple[TrainedRun, ...]:
        """The complete runs of a setting and mask, by seed."""
        found = [
            run
            for run in self.runs
            if (run.setting.folder, run.mask) == (setting.folder, mask) and run.complete
        ]
        return tuple(sorted(found, key=lambda run: run.seed))

    @cached_property
    def rows(self) -> Sequence[MaskRow]:
        """By setting, then mask; without those that have no complete run."""
        return tuple(
            MaskRow(self, setting, mask, runs)
            for setting in self.settings
            for mask in self.masks
            if (runs := self.of(setting, mask))
        )

    @property
    def incomplete(self) -> tuple[TrainedRun, ...]:
        """Runs that are left out, because they were not trained to their end."""
        return tuple(run for run in self.runs if not run.complete)

    def corrected(self, setting: Setting, name: str = "final") -> dict[str, float]:
        """Sign-test p of each mask of a setting against the baseline, by Holm's rule."""
        mine = [row for row in self.rows if row.setting is setting and row.mask != self.baseline]
        values = statistics.holm([row.paired(name).sign_test_p for row in mine])
        return {row.mask: float(p) for row, p in zip(mine, values, strict=True)}

    def course(self, setting: Setting, mask: str, curve: str) -> tuple[Floats, Floats]:
        """One of `deltad.curves.CURVES` of all complete runs of a mask.

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

    def objects(self) -> dict[str, Any]:
        """Settings with their options, the rows, and every run's measures."""
        return {
            "baseline": self.baseline,
            "bootstrap": {"method": statistics.METHOD, "seed": self.bootstrap_seed},
            "settings": [
                {
                    "name": self.name_of(setting),
                    "run": str(setting.folder),
                    "model": setting.model,
                    "options": dict(setting.options),
                }
                for setting in self.settings
            ],
            "rows": [
                {"setting": self.name_of(row.setting), **record(self.columns, row)}
                for row in self.rows
            ],
            "runs": [
                {
                    "setting": self.name_of(run.setting),
                    "mask": run.mask,
                    "seed": run.seed,
                    "complete": run.complete,
                    **{f"{name}_accuracy": run.measure(name) for name in MEASURES},
                }
                for run in self.runs
            ],
        }

    def parts(self) -> Iterable[str | Table]:
        """A table per setting, a row per mask, and how it was computed."""
        for setting in self.settings:
            options = setting.options
            yield (
                f"{self.name_of(setting)} · {options['batches']} × {options['minibatches']} "
                f"optimizer steps of {options['prompts'] * options['responses']} responses · "
                f"{options['optimizer']}, lr {options['lr']:g} · accuracy: "
                f"avg@{options['eval_samples']} of {options['eval_prompts']} prompts"
            )
            rows = [row for row in self.rows if row.setting.folder == setting.folder]
            yield Table.of(_compared(self.baseline), rows)
        seeds = {len(row.runs) for row in self.rows} or {0}
        some = " to ".join(str(each) for each in sorted({min(seeds), max(seeds)}))
        yield (
            f"{some} {'seed' if some == '1' else 'seeds'} per mask; intervals: 95 %, bootstrap "
            f"over seeds ({statistics.METHOD}, random seed {self.bootstrap_seed}). Runs of one "
            "seed begin with the same weights and the same prompts, so masks are paired with "
            f"{self.baseline} by seed."
        )
        yield (
            "best: the highest of several noisy evaluations, so it lies above what the policy can "
            "do; mean: of all evaluations after the first. masked, outside, PPO-KL: over all "
            "batches."
        )
        if self.incomplete:
            names = ", ".join(f"{run.mask} seed {run.seed}" for run in self.incomplete[:6])
            more = len(self.incomplete) - 6
            names += f" and {more} more" if more > 0 else ""
            yield f"Not trained to their end, and left out: {names}."


@dataclass(frozen=True, eq=False)
class TrainingBatches(Result):
    """Every line of every run of a training table, complete or not."""

    table: TrainingTable

    @property
    def rows(self) -> Sequence[tuple[TrainedRun, BatchLine, dict[str, float]]]:
        """The lines with their curves."""
        return [(run, line, line.values()) for run in self.table.runs for line in run.lines]

    @property
    def columns(self) -> Sequence[Column]:
        """One row per line."""
        keys: dict[str, Callable[[Any], Any]] = {
            "setting": lambda row: self.table.name_of(row[0].setting),
            "mask": lambda row: row[0].mask,
            "seed": lambda row: row[0].seed,
            "batch": lambda row: row[1].batch,
            "step": lambda row: row[1].step,
        }
        return [
            *(Column(name, "which line", value, name, key=True) for name, value in keys.items()),
            *(
                Column(name, curve.meaning, lambda row, name=name: row[2][name], name)
                for name, curve in CURVES.items()
            ),
        ]

    def objects(self) -> dict[str, Any]:
        """The rows, under `batches`."""
        return {"batches": self.records()}

    def parts(self) -> Iterable[str | Table]:
        """The same as one table."""
        yield Table.of(self.columns, self.rows)


def _compared(baseline: str) -> list[Column]:
    """Columns of a setting's table in text."""

    def against(head: str, show: Callable[[MaskRow], str]) -> Column:
        """Of the other masks."""
        return Column("", "", str, head, lambda row: "" if row.mask == baseline else show(row))

    def difference(row: MaskRow) -> str:
        """Final accuracy, mask − baseline."""
        return with_interval(row.paired().difference, row.paired().difference_ci95, signed=True)

    def signs(row: MaskRow) -> str:
        """Paired seeds on either side."""
        return f"{row.paired().lower} / {row.paired().tied} / {row.paired().higher}"

    curves = {"tokens masked": "masked_fraction", "outside": "outside_fraction"}
    return [
        Column("", "", str, "mask", lambda row: row.mask),
        Column("", "", str, "seeds", lambda row: str(len(row.runs))),
        Column("", "", str, "final accuracy",
               lambda row: with_interval(row.measure("final"), row.ci95("final"))),
        *(Column("", "", str, name, lambda row, name=name: number(row.measure(name)))
          for name in ("best", "mean")),
        against(f"final − {baseline}", difference),
        against("lower / tied / higher", signs),
        against("p, sign test", lambda row: p_value(row.paired().sign_test_p)),
        against("Holm p", lambda row: p_value(row.holm_p())),
        *(Column("", "", str, head, lambda row, name=name: number(row.total(name)))
          for head, name in {**curves, "PPO-KL (nats)": "ppo_kl"}.items()),
    ]  # fmt: skip


def _training_columns() -> list[Column]:
    """Columns of a training table."""
    found = [
        Column("recipe", "what was trained on what", lambda row: row.setting.options["recipe"],
               key=True),
        *(
            Column(name, meaning, lambda row, name=name: row.setting.options[name], key=True)
            for name, meaning in (
                ("precision", "of rollouts and training"), ("threshold", "δ of the masks"),
                ("divergence", "of the masks' region"),
            )
        ),
        Column("mask", "criterion in the loss", lambda row: row.mask, key=True),
        Column("seeds", "runs that were trained to their end", lambda row: len(row.runs)),
    ]  # fmt: skip
    for name, meaning in MEASURES.items():
        found += named(f"{name}_accuracy", f"{meaning}, mean over seeds",
                       lambda row, name=name: row.measure(name),
                       lambda row, name=name: row.ci95(name))  # fmt: skip
    found += [
        Column("baseline", "the mask that it is compared with, of the same setting",
               lambda row: row.table.baseline),
        Column("paired_seeds", "seeds that both have", lambda row: row.paired().seeds),
    ]  # fmt: skip
    for name in MEASURES:

        def paired(row: Any, name: str = name) -> Any:
            """One measure compared."""
            return row.paired(name)

        found += [
            Column(f"{name}_{part}", f"paired seeds in which {name} accuracy {what}",
                   lambda row, of=paired, part=part: getattr(of(row), part))
            for part, what in (("lower", "is below the baseline's"), ("tied", "is the same"),
                               ("higher", "is above"))
        ]  # fmt: skip
        found += [
            *named(f"{name}_difference",
                   f"{name} accuracy, mask − baseline, mean over the paired seeds",
                   lambda row, of=paired: of(row).difference,
                   lambda row, of=paired: of(row).difference_ci95),
            Column(f"{name}_sign_test_p", "two-sided; ties left out",
                   lambda row, of=paired: of(row).sign_test_p),
            Column(f"{name}_sign_test_p_holm", "corrected for the masks of the setting",
                   lambda row, name=name: row.holm_p(name)),
        ]  # fmt: skip
    return found + [
        Column(name, f"{CURVES[name].meaning} Over all batches, mean over seeds.",
               lambda row, name=name: row.total(name))
        for name in ("ppo_kl", "masked_fraction", "clip_fraction", "outside_fraction",
                     "disagreement_fraction", "increase_fraction", "delta_d", "length", "entropy")
    ]  # fmt: skip


TRAINING_COLUMNS: Final = _training_columns()
"""Columns of a training table, one row per setting and mask."""

TrainingTable.COLUMNS = TRAINING_COLUMNS


def training_table(
    folders: Sequence[str | Path], *, baseline: str = "", bootstrap_seed: int = 0
) -> TrainingTable:
    """Read the logs of trainings.

    Parameters
    ----------
    folders : sequence of str or Path
        RUNs that `deltad train` has written, finished or not.
    baseline : str
        The mask that the others are compared with; by default the ratio rule, or where that was
        not trained with the first mask there is.
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
            mask, text = path.parent.name[len("mask=") :], path.stem[len("seed=") :]
            if not text.isdecimal() or str(seed := int(text)) != text:
                raise DumpError(path, "must be named seed=<n>.jsonl, n a whole number")
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
