"""One pair of criteria at many points, many criteria, or parts of the tokens: a pair per row.

Whatever is asked, the dump is read once, by `reading`, and counted by `pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltad.analysis import statistics
from deltad.analysis.backends import Backend, Progress
from deltad.analysis.pairs import (
    SIDES,
    Estimate,
    Pair,
    accuracy_columns,
    asked,
    base_object,
    base_text,
    bootstrap_object,
    bootstrap_text,
    named,
    pair_columns,
    pair_of,
    unknown_text,
)
from deltad.analysis.question import (
    OWN,
    Question,
    QuestionError,
    Resolved,
    answerable_protocols,
    arms_of,
    check_columns,
    comparable,
    unjudged,
)
from deltad.analysis.reading import Ask, read, unlike_weights
from deltad.analysis.result import (
    Column,
    Result,
    Table,
    counted,
    number,
    p_value,
    region,
)
from deltad.analysis.values import CONDITIONS, UNKNOWN, Value, conditions_named
from deltad.masks import Rule

from .rates import (
    APART,
    BASE,
    CONTRACTING,
    DIFFERENCE,
    GUESS,
    LOWER,
    OUTSIDE,
    RATES,
    SIGN_TEST,
    UNSAFE,
    in_text,
    key,
    known,
    pair_in,
    pair_keys,
    sided,
)

if TYPE_CHECKING:
    from deltad.dumps import Dump

THRESHOLD: Final = "threshold"
TOP_K: Final = "top-k"
PROTOCOL: Final = "protocol"
OVER: Final = (THRESHOLD, TOP_K, PROTOCOL)
"""What a question can be swept over."""

THRESHOLDS: Final = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
"""δ of a sweep by default: nats for KL, a probability for TV."""

TOP_KS: Final = (1, 2, 3, 5, 8, 12, 20, 32, 50, 64, 100, 128)
"""K' of a sweep by default, up to the dump's K, which is always the last."""

DEFAULT_BINS: Final = 4

PLACES: Final = ("outside", "inside", "without_topk")
"""Where a masked token may lie: D above δ, D up to δ, D unknown."""


@dataclass(frozen=True, eq=False, repr=False)
class PairTable(Result):
    """Pairs of criteria, one per row.

    Attributes
    ----------
    question : Question
        What the rows have in common, its protocol settled.
    rows : tuple
        Each with its `pair`.
    refused : dict of str to str
        Rows that the dump cannot answer, and why.
    unjudged : str
        Why there is no ΔD, where the dump has no policy after the update; empty otherwise.
    """

    question: Question
    rows: tuple[Any, ...]
    refused: Mapping[str, str]
    unjudged: str = ""

    @property
    def first(self) -> Pair:
        """The first row's pair."""
        found: Pair = self.rows[0].pair
        return found

    def figure(self) -> Any:
        """Draw it; QuestionError where there is no ΔD."""
        if self.unjudged:
            raise QuestionError(self.unjudged)
        return super().figure()

    def objects(self) -> dict[str, Any]:
        """What was asked."""
        return {
            **asked(self.question),
            "baseline": self.question.names[1],
            "seeds": len(self.first.seeds),
            "bootstrap": bootstrap_object(self.first.bootstrap_seed),
        }

    def _notes(self) -> Iterable[str]:
        """How intervals were made, what is unknown, what was left out."""
        if self.unjudged:
            yield f"What a mask does is unknown: {self.unjudged}."
        else:
            yield bootstrap_text(self.first.bootstrap_seed)
            if self.question.protocol == OWN:
                yield (
                    "Under `own` a masked token has no update of its own, so no sign is judged: "
                    "ask for `shared:` and an arm."
                )
        yield from unknown_text(row.pair for row in self.rows)
        yield from (f"{name} is left out: {why}" for name, why in self.refused.items())


@dataclass(frozen=True, eq=False)
class Point:
    """One point of a sweep: δ, K' or the protocol, and the pair there."""

    over: str
    value: float | str
    pair: Pair

    def accuracy(self, side: str) -> Estimate:
        """Tokens outside whose sign of ΔD a side predicted."""
        return self.pair.accuracy(side)


