"""Pairs of criteria on some tokens outside: counts by seed, and what they say together.

A rate table is one pair, a sweep one per point, a comparison one per criterion, a condition table
one per bin and criterion: `COLUMNS` are the same for all. Counts come from `deltad.tally`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from deltad.tally import FIELDS, SETS, count_pair

from . import statistics
from .question import OWN, Question, QuestionError, Resolved
from .result import Column, counted, number, with_interval
from .values import Bools, Floats, some

if TYPE_CHECKING:
    from .reading import Outside
    from .statistics import Interval, Paired, PooledDifference
    from .values import Rows

SIDES: Final = ("criterion", "baseline")

Counted = TypeVar("Counted", bound="Tokens")


def ratio(numerator: float, denominator: float) -> float:
    """A share, or NaN over nothing."""
    return numerator / denominator if denominator else math.nan


@dataclass(frozen=True, eq=False)
class Estimate:
    """Σ part / Σ whole over seeds, with an interval; what every pooled share is.

    `parts` and `wholes`, of shape (seed,), are both 0 where a seed has no such token.

    Examples
    --------
    >>> share = Estimate.of([1, 2, 0], [2, 4, 0])
    >>> share.part, share.whole, share.value, share.ci95
    (3.0, 6.0, 0.5, (0.5, 0.5))
    """

    parts: Floats
    wholes: Floats
    bootstrap_seed: int = 0

    @classmethod
    def of(cls, parts: ArrayLike, wholes: ArrayLike, bootstrap_seed: int = 0) -> Estimate:
        """Take one number per seed of each."""
        return cls(np.asarray(parts, float), np.asarray(wholes, float), bootstrap_seed)

    @property
    def part(self) -> float:
        """Σ part over seeds."""
        return float(self.parts.sum())

    @property
    def whole(self) -> float:
        """Σ whole over seeds."""
        return float(self.wholes.sum())

    @property
    def value(self) -> float:
        """Σ part / Σ whole; NaN over nothing."""
        return ratio(self.part, self.whole)

    @cached_property
    def ci95(self) -> Interval:
        """95 % bootstrap interval over seeds; NaN where fewer than two have such a token."""
        if math.isnan(self.value):  # over nothing, or a seed's count is not known
            return math.nan, math.nan
        return statistics.bootstrap_ratio(self.parts, self.wholes, seed=self.bootstrap_seed)

    @property
    def by_seed(self) -> Floats:
        """Every seed's own share, shape (seed,); NaN where it has no such token."""
        found: Floats = np.full(len(self.parts), np.nan)
        np.divide(self.parts, self.wholes, out=found, where=self.wholes > 0)
        return found

    def __str__(self) -> str:
        """The share with its interval and counts."""
        known = self.whole and not math.isnan(self.part)
        counts = f" {self.part:.6g}/{self.whole:.6g}" if known else ""
        return with_interval(self.value, self.ci95) + counts


