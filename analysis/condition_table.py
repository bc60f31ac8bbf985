"""The same rates on parts of the tokens outside: what a criterion is right about, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from .bins import UNKNOWN, bin_of, interval_label, quantile_edges
from .comparison import arms_of, comparable
from .conditions import CONDITIONS, Condition, check_condition, conditions_named
from .counting import (
    Decided,
    Judged,
    Progress,
    checked_batches,
    columns_for,
    decisions,
    outside_of,
)
from .question import OWN, Question, QuestionError, Resolved
from .rates import RateTable, SeedRates
from .responses import read_responses
from .result import Result
from .shares import Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from deltad.dumps import Dump

DEFAULT_BINS: Final = 4


@dataclass(frozen=True, eq=False)
class Part:
    """One criterion on the tokens of one bin.

    Attributes
    ----------
    condition, label : str
        Name of the condition; the bin in words, `unknown` for tokens whose value is.
    low, high : float
        A bin of numbers: (low, high], closed below too in the first; NaN otherwise.
    criterion : str
        Whose decisions.
    accuracy : Share
        Tokens of the bin whose sign of ΔD it foretold; over nothing under `own`.
    table : RateTable
        It against the baseline on the bin's tokens; `tokens` are those of all bins.
    """

    condition: str
    label: str
    low: float
    high: float
    criterion: str
    accuracy: Share
    table: RateTable


@dataclass(frozen=True, eq=False)
class ConditionTable(Result):
    """Rates and sign accuracy by one or several conditions.

    Attributes
    ----------
    question : Question
        Region, baseline and settled protocol; its criterion is the baseline.
    conditions : tuple of Condition
        In the order asked for.
    criteria : tuple of str
        The baseline first.
    parts : tuple of Part
        By condition, bin and criterion. No token outside is left out: those without a value
        are in a bin of their own, and a name that no token has is shown with no tokens.
    bins : int
        Bins asked for; tied numbers may leave fewer.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    """

    question: Question
    conditions: tuple[Condition, ...]
    criteria: tuple[str, ...]
    parts: tuple[Part, ...]
    bins: int
    bootstrap_seed: int = 0

    def of(self, condition: str, criterion: str) -> list[Part]:
        """The bins of one condition and criterion."""
        return [
            part
            for part in self.parts
            if part.condition == condition and part.criterion == criterion
        ]

    def columns(self) -> dict[str, list[Any]]:
        """A row a bin and criterion, the columns of `CONDITION_COLUMNS`."""
        from .forms.conditions import condition_columns

        return condition_columns(self)

    def text(self) -> RenderableType:
        """A table a condition."""
        from .forms.conditions import condition_text

        return condition_text(self)

    def to_json_object(self) -> dict[str, Any]:
        """The same rows as objects."""
        from .forms.conditions import condition_object

        return condition_object(self)

    def figure(self) -> Figure:
        """Sign accuracy by bin, axes a condition."""
        from .figures.conditions import condition_figure

        return condition_figure(self)


def condition_table(
    dump: Dump,
    question: Question | None = None,
    by: Sequence[str] = tuple(CONDITIONS),
    criteria: Sequence[str] = (),
    *,
    bins: int = DEFAULT_BINS,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
) -> ConditionTable:
    """Count the tokens outside apart, by conditions.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        Region, criterion, baseline and protocol.
    by : sequence of str
        Names of `CONDITIONS`.
    criteria : sequence of str
        By default the question's criterion; the baseline takes part in any case.
    bins : int
        Bins by quantile of all tokens outside, for conditions that are numbers.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    ConditionTable
        A part for every condition, bin and criterion.

    Raises
    ------
    QuestionError, CriterionError
        An unknown condition, fewer bins than 1, or what the dump cannot answer: names the
        column that it lacks.
    DumpError
        A row holds an impossible value.
    """
    question = question or Question()
    resolved, _ = comparable(dump, question, criteria or (question.criterion,))
    conditions = conditions_named(by)
    if bins < 1:
        raise QuestionError(f"`bins` must be at least 1, got {bins}")
    arms = arms_of(resolved)
    for condition in conditions:
        for arm in arms:
            check_condition(dump, arm, condition)
    base = next(iter(resolved.values()))
    seeds = dump.seeds(base.baseline_arm)
    read = [
        {arm: _read(dump, arm, seed, resolved, conditions, progress) for arm in arms}
        for seed in seeds
    ]
    parts: list[Part] = []
    for place, condition in enumerate(conditions):
        binning = _Binning.of(condition, [seed[base.baseline_arm][1][place] for seed in read], bins)
        placed = [
            {
                arm: (decided, binning.place(values[place]))
                for arm, (decided, values) in seed.items()
            }
            for seed in read
        ]
        for at, (label, low, high) in binning.bins.items():
            for row, (name, each) in enumerate(resolved.items()):
                table, accuracy = _judge(each, row, at, seeds, placed, bootstrap_seed)
                parts.append(Part(condition.name, label, low, high, name, accuracy, table))
    return ConditionTable(
        base.question, conditions, tuple(resolved), tuple(parts), bins, bootstrap_seed
    )


@dataclass(frozen=True, eq=False)
class _Binning:
    """The bins of one condition: by number, their label and ends; where a value lies."""

    bins: dict[int, tuple[str, float, float]]
    edges: NDArray[np.float64] | None

    @classmethod
    def of(cls, condition: Condition, values: list[NDArray[Any]], bins: int) -> _Binning:
        """Settle the bins from the values of all seeds."""
        pooled = np.concatenate([np.empty(0), *values])
        edges = None
        if condition.names:
            found = {at: (name, math.nan, math.nan) for at, name in enumerate(condition.names)}
        else:
            edges = quantile_edges(pooled, bins)
            found = {
                at: (interval_label(low, high, first=not at), low, high)
                for at, (low, high) in enumerate(pairwise(edges.tolist()))
            }
        binning = cls(found, edges)
        if np.any(binning.place(pooled) == UNKNOWN):
            found[UNKNOWN] = ("unknown", math.nan, math.nan)
        return binning

    def place(self, values: NDArray[Any]) -> NDArray[np.intp]:
        """The bin of every value."""
        return values.astype(np.intp) if self.edges is None else bin_of(values, self.edges)


def _read(
    dump: Dump,
    arm: str,
    seed: int,
    resolved: dict[str, Resolved],
    conditions: Sequence[Condition],
    progress: Progress | None,
) -> tuple[Decided, list[NDArray[Any]]]:
    """The tokens outside of one seed of one arm, and their value of every condition."""
    deciders = [each.criterion for each in resolved.values()]
    region = next(iter(resolved.values())).question
    columns = dict.fromkeys(column for each in conditions for column in each.columns)
    whole = any(each.responses for each in conditions)
    responses = read_responses(dump, arm, seed) if whole else None
    without_vectors = 0
    blocks: list[Judged] = []
    values: list[list[NDArray[Any]]] = [[np.empty(0)] for _ in conditions]
    for batch, metadata in checked_batches(
        dump, arm, seed, [*columns_for(*deciders), *columns], progress=progress
    ):
        without_vectors += int(np.count_nonzero(~batch.vectors))
        found = outside_of(batch, metadata, region)
        if found is not None:
            blocks.append((found.delta_d, decisions(found.tokens, region, deciders)))
            for known, each in zip(values, conditions, strict=True):
                known.append(each.values(found, responses))
    decided = Decided.of(dump.rows_seen(arm, seed), without_vectors, blocks, len(deciders))
    return decided, [np.concatenate(known) for known in values]


def _judge(
    each: Resolved,
    row: int,
    at: int,
    seeds: Sequence[int],
    placed: list[dict[str, tuple[Decided, NDArray[np.intp]]]],
    bootstrap_seed: int,
) -> tuple[RateTable, Share]:
    """One criterion against the baseline on the tokens of one bin."""
    rates: list[SeedRates] = []
    right: list[int] = []
    judged: list[int] = []
    own = each.question.protocol == OWN
    for seed, arms in zip(seeds, placed, strict=True):
        (ours, here), (theirs, there) = (
            arms[arm] for arm in (each.criterion_arm, each.baseline_arm)
        )
        rates.append(
            SeedRates.of(seed, ours.pair(row, 0, here == at), theirs.pair(row, 0, there == at))
        )
        foretold = ours.foretold(row)[here == at]
        right.append(0 if own else int(foretold.sum()))
        judged.append(0 if own else len(foretold))
    table = RateTable(each.question, tuple(rates), bootstrap_seed)
    return table, Share.of(right, judged, bootstrap_seed)