class Sweep(PairTable):
    """One question at many points: δ or K' ascending, or protocols; `rows` are `Point`s."""

    @property
    def over(self) -> str:
        """What differs between the points: "threshold", "top-k" or "protocol"."""
        found: str = self.rows[0].over
        return found

    def objects(self) -> dict[str, Any]:
        """What was asked, and the rows; what is not the same for all stands in these alone."""
        found = super().objects()
        found.pop(self.over, None)
        return {
            **found, "criterion": self.question.names[0], "over": self.over,
            "points": self.records(), "refused": self.refused, "unjudged": self.unjudged or None,
        }  # fmt: skip

    def parts(self) -> Iterable[str | Table]:
        """A row per point: counts, rates, predicted signs."""
        yield self.heading()
        yield Table.of(UNJUDGED if self.unjudged else SWEPT, self.rows)
        if not self.unjudged:
            yield Table.of(SIGNS, self.rows)
        yield from self._notes()

    def heading(self) -> str:
        """What was asked, of how many seeds, in one line."""
        words = region(self.question)
        if self.over == THRESHOLD:
            words = words.replace(f"{self.question.threshold:g}", "δ")
        words = words.replace("top-K", "top-K'") if self.over == TOP_K else words
        parts = [" against ".join(self.question.names), f"outside: {words}"]
        parts += [self.question.protocol] if self.over != PROTOCOL else []
        return " · ".join([*parts, counted(len(self.first.seeds), "seed")])


@dataclass(frozen=True, eq=False)
class Compared:
    """One criterion of a comparison.

    Attributes
    ----------
    name : str
        As options name it.
    masked : dict of str to int
        Stored tokens that it masks, by `PLACES`. A row without top-K log-probs is not decided by
        a criterion that needs them.
    weight : Estimate
        Σ weight / tokens outside: a criterion weighs 1 where it keeps.
    pair : Pair
        It against the baseline.
    holm_p : float
        Sign-test p against the baseline, corrected for the number of criteria that differ from it
        in some seed; NaN for the others.
    """

    name: str
    masked: dict[str, int]
    weight: Estimate
    pair: Pair
    holm_p: float = math.nan

    @property
    def outside(self) -> Estimate:
        """Tokens outside whose sign of ΔD it predicted."""
        return self.pair.accuracy("criterion")

    @property
    def disagreement(self) -> Estimate:
        """The same of those that exactly one of it and the baseline masks."""
        return self.pair.accuracy("criterion", "disagreement")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(PairTable):
    """Criteria side by side on one dump; `rows` are `Compared`, the baseline first.

    Attributes
    ----------
    alike : ndarray of int, shape (criterion, criterion)
        Tokens outside that two criteria decide alike; all tokens outside on the diagonal.
    stored : int
        Rows; where a dump holds only some tokens, less than its tokens.
    agreements : bool
        Whether the text says who agrees with whom.
    """

    alike: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    stored: int = 0
    agreements: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the criteria, the baseline's first."""
        return tuple(each.name for each in self.rows)

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Share of the tokens outside that two criteria decide alike; NaN over none."""
        tokens = self.first.outside.tokens
        return self.alike / tokens if tokens else np.full(self.alike.shape, np.nan)

    def __getitem__(self, name: str) -> Compared:
        """One criterion by name."""
        found: Compared = self.rows[self.names.index(name)]
        return found

    def objects(self) -> dict[str, Any]:
        """A row per criterion, and the agreement matrix."""
        first, alike = self.first, self.alike.tolist()
        return {
            **super().objects(), "tokens": first.tokens, "rows": self.stored,
            "rows_without_topk": first.without_topk, "base": base_object(first),
            "criteria": self.records(),
            "agreement": {"criteria": self.names, "tokens": first.outside.tokens, "alike": alike},
            "refused": self.refused, "unjudged": self.unjudged or None,
        }  # fmt: skip

    def parts(self) -> Iterable[str | Table]:
        """What each criterion masks and predicts, the pairs, who agrees with whom."""
        pair = self.first
        yield (
            f"criteria against {self.question.names[1]} · outside: {region(self.question)} · "
            f"{self.question.protocol}"
        )
        size = (
            f"{counted(len(pair.seeds), 'seed')}, {counted(pair.tokens, 'token')}, {self.stored} "
            f"stored, {counted(pair.outside.tokens, 'token')} outside"
        )
        yield size if self.unjudged else f"{size}: {base_text(pair.outside)}"
        yield Table.of(MASKED, self.rows)
        if not self.unjudged:
            yield Table.of(PREDICTED, self.rows)
            yield Table.of(AGAINST, self.rows[1:])
        if self.agreements:
            places = range(1, len(self.names) + 1)
            yield Table(
                ["decided alike, of the tokens outside", *map(str, places)],
                [
                    [f"{at} {name}", *(number(float(share)) for share in self.agreement[at - 1])]
                    for at, name in zip(places, self.names, strict=True)
                ],
            )
        if self.stored < pair.tokens:
            yield (
                f"Inside: of the {self.stored} tokens that the dump stores, not of all "
                f"{pair.tokens}. Holm p: over the criteria of this table."
            )
        yield from self._notes()


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
    pair : Pair
        It against the baseline on the bin's tokens; `seen` are those of all bins.
    """

    condition: str
    label: str
    low: float
    high: float
    criterion: str
    pair: Pair

    @property
    def accuracy(self) -> Estimate:
        """Tokens of the bin whose sign of ΔD it predicted."""
        return self.pair.accuracy("criterion")