def _total(name: str, meaning: str) -> Any:
    """A property: one of the counts over all seeds; None where it is not known."""
    return property(lambda tokens: tokens.total(name), doc=meaning)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Counts of one set of tokens by seed."""

    counts: Floats = field(repr=False)  # `deltad.tally.FIELDS` by seed; NaN where not known
    weighted: bool = False  # whether tokens stand for unlike numbers of tokens: shares weigh them
    bootstrap_seed: int = 0  # of the intervals' random numbers

    tokens = _total("tokens", "All of them.")
    undetermined = _total("undetermined", "Those whose |ΔD| is below the bound on its error.")
    determined = _total("determined", "Those whose ΔD has a sign: what shares are of.")
    increase = _total("increase", "Of the determined those with ΔD > 0.")

    def by_seed(self, name: str) -> Floats:
        """One of the `FIELDS`, shape (seed,)."""
        return np.asarray(self.counts[:, FIELDS.index(name)])

    def total(self, name: str) -> int | None:
        """One of the counts over all seeds; None where it is not known."""
        found = float(self.by_seed(name).sum())
        judged = self.by_seed("determined") + self.by_seed("undetermined")
        if name in ("increase", "decrease") and self.tokens and not judged.any():  # no ΔD at all
            return None
        return None if math.isnan(found) else round(found)

    @property
    def bounded(self) -> int:
        """Those of which a bound on the error of ΔD was recorded."""
        return self.total("bounded") or 0

    @cached_property
    def increases(self) -> Estimate:
        """Share of the determined with ΔD > 0: the base rate."""
        return self.share("increase")

    @property
    def increase_rate(self) -> float:
        """The same in [0, 1]; NaN over no tokens or where it is not known."""
        return self.increases.value

    @property
    def constant_guess(self) -> float:
        """Share on which always guessing the more common direction is right, in [0.5, 1]."""
        rate = self.increase_rate
        return math.nan if math.isnan(rate) else max(rate, 1 - rate)

    def share(self, name: str) -> Estimate:
        """Share of the determined that `increase` or `decrease` counts, weighted where need be."""
        names = (f"weight_{name}", "weight") if self.weighted else (name, "determined")
        part, whole = map(self.by_seed, names)
        return Estimate(part, whole, self.bootstrap_seed)

    def __str__(self) -> str:
        """The base rate with its counts."""
        share = self.increases
        return f"{number(share.value)} ({share.part:.6g} / {share.whole:.6g})"


@dataclass(frozen=True, eq=False)
class Kept(Tokens):
    """The disagreement tokens that one criterion keeps; of one seed its rates are that seed's."""

    kept = _total("tokens", "How many there are.")
    unsafe = _total("increase", "Of the determined those with ΔD > 0.")
    contracting = _total("decrease", "Of the determined those with ΔD < 0.")

    @property
    def rates(self) -> Floats:
        """Unsafe-keep rate of every seed, shape (seed,); NaN where it keeps nothing determined."""
        return self.increases.by_seed

    @property
    def seeds(self) -> int:
        """Seeds that have a rate."""
        return int(np.count_nonzero(~np.isnan(self.rates)))

    @cached_property
    def unsafe_keep_rate(self) -> float:
        """Mean over these seeds of unsafe / determined, in [0, 1]; NaN without any."""
        return statistics.mean(self.rates)

    @cached_property
    def unsafe_keep_rate_ci95(self) -> Interval:
        """Bootstrap over these seeds; NaN with fewer than two."""
        return statistics.bootstrap_mean(self.rates, seed=self.bootstrap_seed)

    @cached_property
    def contractions(self) -> Estimate:
        """Σ contracting / Σ determined, pooled over seeds."""
        return self.share("decrease")

    @property
    def contracting_fraction(self) -> float:
        """The same in [0, 1]; NaN over nothing."""
        return self.contractions.value

    @property
    def contracting_fraction_ci95(self) -> Interval:
        """Bootstrap over all seeds, numerator and denominator drawn together."""
        return self.contractions.ci95

    def of(self, name: str) -> str:
        """`unsafe / kept` or `contracting / kept` in text, weighted where rates are."""
        share = self.increases if name == "unsafe" else self.contractions
        return f"{share.part:.6g} / {share.whole:.6g}"


