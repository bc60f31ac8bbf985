"""One question asked many times over of one dump: by threshold, by K, by protocol.

A dump is read once for all points of a sweep, and every point is counted as `deltad table`
counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltad.dumps import check_batch, part_batches
from deltad.dumps.columns import VECTORS

from .blocks import unknown_rows, where_recorded
from .counting import Decided, Decider, Judged, Outside, columns_for, decisions, outside_of
from .engine import Engine, Progress, Span, read_arms
from .kernel import blocks_of
from .question import (
    OWN,
    Question,
    QuestionError,
    Resolved,
    answerable_protocols,
    decider,
    unjudged,
)
from .rates import SIDES, RateTable, SeedRates
from .result import Result
from .screening import BLOCK_ROWS
from .shares import Share
from .tables import recorded_share, unlike_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from deltad.dumps import Batch, Dump

THRESHOLD: Final = "threshold"
TOP_K: Final = "top-k"
PROTOCOL: Final = "protocol"
OVER: Final = (THRESHOLD, TOP_K, PROTOCOL)
"""What a question can be swept over."""

THRESHOLDS: Final = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
"""δ of a sweep by default: nats for KL, a probability for TV."""

TOP_KS: Final = (1, 2, 3, 5, 8, 12, 20, 32, 50, 64, 100, 128)
"""K' of a sweep by default, up to the dump's K, which is always the last."""


@dataclass(frozen=True, eq=False)
class Point:
    """One point of a sweep.

    Attributes
    ----------
    value : float or str
        δ, K' or the protocol.
    table : RateTable
        The pair of criteria there, as `rate_table` counts it.
    accuracy : dict of str to Share
        Tokens outside whose sign of ΔD each side foretold, by `SIDES`, as far as ΔD is
        determined; over nothing under
        `own`, where a masked token has no update of its own to be judged by.
    """

    value: float | str
    table: RateTable
    accuracy: dict[str, Share]


@dataclass(frozen=True, eq=False)
class Sweep(Result):
    """One question at many points.

    Attributes
    ----------
    over : {"threshold", "top-k", "protocol"}
        What differs between the points.
    question : Question
        What they have in common.
    points : tuple of Point
        Thresholds and K' ascending; `shared:none` and `own` first among protocols.
    refused : dict of str to str
        Points that the dump cannot answer, and why.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    unjudged : str
        Why there is no ΔD, where the dump has no policy after the update; empty otherwise. All
        that ΔD decides is without meaning then, and the result's forms leave it out.
    """

    over: str
    question: Question
    points: tuple[Point, ...]
    refused: dict[str, str]
    bootstrap_seed: int = 0
    unjudged: str = ""

    def columns(self) -> dict[str, list[Any]]:
        """A row a point, the columns of `SWEEP_COLUMNS`."""
        from .forms.sweeps import sweep_columns

        return sweep_columns(self)

    def text(self) -> RenderableType:
        """A row a point, and what was refused."""
        from .forms.sweeps import sweep_text

        return sweep_text(self)

    def to_json_object(self) -> dict[str, Any]:
        """The same rows as objects."""
        from .forms.sweeps import sweep_object

        return sweep_object(self)

    def figure(self) -> Figure:
        """Rates, sign accuracy and counts along the sweep.

        Raises
        ------
        QuestionError
            There is no ΔD.
        """
        if self.unjudged:
            raise QuestionError(self.unjudged)
        from .figures.sweeps import sweep_figure

        return sweep_figure(self)


def sweep(
    dump: Dump,
    question: Question | None = None,
    *,
    over: str = THRESHOLD,
    values: Sequence[float | str] = (),
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
    recompute: bool = False,
) -> Sweep:
    """Ask one question at many points, reading the dump once.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        Its own threshold or protocol is not looked at where that is swept over.
    over : {"threshold", "top-k", "protocol"}
        What to vary. K' ≤ K: what a dump recorded with the K' likeliest ids would answer, tails
        and ΔD recomputed; a sampled token that is not among them comes with its scalar
        log-probs, as it would there. D on fewer ids is smaller, so a dump that stores only
        tokens above some D holds every token that is outside at K'.
    values : sequence of float or str
        By default `THRESHOLDS`, `TOP_KS` up to K, or every protocol.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    engine : Engine, optional
        Where to count: by default on the cores of this machine.
    recompute : bool
        From the vectors even where D and Ḋ are recorded.

    Returns
    -------
    Sweep
        At least one point; those that the dump cannot answer are named in `refused`.

    Raises
    ------
    QuestionError, CriterionError
        The dump can answer no point, or a value is none.
    DumpError
        A row holds an impossible value.
    """
    question = question or Question()
    if over not in OVER:
        raise QuestionError(f"`over` must be one of {', '.join(OVER)}, got {over!r}")
    if over == TOP_K:
        known = question.resolve(dump, needs=("pre",))
        ks = _top_ks(dump, values)
        points: dict[float | str, Resolved] = {k: known for k in ks}
        return _collect(
            dump, over, points, {}, known.question, bootstrap_seed, progress, engine, True
        )
    if over == PROTOCOL:
        found, refused = _protocols(dump, question, [str(value) for value in values])
        asked: dict[float | str, Question] = {
            name: replace(question, protocol=name) for name in found
        }
    else:
        asked = {value: replace(question, threshold=value) for value in _thresholds(values)}
        refused = {}
    resolved: dict[float | str, Resolved] = {}
    for value, each in asked.items():
        try:
            resolved[value] = each.resolve(dump, needs=("pre",))
        except QuestionError as error:
            refused[_named(value)] = str(error)
    if not resolved:
        raise QuestionError(
            f"{dump.path} answers at no {over} of the sweep; at {next(iter(refused))}: "
            f"{next(iter(refused.values()))}"
        )
    common = next(iter(resolved.values())).question
    return _collect(
        dump, over, resolved, refused, common, bootstrap_seed, progress, engine, recompute
    )


def _collect(
    dump: Dump,
    over: str,
    resolved: dict[float | str, Resolved],
    refused: dict[str, str],
    question: Question,
    bootstrap_seed: int,
    progress: Progress | None,
    engine: Engine | None,
    recompute: bool,
) -> Sweep:
    """Read every arm once and put the points together."""
    first = next(iter(resolved.values()))
    arms = tuple(dict.fromkeys(arm for each in resolved.values() for arm in each.arms))
    without_delta = unjudged(dump, arms)
    # Under every protocol the region is the same: one count serves all of them.
    asked = (
        {None: first.question}
        if over == PROTOCOL
        else {value: each.question for value, each in resolved.items()}
    )
    reader = _Reader(over, tuple(asked.items()), post=not without_delta, recompute=recompute)
    parts = read_arms(reader, dump, arms, engine=engine, progress=progress)
    read = {
        key: [Decided.joined(each, 2) for each in zip(*spans, strict=True)]
        for key, spans in parts.items()
    }
    places = {value: 0 if over == PROTOCOL else at for at, value in enumerate(resolved)}
    weighted = unlike_weights(each.pair(0, 1) for some in read.values() for each in some)
    rates: dict[Any, list[SeedRates]] = {value: [] for value in resolved}
    right: dict[Any, list[tuple[int, int, int]]] = {value: [] for value in resolved}
    for seed in dump.seeds(first.criterion_arm):
        for value, each in resolved.items():
            ours, theirs = (
                read[arm, seed][places[value]] for arm in (each.criterion_arm, each.baseline_arm)
            )
            rates[value].append(
                SeedRates.of(seed, ours.pair(0, 1), theirs.pair(0, 1), weighted=weighted)
            )
            clear, there = ~ours.judged.undetermined, ~theirs.judged.undetermined
            right[value].append(
                (
                    int(np.count_nonzero(clear)),
                    int(np.count_nonzero(theirs.foretold(1) & there)),
                    int(np.count_nonzero(ours.foretold(0) & clear)),
                )
            )
    share = recorded_share(dump)
    points = []
    for value, each in resolved.items():
        own = each.question.protocol == OWN
        judged = [tokens for tokens, _, _ in right[value]]
        accuracy = {
            side: Share.undefined(len(judged))
            if own or without_delta
            else Share.of([row[at] for row in right[value]], judged, bootstrap_seed)
            for at, side in enumerate(SIDES, 1)
        }
        table = RateTable(each.question, tuple(rates[value]), bootstrap_seed, share)
        points.append(Point(value, table, accuracy))
    return Sweep(over, question, tuple(points), refused, bootstrap_seed, without_delta)


@dataclass(frozen=True)
class _Reader:
    """Reads a span at all points; may be pickled.

    Attributes
    ----------
    over : {"threshold", "top-k", "protocol"}
        What differs between the points.
    points : tuple of (value, Question)
        One pair of criteria at every point.
    post : bool
        Whether the policy after the update was read.
    recompute : bool
        From the vectors even where D and Ḋ are recorded; for K' there is no other way.
    """

    over: str
    points: tuple[tuple[Any, Question], ...]
    post: bool
    recompute: bool

    def __call__(self, span: Span) -> list[Decided]:
        """The tokens outside at every point: the criterion's decisions, then the baseline's."""
        first = self.points[0][1]
        pair = (decider(first.criterion), decider(first.baseline))
        blocks: list[list[Judged]] = [[] for _ in self.points]
        unknown = 0
        for found, without in self._found(span, pair):
            unknown += without
            for known, (_, question), each in zip(blocks, self.points, found, strict=True):
                if each is not None:
                    keep = decisions(each.tokens, question, pair)
                    known.append(Judged.of(each, keep)[each.d_pre > question.threshold])
        return [Decided(span.rows_seen, unknown, Judged.joined(known, 2)) for known in blocks]

    def _found(
        self, span: Span, pair: tuple[Decider, Decider]
    ) -> Iterator[tuple[list[Outside | None], int]]:
        """The tokens of every block that may be outside at each point, and rows without D."""
        if self.over != TOP_K:
            widest = min((each for _, each in self.points), key=lambda each: each.threshold)
            for block in blocks_of(span, widest, pair, post=self.post, recompute=self.recompute):
                yield [block.found] * len(self.points), block.unknown
            return
        # D on fewer ids is smaller but for rounding, which the first look does not know.
        columns = columns_for(*pair, post=self.post)
        names, metadata = where_recorded(span, columns), span.part.metadata
        for batch in part_batches(
            span.part, columns=names, batch_rows=BLOCK_ROWS, groups=span.groups
        ):
            check_batch(batch, metadata, names)
            found = [
                outside_of(shortened(batch, value), metadata, question)
                for value, question in self.points
            ]
            yield found, unknown_rows(batch, metadata)


def shortened(batch: Batch, top_k: int) -> Batch:
    """The block as an engine that returns fewer ids would have left it.

    Parameters
    ----------
    batch : Batch
        Checked rows.
    top_k : int
        K' of at least 1; all there are where it exceeds K.

    Returns
    -------
    Batch
        The first K' of every vector, which are in rank order. Where that cuts off the sampled
        token, its scalar log-probs stand for it: within 1e-4 nats of the entry.
    """
    columns = {
        name: values[:, :top_k] if name in VECTORS else values
        for name, values in batch.columns.items()
    }
    return replace(batch, columns=columns)


def _thresholds(values: Sequence[float | str]) -> list[float]:
    """The thresholds asked for, ascending, each once."""
    numbers = []
    for value in values or THRESHOLDS:
        try:
            numbers.append(float(value))
        except ValueError:
            raise QuestionError(f"a threshold must be a number, got {value!r}") from None
    return sorted(set(numbers))


def _top_ks(dump: Dump, values: Sequence[float | str]) -> list[float]:
    """The K' asked for, ascending, each once."""
    most = dump.top_k
    if not values:
        return [*(k for k in TOP_KS if k < most), most]
    found = []
    for value in values:
        try:
            number = int(value)
            whole = number == float(value)
        except (ValueError, OverflowError):
            whole = False
        if not whole or not 1 <= number <= most:
            raise QuestionError(
                f"K' must be a whole number from 1 to the dump's K = {most}, got {value!r}"
            )
        found.append(number)
    return sorted(set(found))


def _protocols(
    dump: Dump, question: Question, names: list[str]
) -> tuple[list[str], dict[str, str]]:
    """The protocols asked for, or all that the dump can answer and those that it cannot."""
    if names:
        return list(dict.fromkeys(names)), {}
    return answerable_protocols(dump, question)


def _named(value: float | str) -> str:
    """A point's value as an option spells it."""
    return value if isinstance(value, str) else f"{value:g}"