@dataclass(frozen=True, eq=False, repr=False)
class ConditionTable(PairTable):
    """Rates and sign accuracy by one or several conditions; `rows` are `Part`s.

    They go by condition, bin and criterion. No token outside is left out: those without a value
    are in a bin of their own, and a name that no token has is shown with no tokens.

    Attributes
    ----------
    conditions : tuple of Value
        In the order asked for.
    criteria : tuple of str
        The baseline first.
    bins : int
        Bins asked for; tied numbers may leave fewer.
    """

    conditions: tuple[Value, ...] = ()
    criteria: tuple[str, ...] = ()
    bins: int = DEFAULT_BINS

    def of(self, condition: str, criterion: str) -> list[Part]:
        """The bins of one condition and criterion."""
        wanted = (condition, criterion)
        return [part for part in self.rows if (part.condition, part.criterion) == wanted]

    def objects(self) -> dict[str, Any]:
        """What was asked, and the rows."""
        return {
            **super().objects(),
            "bins_asked": self.bins,
            "conditions": {each.name: each.meaning for each in self.conditions},
            "rows": self.records(),
        }

    def parts(self) -> Iterable[str | Table]:
        """A table per condition."""
        question = self.question
        names = ", ".join(self.criteria[1:]) or question.names[1]
        yield (
            f"{names} against {question.names[1]} · outside: {region(question)} · "
            f"{question.protocol}"
        )
        for condition in self.conditions:
            yield f"by {condition.name}: {condition.meaning}"
            yield Table.of(BINNED, [row for row in self.rows if row.condition == condition.name])
        yield from self._notes()
        for condition in self.conditions:
            bins = self.of(condition.name, self.criteria[0])
            numbers = [part for part in bins if part.low <= part.high]
            if not condition.names and len(numbers) < self.bins:
                yield (
                    f"{condition.name}: {counted(len(numbers), 'bin')} of the {self.bins} asked "
                    "for, since tied numbers lie in one"
                )
            for part in bins:
                if part.label == "unknown" and condition.responses:
                    tokens = counted(part.pair.outside.tokens, "token")
                    yield (
                        f"{condition.name}: unknown behind the first position where the dump does "
                        f"not hold whole responses ({tokens})"
                    )