@dataclass(frozen=True, eq=False)
class Pair:
    """Two criteria on some tokens, seed by seed.

    `sets`, by `deltad.tally.SETS`, are counts of shape (seed, field): under `own` those of the
    criterion's arm, but for what the baseline keeps.
    """

    question: Question  # its protocol settled
    seeds: tuple[int, ...]  # ascending
    seen: Floats = field(repr=False)  # shape (seed,): tokens looked at, stored or not
    unknown: Floats = field(repr=False)  # rows whose D is not known, which are in no set
    sets: Mapping[str, Floats] = field(repr=False)
    weighted: bool = False
    bootstrap_seed: int = 0
    delta_d: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    """By side: ΔD of the disagreement tokens that it keeps, all seeds."""

    @cached_property
    def outside(self) -> Tokens:
        """All tokens outside the region."""
        return self._counted(Tokens, "outside")

    @cached_property
    def disagreement(self) -> Tokens:
        """Tokens outside that exactly one of the two masks."""
        return self._counted(Tokens, "disagreement")

    @cached_property
    def criterion(self) -> Kept:
        """What the criterion keeps of the disagreement set."""
        return self._counted(Kept, "criterion_kept")

    @cached_property
    def baseline(self) -> Kept:
        """What the baseline keeps of it."""
        return self._counted(Kept, "baseline_kept")

    @cached_property
    def paired(self) -> Paired:
        """Both unsafe-keep rates compared within seeds."""
        return self._paired("increase")

    @cached_property
    def paired_contracting(self) -> Paired:
        """Both contracting fractions compared within seeds."""
        return self._paired("decrease")

    @cached_property
    def pooled_unsafe(self) -> PooledDifference:
        """Unsafe / determined pooled over seeds, criterion − baseline, seeds as clusters."""
        return self._pooled("increase")

    @cached_property
    def pooled_contracting(self) -> PooledDifference:
        """Contracting / determined pooled over seeds, criterion − baseline, as clusters."""
        return self._pooled("decrease")

    @property
    def tokens(self) -> int:
        """Tokens looked at, all seeds."""
        return round(float(self.seen.sum()))

    @property
    def without_topk(self) -> int:
        """Rows whose D is not known, for they have no top-K log-probs."""
        return round(float(self.unknown.sum()))

    def side(self, name: str) -> Kept:
        """What the criterion or the baseline keeps."""
        return self.criterion if name == "criterion" else self.baseline

    def per_seed(self, name: str) -> float:
        """Mean of `tokens`, `outside` or `disagreement` over seeds; NaN without seeds."""
        total = self.tokens if name == "tokens" else getattr(self, name).tokens
        return math.nan if total is None else ratio(total, len(self.seeds))

    @property
    def by_seed(self) -> tuple[Pair, ...]:
        """Each seed alone."""

        def one(at: int) -> Pair:
            """One seed."""
            here = slice(at, at + 1)
            numbers = self.seen[here], self.unknown[here], some(self.sets, here)
            return Pair(
                self.question, self.seeds[here], *numbers, self.weighted, self.bootstrap_seed
            )

        return tuple(map(one, range(len(self.seeds))))

    def accuracy(self, side: str, within: str = "outside") -> Estimate:
        """Share of the determined tokens whose sign of ΔD one criterion predicted.

        Keeping a token predicts ΔD ≤ 0, masking it ΔD > 0; in disagreement the shares of both
        sides add up to 1. Over nothing under `own`, where a masked token has no update of its own.
        """
        if self.question.protocol == OWN:
            nothing = np.zeros(len(self.seeds))
            return Estimate(nothing, nothing, self.bootstrap_seed)
        name = f"{side}_right_apart" if within == "disagreement" else f"{side}_right"
        right, whole = (self._counted(Tokens, each) for each in (name, within))
        key = "weight" if self.weighted else "determined"
        return Estimate(right.by_seed(key), whole.by_seed(key), self.bootstrap_seed)

    def _counted(self, kind: type[Counted], name: str) -> Counted:
        """The counts of one of the sets."""
        return kind(self.sets[name], self.weighted, self.bootstrap_seed)

    def _paired(self, name: str) -> Paired:
        """A share of both sides, seed by seed."""
        ours, theirs = (each.share(name).by_seed for each in (self.criterion, self.baseline))
        return statistics.compare_paired(ours, theirs, bootstrap_seed=self.bootstrap_seed)

    def _pooled(self, name: str) -> PooledDifference:
        """A share of both sides, all seeds together."""
        ours, theirs = (each.share(name) for each in (self.criterion, self.baseline))
        return statistics.pooled_difference(
            (ours.parts, ours.wholes), (theirs.parts, theirs.wholes)
        )


