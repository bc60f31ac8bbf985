"""One question asked many times over of one dump: by threshold, by K, by protocol.

A dump is read once for all points of a sweep, and every point is counted as `deltad table`
counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltad.dumps.columns import VECTORS

from .counting import (
    Decided,
    Judged,
    Outside,
    Progress,
    checked_batches,
    columns_for,
    decisions,
    outside_of,
)
from .question import OWN, Question, QuestionError, Resolved, answerable_protocols, unjudged
from .rates import SIDES, RateTable, SeedRates
from .result import Result
from .shares import Share

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
        Tokens outside whose sign of ΔD each side foretold, by `SIDES`; over nothing under
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
        Told the number of rows of every block read.

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
        return _collect(
            dump, over, {k: known for k in ks}, {}, known.question, bootstrap_seed, progress
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
    return _collect(dump, over, resolved, refused, common, bootstrap_seed, progress)


def _collect(
    dump: Dump,
    over: str,
    resolved: dict[float | str, Resolved] | dict[float, Resolved],
    refused: dict[str, str],
    question: Question,
    bootstrap_seed: int,
    progress: Progress | None,
) -> Sweep:
    """Read every arm once and put the points together."""
    first = next(iter(resolved.values()))
    without_delta = unjudged(dump, [arm for each in resolved.values() for arm in each.arms])
    post = not without_delta
    rates: dict[Any, list[SeedRates]] = {value: [] for value in resolved}
    right: dict[Any, list[tuple[int, int, int]]] = {value: [] for value in resolved}
    for seed in dump.seeds(first.criterion_arm):
        arms = dict.fromkeys(arm for each in resolved.values() for arm in each.arms)
        read: dict[tuple[str, Any], Decided] = {}
        for arm in arms:
            mine = {value: each for value, each in resolved.items() if arm in each.arms}
            if over == PROTOCOL:  # the region is the same: one count serves all of them
                value, each = next(iter(mine.items()))
                found = _read(dump, arm, seed, over, {value: each}, progress, post=post)[value]
                read |= {(arm, value): found for value in mine}
            else:
                found_by = _read(dump, arm, seed, over, mine, progress, post=post)
                read |= {(arm, value): each for value, each in found_by.items()}
        for value, each in resolved.items():
            ours, theirs = (read[arm, value] for arm in (each.criterion_arm, each.baseline_arm))
            rates[value].append(SeedRates.of(seed, ours.pair(0, 1), theirs.pair(0, 1)))
            right[value].append(
                (
                    len(ours.delta_d),
                    int(np.count_nonzero(theirs.foretold(1))),
                    int(np.count_nonzero(ours.foretold(0))),
                )
            )
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
        table = RateTable(each.question, tuple(rates[value]), bootstrap_seed)
        points.append(Point(value, table, accuracy))
    return Sweep(over, question, tuple(points), refused, bootstrap_seed, without_delta)


def _read(
    dump: Dump,
    arm: str,
    seed: int,
    over: str,
    points: dict[Any, Resolved],
    progress: Progress | None,
    *,
    post: bool,
) -> dict[Any, Decided]:
    """One seed of one arm at all points: the criterion's decisions first, then the baseline's."""
    first = next(iter(points.values()))
    pair = (first.criterion, first.baseline)
    widest = min((each.question for each in points.values()), key=lambda each: each.threshold)
    without_vectors = 0
    blocks: dict[Any, list[Judged]] = {value: [] for value in points}
    columns = columns_for(*pair, post=post)
    for batch, metadata in checked_batches(dump, arm, seed, columns, progress=progress):
        without_vectors += int(np.count_nonzero(~batch.vectors))
        if over == TOP_K:
            for value, each in points.items():
                found = outside_of(shortened(batch, value), metadata, each.question)
                if found is not None:
                    blocks[value].append(_judged(found, each))
        elif (found := outside_of(batch, metadata, widest)) is not None:
            for value, each in points.items():
                blocks[value].append(_judged(found, each))
    seen = dump.rows_seen(arm, seed)
    return {
        value: Decided.of(seen, without_vectors, known, len(pair))
        for value, known in blocks.items()
    }


def _judged(found: Outside, at: Resolved) -> Judged:
    """ΔD and decisions of those of some tokens that are outside at a point."""
    beyond = found.d_pre > at.question.threshold
    keep = decisions(found.tokens, at.question, (at.criterion, at.baseline))
    return found.delta_d[beyond], keep[:, beyond]


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