def sweep(
    dump: Dump,
    question: Question | None = None,
    *,
    over: str = THRESHOLD,
    values: Sequence[float | str] = (),
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
) -> Sweep:
    """Ask one question at many points, reading the dump once.

    Parameters
    ----------
    dump, question, bootstrap_seed, progress, backend, recompute
        As in `rate_table`; the question's own threshold or protocol is not looked at where that
        is swept over.
    over : {"threshold", "top-k", "protocol"}
        What to vary. K' ≤ K: what a dump recorded with the K' likeliest ids would answer, tails
        and ΔD recomputed; a sampled token that is not among them comes with its scalar
        log-probs, as it would there. D on fewer ids is smaller, so a dump that stores only
        tokens above some D holds every token that is outside at K'.
    values : sequence of float or str
        By default `THRESHOLDS`, `TOP_KS` up to K, or every protocol.

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
    asked = question or Question()
    if over not in OVER:
        raise QuestionError(f"`over` must be one of {', '.join(OVER)}, got {over!r}")
    refused: dict[str, str] = {}
    resolved: dict[float | str, Resolved] = {}
    if over == PROTOCOL:
        names = [str(value) for value in values]
        found, refused = answerable_protocols(dump, asked, names, needs=("pre",))
        resolved.update(found.items())
    elif over == TOP_K:
        known = asked.resolve(dump, needs=("pre",))
        resolved = dict.fromkeys(_top_ks(dump, values), known)
    else:
        for value in _thresholds(values):
            try:
                resolved[value] = replace(asked, threshold=value).resolve(dump, needs=("pre",))
            except QuestionError as error:
                refused[f"{value:g}"] = str(error)
        if not resolved:
            name, why = next(iter(refused.items()))
            raise QuestionError(
                f"{dump.path} answers at no threshold of the sweep; at {name}: {why}"
            )
    first = next(iter(resolved.values()))
    arms = arms_of({str(value): each for value, each in resolved.items()})
    without_delta = unjudged(dump, arms)
    points = {
        PROTOCOL: (),
        TOP_K: tuple((first.question.threshold, int(value)) for value in resolved if over == TOP_K),
        THRESHOLD: tuple((each.question.threshold, None) for each in resolved.values()),
    }[over]
    least = min((threshold for threshold, _ in points), default=first.question.threshold)
    got = read(
        dump,
        arms,
        Ask(
            replace(first.question, threshold=least), first.question.rules, points,
            post=not without_delta, recompute=recompute,
        ),
        backend=backend,
        progress=progress,
    )  # fmt: skip
    weighted = unlike_weights([each for some in got.values() for each in some])
    rows = tuple(
        Point(
            over,
            value,
            pair_of(
                each, got, point=at if points else 0, weighted=weighted,
                bootstrap_seed=bootstrap_seed,
            ),
        )
        for at, (value, each) in enumerate(resolved.items())
    )  # fmt: skip
    return Sweep(first.question, rows, refused, without_delta)


def compare(
    dump: Dump,
    question: Question | None = None,
    criteria: Sequence[str | Rule] = (),
    *,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
    agreements: bool = False,
) -> Comparison:
    """Compare criteria with a baseline, reading the dump once for all of them.

    Parameters
    ----------
    dump, question, bootstrap_seed, progress, backend, recompute
        As in `rate_table`; the question's own criterion is not looked at. Under `own` every
        criterion needs an arm that applied its mask.
    criteria : sequence of str or Rule
        As `deltad.masks.rule` takes them; by default all of the region's divergence that the
        dump can answer. The baseline takes part in any case.
    agreements : bool
        Say in text who agrees with whom.

    Returns
    -------
    Comparison
        The baseline and at least no one else.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer for the baseline or for a criterion that was asked for.
    DumpError
        A row holds an impossible value.
    """
    resolved, refused = comparable(dump, question or Question(), criteria, needs=("pre",))
    base = next(iter(resolved.values()))
    arms = arms_of(resolved)
    without_delta = unjudged(dump, arms)
    rules = tuple(each.question.rules[0] for each in resolved.values())
    got = read(
        dump,
        arms,
        Ask(
            base.question, rules, post=not without_delta, recompute=recompute, everywhere=True
        ),
        backend=backend,
        progress=progress,
    )  # fmt: skip
    seeds = dump.seeds(base.baseline_arm)
    mine = [got[base.baseline_arm, seed][0] for seed in seeds]
    outside_masked = np.sum([(~each.keep).sum(axis=1) for each in mine], axis=0)
    elsewhere = np.sum([each.elsewhere for each in mine], axis=0)
    masked = np.stack([outside_masked, *elsewhere])
    weighted = unlike_weights([each for some in got.values() for each in some])
    pairs = [
        pair_of(each, got, at, 0, weighted=weighted, bootstrap_seed=bootstrap_seed)
        for at, each in enumerate(resolved.values())
    ]
    corrected = statistics.holm([pair.paired.sign_test_p for pair in pairs]).tolist()
    outside = [each.keep.shape[1] for each in mine]
    found = [
        Compared(
            name,
            dict(zip(PLACES, masked[:, at].tolist(), strict=True)),
            Estimate.of([each.soft[at] for each in mine], outside, bootstrap_seed),
            pairs[at],
            corrected[at],
        )
        for at, name in enumerate(resolved)
    ]
    return Comparison(
        base.question,
        tuple(found),
        refused,
        without_delta,
        np.sum([(each.keep[:, None] == each.keep[None]).sum(axis=2) for each in mine], axis=0),
        sum(dump.rows(base.baseline_arm, seed) for seed in seeds),
        agreements,
    )


def condition_table(
    dump: Dump,
    question: Question | None = None,
    by: Sequence[str] = tuple(CONDITIONS),
    criteria: Sequence[str | Rule] = (),
    *,
    bins: int = DEFAULT_BINS,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
) -> ConditionTable:
    """Count the tokens outside apart, by conditions.

    Parameters
    ----------
    dump, question, bootstrap_seed, progress, backend, recompute
        As in `rate_table`.
    by : sequence of str
        Names of `deltad.analysis.values.CONDITIONS`.
    criteria : sequence of str or Rule
        By default the question's criterion; the baseline takes part in any case.
    bins : int
        Bins by quantile of all tokens outside, for conditions that are numbers.

    Returns
    -------
    ConditionTable
        A row for every condition, bin and criterion.

    Raises
    ------
    QuestionError, CriterionError
        An unknown condition, fewer bins than 1, or what the dump cannot answer: names the column
        that it lacks.
    DumpError
        A row holds an impossible value.
    """
    asked = question or Question()
    resolved, _ = comparable(dump, asked, criteria or (asked.criterion,))
    conditions = conditions_named(by)
    if bins < 1:
        raise QuestionError(f"`bins` must be at least 1, got {bins}")
    arms = arms_of(resolved)
    for condition in conditions:
        for arm in arms:
            check_columns(dump, arm, condition.columns, f"the condition `{condition.name}`")
    base = next(iter(resolved.values()))
    rules = tuple(each.question.rules[0] for each in resolved.values())
    names = tuple(each.name for each in conditions)
    ask = Ask(base.question, rules, values=names, recompute=recompute)
    got = read(dump, arms, ask, backend=backend, progress=progress)
    weighted = unlike_weights([each for some in got.values() for each in some])
    parts: list[Part] = []
    for condition in conditions:
        values = {key: each[0].columns[condition.name] for key, each in got.items()}
        mine = [values[base.baseline_arm, seed] for seed in dump.seeds(base.baseline_arm)]
        edges = None if condition.names else quantile_edges(np.concatenate(mine), bins)
        for at, label, low, high in _cells(condition, edges, mine):
            rows = {key: _placed(each, edges) == at for key, each in values.items()}
            for place, (name, each) in enumerate(resolved.items()):
                pair = pair_of(
                    each, got, place, 0, rows=rows, weighted=weighted,
                    bootstrap_seed=bootstrap_seed,
                )  # fmt: skip
                parts.append(Part(condition.name, label, low, high, name, pair))
    if not parts:
        raise QuestionError(f"there is no token outside in {dump.path}, so none to tell apart")
    return ConditionTable(base.question, tuple(parts), {}, "", conditions, tuple(resolved), bins)


def quantile_edges(values: ArrayLike, bins: int) -> NDArray[np.float64]:
    """Edges between bins that hold about as many numbers each, none of them empty.

    Parameters
    ----------
    values : ArrayLike of float, shape (token,)
        NaN takes no part.
    bins : int
        How many bins, at least 1.

    Returns
    -------
    ndarray of float64, shape (edge,)
        Ascending, all of them values that occur: the least one, and the upper end of each bin.
        Tied numbers lie in one bin, so there may be fewer bins than asked for: one where all are
        equal (its two edges the same), and no edge at all over no numbers.

    Notes
    -----
    The upper end of bin i of m is the smallest value with at least a share i/m of all numbers at
    or below it (the inverse of the empirical distribution), so it lies in its own bin.

    Examples
    --------
    >>> quantile_edges([1, 2, 3, 4], 2).tolist(), quantile_edges([0, 0, 0, 7], 4).tolist()
    ([1.0, 2.0, 4.0], [0.0, 0.0, 7.0])
    """
    numbers = np.sort(np.asarray(values, dtype=np.float64))
    numbers = numbers[~np.isnan(numbers)]
    if not len(numbers):
        return np.empty(0)
    # Whole numbers, since i · n / m may exceed what it should be by rounding.
    places = [-(-i * len(numbers) // bins) - 1 for i in range(1, bins + 1)]
    ends = np.unique(numbers[np.maximum(places, 0)])
    return np.concatenate([numbers[:1], ends])


def bin_of(values: ArrayLike, edges: NDArray[np.float64]) -> NDArray[np.intp]:
    """The bin of every number, from 0, a number equal to an edge below it; `UNKNOWN` for NaN.

    Examples
    --------
    >>> bin_of([1, 2, 3, float("nan")], quantile_edges([1, 2, 3, 4], 2)).tolist()
    [0, 0, 1, -1]
    """
    numbers = np.asarray(values, dtype=np.float64)
    found = np.searchsorted(edges[1:-1], numbers, side="left")
    return np.where(np.isnan(numbers), UNKNOWN, found)


def interval_label(low: float, high: float, *, first: bool) -> str:
    """A bin's interval: closed above, and below too where it is the first.

    Examples
    --------
    >>> interval_label(0.15, 0.2, first=True), interval_label(3, 3, first=True)
    ('[0.15, 0.2]', '3')
    """

    def digits(value: float) -> str:
        """Three significant digits, all of a whole number's."""
        whole = math.isfinite(value) and value == int(value) and abs(value) < 1e6
        return (str(int(value)) if whole else f"{value:.3g}").replace("-", "−")

    if low == high:
        return digits(high)
    return f"{'[' if first else '('}{digits(low)}, {digits(high)}]"


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
            whole = int(value) == float(value)
        except (ValueError, OverflowError):
            whole = False
        if not whole or not 1 <= int(value) <= most:
            raise QuestionError(
                f"K' must be a whole number from 1 to the dump's K = {most}, got {value!r}"
            )
        found.append(int(value))
    return sorted(set(found))