def pair_of(
    resolved: Resolved,
    read: Mapping[tuple[str, int], Sequence[Outside]],
    criterion: int = 0,
    baseline: int = 1,
    *,
    point: int = 0,
    rows: Mapping[tuple[str, int], Rows] | None = None,
    weighted: bool = False,
    bootstrap_seed: int = 0,
) -> Pair:
    """Count a pair of criteria, by their places among the rules asked, in what was read.

    `read` is what `reading.read` gave, of at least the question's arms; `rows` are, by arm and
    seed, which of the tokens outside, all by default. Every seed of the criterion's arm is
    counted; arms that do not hold the same tokens in disagreement are a QuestionError.
    """
    ours, theirs = resolved.criterion_arm, resolved.baseline_arm
    seeds = sorted(seed for arm, seed in read if arm == ours)
    counts: list[dict[str, Floats]] = []
    kept: dict[str, list[Floats]] = {side: [np.empty(0)] for side in SIDES}
    for seed in seeds:
        found: dict[str, dict[str, Floats]] = {}
        for side, arm in zip(SIDES, (ours, theirs), strict=True):
            outside = read[arm, seed][point]
            chosen = outside if rows is None else outside[rows[arm, seed]]
            keep = {"criterion": chosen.keep[criterion], "baseline": chosen.keep[baseline]}
            mine = keep[side] & (keep["criterion"] != keep["baseline"])
            kept[side].append(chosen.judged.delta_d[mine])
            if arm not in found:
                found[arm] = _counts(chosen, **keep)
        _check_alike(found, resolved, seed)
        counts.append(found[ours])
        if resolved.question.protocol == OWN:
            counts[-1]["baseline_kept"] = found[theirs]["baseline_kept"]
    every = [read[ours, seed][point] for seed in seeds]
    return Pair(
        resolved.question,
        tuple(seeds),
        np.array([each.seen for each in every], float),
        np.array([each.unknown for each in every], float),
        {name: np.array([each[name] for each in counts]).reshape(-1, len(FIELDS)) for name in SETS},
        weighted,
        bootstrap_seed,
        {side: np.concatenate(each) for side, each in kept.items()},
    )


def _counts(outside: Outside, criterion: Bools, baseline: Bools) -> dict[str, Floats]:
    """Counts of every set, NaN as far as they are not known."""
    found, totals = count_pair(outside.judged, criterion, baseline), outside.totals.copy()
    if outside.stored is not None:  # of the others only the number
        totals[:] = np.nan
        totals[0] = outside.stored
    if outside.rows and outside.unknown == outside.rows:
        totals[:] = np.nan
    if not np.array_equal(found["outside"], totals):
        # Of the tokens that both decide alike, only the totals were kept.
        found |= {f"{side}_right": np.full(len(FIELDS), np.nan) for side in SIDES}
    return {**found, "outside": totals}


def _check_alike(found: Mapping[str, Mapping[str, Floats]], resolved: Resolved, seed: int) -> None:
    """Both arms hold the same tokens, so what the two keep is the disagreement set."""
    arms = resolved.criterion_arm, resolved.baseline_arm
    whole = int(found[arms[0]]["disagreement"][0])
    ours, theirs = (int(found[a][f"{side}_kept"][0]) for a, side in zip(arms, SIDES, strict=True))
    if ours + theirs != whole:
        raise QuestionError(
            f"in seed {seed} the arms {arms[0]} and {arms[1]} do not "
            f"hold the same tokens: {whole} are in disagreement in the first, of which it keeps "
            f"{ours}, and the other keeps {theirs}; run `deltad check`"
        )


Get = Callable[..., Any]


def named(name: str, meaning: str, value: Get, interval: Get) -> list[Column]:
    """A number and the two ends of its interval, as three columns."""
    return [
        Column(name, meaning, value),
        Column(f"{name}_low", "lower end of its 95 % interval", lambda row: interval(row)[0]),
        Column(f"{name}_high", "upper end of its 95 % interval", lambda row: interval(row)[1]),
    ]


def accuracy_columns(prefix: str, what: str, of: Callable[[Any], Estimate]) -> list[Column]:
    """Right, judged and their quotient of a share of predicted signs."""
    right = f"{what} whose sign of ΔD it predicted (kept: ΔD ≤ 0; masked: ΔD > 0)"
    judged = f"{what} that it is judged by; 0 under `own`"
    return [
        Column(f"{prefix}_right", right, lambda row: of(row).part),
        Column(f"{prefix}_judged", judged, lambda row: of(row).whole),
        *named(
            f"{prefix}_accuracy", "right / judged, pooled over seeds",
            lambda row: of(row).value, lambda row: of(row).ci95,
        ),
    ]  # fmt: skip


