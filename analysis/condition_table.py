"""The same rates on parts of the tokens outside: what a criterion is right about, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from .bins import UNKNOWN, bin_of, interval_label, quantile_edges
from .comparison import arms_of, comparable
from .conditions import CONDITIONS, Condition, check_condition, conditions_named
from .counting import Decided, Judged, decisions
from .engine import Engine, Progress, Span, read_arms
from .kernel import blocks_of
from .question import OWN, Question, QuestionError, Resolved, decider
from .rates import RateTable, SeedRates
from .responses import Responses, read_responses
from .result import Result
from .shares import Share
from .tables import recorded_share, unlike_weights

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
        Tokens of the bin whose sign of ΔD it foretold, as far as that is determined; over nothing
        under `own`.
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
    engine: Engine | None = None,
    recompute: bool = False,
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
        Told the number of rows of every span of the dump that is done.
    engine : Engine, optional
        Where to read: by default on the cores of this machine.
    recompute : bool
        From the vectors even where D and Ḋ are recorded.

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
    reader = _Reader(
        replace(base.question, protocol=""),
        tuple(each.question.criterion for each in resolved.values()),
        tuple(each.name for each in conditions),
        recompute or any(each.vectors for each in conditions),
        {
            (arm, seed): read_responses(dump, arm, seed)
            for arm in arms
            for seed in seeds
            if any(each.responses for each in conditions)
        },
    )
    spans = read_arms(reader, dump, arms, engine=engine, progress=progress)
    joined = {key: _Read.joined(some) for key, some in spans.items()}
    read = [{arm: joined[arm, seed] for arm in arms} for seed in seeds]
    judging = _Judging(
        seeds,
        bootstrap_seed,
        recorded_share(dump),
        unlike_weights(each.decided.pair(0, 0) for each in joined.values()),
    )
    parts: list[Part] = []
    for place, condition in enumerate(conditions):
        known = [seed[base.baseline_arm].values[place] for seed in read]
        binning = _Binning.of(condition, known, bins)
        placed = [
            {arm: (each.decided, binning.place(each.values[place])) for arm, each in seed.items()}
            for seed in read
        ]
        for at, (label, low, high) in binning.bins.items():
            for row, (name, each) in enumerate(resolved.items()):
                table, accuracy = judging.judge(each, row, at, placed)
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


@dataclass(frozen=True, eq=False)
class _Read:
    """The tokens outside of a span, or of a seed, and their value of every condition."""

    decided: Decided
    values: list[NDArray[Any]]

    @classmethod
    def joined(cls, parts: Sequence[_Read]) -> _Read:
        """Join spans in their order."""
        criteria = len(parts[0].decided.judged.keep)
        return cls(
            Decided.joined([each.decided for each in parts], criteria),
            [
                np.concatenate(values)
                for values in zip(*(each.values for each in parts), strict=True)
            ],
        )


@dataclass(frozen=True)
class _Reader:
    """Reads a span, criteria and conditions by name; may be pickled."""

    region: Question
    criteria: tuple[str, ...]
    conditions: tuple[str, ...]
    recompute: bool
    responses: Mapping[tuple[str, int], Responses] = field(default_factory=dict)

    def __call__(self, span: Span) -> _Read:
        """Decide about every token outside, and find its values."""
        deciders = [decider(name) for name in self.criteria]
        conditions = conditions_named(self.conditions)
        columns = dict.fromkeys(column for each in conditions for column in each.columns)
        responses = self.responses.get((span.part.arm, span.part.seed))
        unknown = 0
        blocks: list[Judged] = []
        values: list[list[NDArray[Any]]] = [[np.empty(0)] for _ in conditions]
        for block in blocks_of(span, self.region, deciders, columns, recompute=self.recompute):
            unknown += block.unknown
            if (found := block.found) is not None:
                blocks.append(Judged.of(found, decisions(found.tokens, self.region, deciders)))
                for known, each in zip(values, conditions, strict=True):
                    known.append(each.values(found, responses))
        judged = Judged.joined(blocks, len(deciders))
        return _Read(
            Decided(span.rows_seen, unknown, judged), [np.concatenate(known) for known in values]
        )


@dataclass(frozen=True)
class _Judging:
    """Judges criteria on the tokens of one bin after the other."""

    seeds: Sequence[int]
    bootstrap_seed: int
    share: float
    weighted: bool

    def judge(
        self,
        each: Resolved,
        row: int,
        at: int,
        placed: list[dict[str, tuple[Decided, NDArray[np.intp]]]],
    ) -> tuple[RateTable, Share]:
        """One criterion against the baseline on the tokens of one bin."""
        rates: list[SeedRates] = []
        right: list[int] = []
        judged: list[int] = []
        own = each.question.protocol == OWN
        for seed, arms in zip(self.seeds, placed, strict=True):
            (ours, here), (theirs, there) = (
                arms[arm] for arm in (each.criterion_arm, each.baseline_arm)
            )
            pairs = (ours.pair(row, 0, here == at), theirs.pair(row, 0, there == at))
            rates.append(SeedRates.of(seed, *pairs, weighted=self.weighted))
            clear = (here == at) & ~ours.judged.undetermined
            right.append(0 if own else int(np.count_nonzero(ours.foretold(row) & clear)))
            judged.append(0 if own else int(np.count_nonzero(clear)))
        table = RateTable(each.question, tuple(rates), self.bootstrap_seed, self.share)
        return table, Share.of(right, judged, self.bootstrap_seed)