def _cells(
    condition: Value, edges: NDArray[np.float64] | None, values: list[NDArray[Any]]
) -> Iterable[tuple[int, str, float, float]]:
    """The bins of a condition: number, label and ends; one of unknown values where there are."""
    if edges is None:
        yield from ((at, name, math.nan, math.nan) for at, name in enumerate(condition.names))
    else:
        for at, (low, high) in enumerate(pairwise(edges.tolist())):
            yield at, interval_label(low, high, first=not at), low, high
    if any((_placed(each, edges) == UNKNOWN).any() for each in values):
        yield UNKNOWN, "unknown", math.nan, math.nan


def _placed(values: NDArray[Any], edges: NDArray[np.float64] | None) -> NDArray[np.intp]:
    """The bin of every value."""
    return values.astype(np.intp) if edges is None else bin_of(values, edges)


def _masked(place: str, row: Any) -> int:
    """Tokens that a criterion masks somewhere."""
    found: int = row.masked[place]
    return found


def _masked_text(place: str, row: Any) -> str:
    """The same in text."""
    return str(_masked(place, row))


SWEEP_COLUMNS: Final = [
    key("over", "what differs between the rows: threshold, top-k or protocol", lambda p: p.over),
    key("value", "its value: δ, K' or the protocol", lambda p: p.value),
    *pair_keys(pair_in),
    *accuracy_columns("criterion", "tokens outside", lambda p: p.accuracy("criterion")),
    *accuracy_columns("baseline", "tokens outside", lambda p: p.accuracy("baseline")),
    *pair_columns(pair_in),
]
"""Columns of a sweep, one row per point."""