def pair_columns(of: Callable[[Any], Pair] = attrgetter("pair")) -> list[Column]:
    """The columns that every table of pairs has, a row holding its pair."""

    def at(path: str) -> Get:
        """A number of the pair."""
        get = attrgetter(path)
        return lambda row: get(of(row))

    found: list[Column] = []
    for name, what in (
        ("outside", "tokens with D > δ before the update, all seeds"),
        ("disagreement", "tokens outside that exactly one of the two criteria masks"),
    ):
        found.append(Column(name, what, at(f"{name}.tokens")))
        for each, meaning in (
            ("increase_rate", "share of the determined of them with ΔD > 0: the base rate"),
            ("constant_guess", "share on which always guessing the more common direction is right"),
            ("undetermined", "of these, those whose |ΔD| is below the bound on its error"),
        ):
            found.append(Column(f"{name}_{each}", meaning, at(f"{name}.{each}")))
    for side in SIDES:
        for each, meaning in (
            ("kept", f"disagreement tokens that the {side} keeps"),
            ("unsafe", "of the determined of these, those with ΔD > 0"),
            ("contracting", "of the determined of these, those with ΔD < 0"),
            ("undetermined", "of these, those whose |ΔD| is below the bound on its error"),
        ):
            found.append(Column(f"{side}_{each}", meaning, at(f"{side}.{each}")))
        for each, meaning in (
            ("unsafe_keep_rate", "mean over seeds of unsafe / (kept − undetermined)"),
            ("contracting_fraction", "Σ contracting / Σ (kept − undetermined), pooled over seeds"),
        ):
            path = f"{side}.{each}"
            found += named(f"{side}_{each}", f"{meaning}, {side}", at(path), at(f"{path}_ci95"))
    for each, meaning in (
        ("seeds", "seeds in which both have an unsafe-keep rate"),
        ("lower", "paired seeds in which the criterion's rate is below the baseline's"),
        ("tied", "paired seeds in which they are equal"),
        ("higher", "paired seeds in which it is above"),
    ):
        name = "paired_seeds" if each == "seeds" else each
        found.append(Column(name, meaning, at(f"paired.{each}")))
    found += named(
        "difference", "criterion − baseline, mean over the paired seeds",
        at("paired.difference"), at("paired.difference_ci95"),
    )  # fmt: skip
    sign_test = Column("sign_test_p", "two-sided; ties left out", at("paired.sign_test_p"))
    return [*found, sign_test]


def base_object(pair: Pair) -> dict[str, Any]:
    """The base rate of the tokens outside, with its counts."""
    names = ("tokens", "undetermined", "increase_rate", "constant_guess")
    return {"outside": {name: getattr(pair.outside, name) for name in names}}


def base_text(base: Tokens) -> str:
    """A base rate with its counts, and what always guessing gets right."""
    words = (
        f"P(ΔD > 0) = {base}, always guessing the more common direction is right on "
        f"{number(base.constant_guess)}"
    )
    if base.undetermined:
        words += f"; ΔD of {base.undetermined} is undetermined"
    return words


def asked(question: Question) -> dict[str, Any]:
    """The question's region and protocol, as JSON objects begin with it."""
    return {name: getattr(question, name) for name in ("threshold", "divergence", "protocol")}


def bootstrap_object(bootstrap_seed: int) -> dict[str, Any]:
    """How intervals were made."""
    return {
        "method": statistics.METHOD,
        "resamples": statistics.RESAMPLES,
        "seed": bootstrap_seed,
    }


def bootstrap_text(bootstrap_seed: int) -> str:
    """How intervals were made."""
    return (
        f"Intervals: 95 %, bootstrap over seeds ({statistics.METHOD}, "
        f"{statistics.RESAMPLES} resamples, random seed {bootstrap_seed})."
    )


def unknown_text(pairs: Iterable[Pair]) -> list[str]:
    """What was not counted, and how shares are weighted."""
    every = list(pairs)
    lines = []
    if unknown := max((each.without_topk for each in every), default=0):
        lines.append(
            f"{counted(unknown, 'row')} without top-K log-probs: whether they are outside is "
            "unknown, and they are in no count."
        )
    if any(each.weighted for each in every):
        lines.append("Shares weigh each token by the number of tokens that it stands for.")
    return lines