_VALUE: Final = in_text("value", lambda p: p.value if isinstance(p.value, str) else f"{p.value:g}")
SWEPT: Final = [
    _VALUE, OUTSIDE, APART, UNSAFE, *RATES, DIFFERENCE, LOWER, SIGN_TEST, CONTRACTING
]  # fmt: skip
UNJUDGED: Final = [
    _VALUE, OUTSIDE, APART,
    *sided("kept by the {}", lambda side, p: known(p.pair.side(side).kept)),
]  # fmt: skip
SIGNS: Final = [
    _VALUE, BASE, GUESS,
    *sided("sign of ΔD predicted, {}", lambda side, p: str(p.accuracy(side))),
    in_text("P(ΔD > 0) in disagreement", lambda p: number(p.pair.disagreement.increase_rate)),
    in_text("always the more common", lambda p: number(p.pair.disagreement.constant_guess)),
    in_text(
        "predicted there, both",
        lambda p: " / ".join(number(p.pair.accuracy(s, "disagreement").value) for s in SIDES),
    ),
]  # fmt: skip

COMPARISON_COLUMNS: Final = [
    *pair_keys(pair_in),
    Column("masked", "stored tokens that it masks: the sum of the three below",
           lambda c: sum(c.masked.values())),
    *(
        Column(f"masked_{place}", f"of these, {what}", partial(_masked, place))
        for place, what in zip(
            PLACES,
            (
                "tokens with D > δ",
                "tokens with D ≤ δ; only those that the dump stores",
                "rows stored without top-K log-probs, whose D is unknown",
            ),
            strict=True,
        )
    ),
    Column("weight_outside", "mean weight of the tokens outside; 1 where a criterion keeps",
           lambda c: c.weight.value),
    *accuracy_columns("outside", "tokens outside", lambda c: c.outside),
    *accuracy_columns("disagreement", "disagreement tokens", lambda c: c.disagreement),
    *pair_columns(pair_in),
    Column("holm_p", "the sign test's p corrected for the number of criteria (Holm)",
           lambda c: c.holm_p),
    *named("contracting_difference",
           "contracting fraction, criterion − baseline, mean over seeds in which both keep a "
           "disagreement token",
           attrgetter("pair.paired_contracting.difference"),
           attrgetter("pair.paired_contracting.difference_ci95")),
    Column("contracting_sign_test_p", "two-sided sign test of it",
           lambda c: c.pair.paired_contracting.sign_test_p),
]  # fmt: skip
"""Columns of a comparison, one row per criterion."""

_NAME: Final = in_text("criterion", lambda c: c.name)
MASKED: Final = [
    _NAME,
    *(
        in_text(f"masked {place.replace('_', ' ')}", partial(_masked_text, place))
        for place in PLACES
    ),
    in_text("mean weight outside", lambda c: number(c.weight.value)),
]
PREDICTED: Final = [
    _NAME,
    in_text("sign of ΔD predicted, outside", lambda c: str(c.outside)),
    in_text("in disagreement", lambda c: str(c.disagreement)),
    in_text("always the more common there",
             lambda c: number(c.pair.disagreement.constant_guess)),
]  # fmt: skip
AGAINST: Final = [
    _NAME, UNSAFE, *RATES, DIFFERENCE, LOWER, SIGN_TEST,
    in_text("Holm p", lambda c: p_value(c.holm_p)), CONTRACTING,
]  # fmt: skip

CONDITION_COLUMNS: Final = [
    key("condition", "what tokens are told apart by", lambda p: p.condition),
    key("bin", "the bin in words; `unknown` where a token has no value", lambda p: p.label),
    key("low", "lower end of a bin of numbers, not in it but in the first", lambda p: p.low),
    key("high", "upper end of a bin of numbers, in it", lambda p: p.high),
    key("criterion", "whose decisions", lambda p: p.criterion),
    pair_keys(pair_in)[1],
    *accuracy_columns("outside", "tokens outside in the bin", lambda p: p.accuracy),
    *pair_columns(pair_in),
]
"""Columns of a condition table, one row per bin and criterion."""

BINNED: Final = [
    in_text("bin", lambda p: p.label),
    in_text("criterion", lambda p: p.criterion),
    OUTSIDE, BASE, GUESS,
    in_text("sign of ΔD predicted", lambda p: str(p.accuracy)),
    APART, UNSAFE, *RATES, CONTRACTING,
]  # fmt: skip

Sweep.COLUMNS, Comparison.COLUMNS = SWEEP_COLUMNS, COMPARISON_COLUMNS
ConditionTable.COLUMNS = CONDITION_COLUMNS
