"""Predictions against what happened: rung by rung by their sign, and by order and size.

A criterion predicts the sign of ΔD from the token's own policy gradient. *The ladder* follows the
change of D from what is predicted to what happened: the token's logits alone, its own gradient
through shared parameters, its sequence's, the batch's, the optimizer's step to first order, parts
of the step, the step. *The calibration* takes Â · r · push as the prediction of ΔD itself: right
up to one step size η for all tokens, so that a good push orders tokens as their ΔD does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis import pairs, statistics
from deltad.analysis.backends import Backend, Progress
from deltad.analysis.pairs import Estimate, Pair, accuracy_columns, named, pair_of, ratio
from deltad.analysis.question import OWN, Question, QuestionError, Resolved, check_rule
from deltad.analysis.reading import Ask, Outside, read, unlike_weights
from deltad.analysis.result import (
    DASH,
    Column,
    Result,
    Table,
    counted,
    number,
    record,
    region,
    title,
    unit,
    with_interval,
)
from deltad.analysis.tables.compare import bin_of, interval_label, quantile_edges
from deltad.analysis.values import LINEAR, VALUES, Value, predictors
from deltad.masks import CRITERIA, CriterionError, Rule, Tokens, distinct, rule

if TYPE_CHECKING:
    from deltad.analysis.statistics import Interval
    from deltad.dumps import Dump

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rung:
    """One change of D: what it is followed along, what is added to the rung below, its column."""

    name: str
    label: str
    cause: str
    column: str = ""


RUNGS: Final = (
    Rung("logits", "its own logits, exact tail", "truncation of π"),
    Rung("own", "its own gradient", "parameter sharing", "linear_delta_own"),
    Rung(
        "sequence", "its sequence's gradient", "other tokens of the sequence",
        "linear_delta_sequence",
    ),
    Rung("batch", "the batch's gradient", "other sequences of the batch", "linear_delta_batch"),
    Rung("update", "the optimizer's step, first order", "the optimizer", LINEAR),
    Rung("tenth", "a tenth of the step", "curvature, to a tenth", "delta_tenth"),
    Rung("realized", "the step", "curvature, to the step"),
    Rung("triple", "three times the step", "curvature, beyond the step", "delta_triple"),
)  # fmt: skip
"""From the bottom up."""

PLACES: Final = {rung.name: at for at, rung in enumerate(RUNGS)}
SETS: Final = {"outside": "all tokens outside", "disagreement": "disagreement tokens"}
SAMPLED: Final = ("own", "sequence")
"""The rungs that a sample of tokens has."""

UNKNOWN: Final = -1
"""Stands in `SeedLadder.grows` for a sign that was not measured."""

DEFAULT_BINS: Final = 8

LEAST_RANKED: Final = 3
"""Tokens that a rank correlation needs: two always agree or disagree in full."""


@dataclass(frozen=True, eq=False)
class SeedLadder:
    """One seed's tokens outside: signs by rung, decisions, and the tokens that each stands for.

    `grows`, of shape (rung, token), is 1 where ΔD > 0, 0 where not, −1 where it was not measured;
    `masks`, of shape (criterion, token), where a criterion predicts ΔD > 0.
    """

    grows: NDArray[np.int8]
    masks: Bools
    disagreement: Bools
    weight: Floats
    sampled_weight: Floats

    def chosen(self, within: str) -> Bools:
        """Which tokens are meant."""
        every = within == "outside"
        return np.ones_like(self.disagreement) if every else self.disagreement


@dataclass(frozen=True, eq=False)
class LadderTable(Result):
    """Shares of signs that criteria predict, rung by rung, in one arm of a dump.

    Attributes
    ----------
    pair : Pair
        The question's two criteria.
    criteria : tuple of str
        These two, then others.
    seeds : tuple of SeedLadder
        In ascending order.
    missing : mapping of str to str
        Rungs that the dump does not have, and why.
    recorded : mapping
        What the dump says of how the ladder was measured.
    alike : str
        Why it is not known which tokens were sampled first, so that all count alike; else empty.
    """

    pair: Pair
    criteria: tuple[str, ...]
    seeds: tuple[SeedLadder, ...] = field(repr=False)
    missing: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)
    alike: str = ""
    _known: dict[tuple[str, ...], Estimate] = field(default_factory=dict, repr=False)

    @property
    def question(self) -> Question:
        """What was asked, its protocol settled."""
        return self.pair.question

    @property
    def arm(self) -> str:
        """Whose update the upper rungs follow."""
        return self.question.protocol.partition(":")[2]

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs that the dump has, from the bottom up."""
        return tuple(rung for rung in RUNGS if rung.name not in self.missing)

    def right(self, rung: str, criterion: str, within: str = "outside") -> Estimate:
        """Share of the tokens of `within` that have a rung whose sign there a criterion predicts.

        Masking predicts ΔD > 0, keeping ΔD ≤ 0.
        """
        return self._pooled("right", rung, criterion, within)

    def increase(self, rung: str, within: str = "outside") -> Estimate:
        """Share of tokens whose D grows on a rung: the base rate there."""
        return self._pooled("increase", rung, "", within)

    def constant_guess(self, rung: str, within: str = "outside") -> float:
        """Share on which always guessing the more common direction is right, in [0.5, 1]."""
        rate = self.increase(rung, within).value
        return math.nan if math.isnan(rate) else max(rate, 1 - rate)

    def agreement(self, rung: str, within: str = "outside") -> Estimate:
        """Share of tokens whose sign on a rung is that of the step as it was made."""
        return self._pooled("agreement", rung, "", within)

    def cost(self, rung: str, criterion: str, within: str = "outside") -> Estimate:
        """What a rung adds to a criterion's share of right signs, mostly below 0.

        Right on this rung less right on the one below, over the tokens that have both; on the
        lowest, less 1: what a criterion loses by seeing the top-K alone, or (the ratio) the
        sampled token alone.
        """
        return self._pooled("cost", rung, criterion, within)

    def cause(self, rung: str) -> str:
        """What lies between a rung and the one below it that the dump has."""
        below = self._below(rung)
        first = 0 if below is None else PLACES[below] + 1
        return " + ".join(each.cause for each in RUNGS[first : PLACES[rung] + 1])

    def tokens(self, within: str = "outside") -> int:
        """How many tokens there are."""
        return sum(int(seed.chosen(within).sum()) for seed in self.seeds)

    def sampled(self, within: str = "outside") -> int:
        """How many of them have the sampled rungs."""
        have = (each.grows[PLACES["own"]] != UNKNOWN for each in self.seeds)
        return sum(
            int((seed.chosen(within) & known).sum())
            for seed, known in zip(self.seeds, have, strict=True)
        )

    @property
    def rows(self) -> Sequence[tuple[LadderTable, str, str, str]]:
        """By rung, set and criterion."""
        return [
            (self, rung.name, name, within)
            for rung in self.rungs
            for within in SETS
            for name in self.criteria
        ]

    def objects(self) -> dict[str, Any]:
        """Every share and cost."""
        question = self.question

        def judged(rung: str, within: str) -> dict[str, Any]:
            """One rung over one set of tokens."""
            base, same = self.increase(rung, within), self.agreement(rung, within)
            found: dict[str, Any] = {
                "tokens": base.whole,
                "increase_rate": base.value,
                "constant_guess": self.constant_guess(rung, within),
                "agreement": same.value,
                "agreement_ci95": list(same.ci95),
                "criteria": {},
            }
            for name in self.criteria:
                right, cost = self.right(rung, name, within), self.cost(rung, name, within)
                found["criteria"][name] = {
                    "right": right.part,
                    "share": right.value,
                    "share_ci95": list(right.ci95),
                    "cost": cost.value,
                    "cost_ci95": list(cost.ci95),
                }
            return found

        return {
            **_asked(self.pair),
            "criterion": question.names[0],
            "baseline": question.names[1],
            "criteria": self.criteria,
            "tokens": self.pair.tokens,
            **{within: self.tokens(within) for within in SETS},
            "sampled": {within: self.sampled(within) for within in SETS},
            "rungs": [
                {
                    "rung": rung.name,
                    "label": rung.label,
                    "cause": self.cause(rung.name),
                    **{within: judged(rung.name, within) for within in SETS},
                }
                for rung in self.rungs
            ],
            "missing": self.missing,
            "recorded": self.recorded,
        }

    def parts(self) -> Iterable[str | Table]:
        """Shares, base rates, agreement with the step, costs, and what is missing."""
        yield f"where the sign is lost · {title(self.question)} · arm {self.arm}"
        measured = any(rung.name in SAMPLED for rung in self.rungs)
        size = (
            f"{counted(len(self.seeds), 'seed')}, {counted(self.tokens(), 'token')} outside, "
            f"{self.tokens('disagreement')} in disagreement"
        )
        yield size + (
            f"; own and sequence's gradient of {self.sampled()} and "
            f"{self.sampled('disagreement')} of them"
            if measured
            else ""
        )
        for within, words in SETS.items():
            yield f"{words}: share of signs of ΔD predicted"
            yield self._predicted(within)
        yield "what it costs: share right, less that of the rung below"
        yield self._costs()
        yield pairs.bootstrap_text(self.pair.bootstrap_seed)
        yield "A criterion predicts ΔD > 0 where it masks; Â times the exact Ḋ is the lowest rung."
        methods = self.recorded.get("methods")
        if isinstance(methods, dict):
            said = "; ".join(f"{rung} by {how}" for rung, how in methods.items() if how != "none")
            yield f"Measured: {said}."
        if measured and self.sampled() < self.tokens():
            yield (
                "Not every token has its own and its sequence's gradient: "
                + (f"{self.alike}, so a sampled token counts for any that was not." if self.alike
                   else "disagreement tokens were sampled first, and a sampled token counts for "
                   "those of its kind that were not.")
            )  # fmt: skip
        yield from pairs.unknown_text([self.pair])
        left = [rung for rung in RUNGS if rung.name in self.missing]
        yield from (f"Missing: {rung.label} ({self.missing[rung.name]})." for rung in left)
        if any(rung.column for rung in left):
            yield (
                "Record the ladder with `deltad record … --ladder`, or give "
                "`UpdateProbe(..., ladder=Ladder())` in your own loop."
            )

    def _predicted(self, within: str) -> Table:
        """A row per rung."""
        rows = []
        for rung in (each.name for each in self.rungs):
            base, same = self.increase(rung, within), self.agreement(rung, within)
            rows.append(
                [
                    RUNGS[PLACES[rung]].label,
                    *(_in_text(self.right(rung, name, within)) for name in self.criteria),
                    f"{base.whole:.0f}",
                    number(base.value),
                    number(self.constant_guess(rung, within)),
                    DASH if rung == "realized" else _in_text(same),
                ]
            )
        heads = ["tokens", "P(ΔD > 0)", "always the more common", "sign is the step's"]
        return Table(["ΔD along", *self.criteria, *heads], rows)

    def _costs(self) -> Table:
        """A row per step between two rungs."""
        every = [(within, name) for within in SETS for name in self.criteria]
        rows = []
        for rung in (each.name for each in self.rungs):
            cause = self.cause(rung)
            added = "all that lies between" if cause.count("+") > 2 else cause
            costs = (self.cost(rung, name, within) for within, name in every)
            rows.append([added, *(_in_text(cost, signed=True) for cost in costs)])
        return Table(["added", *(f"{name}, {SETS[within]}" for within, name in every)], rows)

    def _below(self, rung: str) -> str | None:
        """The next rung below that the dump has."""
        names = [each.name for each in self.rungs]
        at = names.index(rung)
        return names[at - 1] if at else None

    def _pooled(self, kind: str, rung: str, criterion: str, within: str) -> Estimate:
        """A share pooled over seeds; made once, so that its interval is drawn once."""
        key = (kind, rung, criterion, within)
        if key not in self._known:
            self._known[key] = Estimate(*self._counts(*key), self.pair.bootstrap_seed)
        return self._known[key]

    def _counts(self, kind: str, rung: str, criterion: str, within: str) -> tuple[Floats, Floats]:
        """Numerator and denominator of a share in every seed."""
        below = self._below(rung) if kind == "cost" else None
        rungs = [rung, *(["realized"] if kind == "agreement" else [below] if below else [])]
        places = [PLACES[each] for each in rungs]
        judge = self.criteria.index(criterion) if criterion else 0
        counts = np.zeros((2, len(self.seeds)))
        for at, seed in enumerate(self.seeds):
            known = seed.chosen(within) & (seed.grows[places] != UNKNOWN).all(axis=0)
            grows = seed.grows[places][:, known] == 1
            sampled = any(each in SAMPLED for each in rungs)
            weight = (seed.sampled_weight if sampled else seed.weight)[known]
            right = (seed.masks[judge, known] == grows).astype(np.float64)
            value = {
                "right": right[0],
                "increase": grows[0],
                "agreement": grows[0] == grows[-1],
                "cost": right[0] - (right[-1] if below else 1.0),
            }[kind]
            counts[:, at] = (value * weight).sum(), weight.sum()
        return counts[0], counts[1]


def _in_text(share: Estimate, *, signed: bool = False) -> str:
    """A share with its interval."""
    return with_interval(share.value, share.ci95, signed=signed)


def _share(name: str, meaning: str, of: Callable[[Any], Estimate]) -> list[Column]:
    """A share and the ends of its interval."""
    return named(name, meaning, lambda row: of(row).value, lambda row: of(row).ci95)


LADDER_TABLE_COLUMNS: Final = [
    Column("rung", "which change of D", lambda row: row[1], key=True),
    Column("set", "which tokens: outside the region, or those that the question's pair disagrees "
           "on", lambda row: row[3], key=True),
    Column("criterion", "whose predicted signs", lambda row: row[2], key=True),
    Column("tokens", "tokens that have the rung; a sampled one counts for those that it stands for",
           lambda row: LadderTable.right(*row).whole),
    Column("right", "tokens whose sign is predicted", lambda row: LadderTable.right(*row).part),
    *_share("share", "right / tokens", lambda row: LadderTable.right(*row)),
    Column("increase_rate", "share with ΔD > 0 on the rung: the base rate",
           lambda row: row[0].increase(row[1], row[3]).value),
    Column("constant_guess", "share on which always guessing the more common direction is right",
           lambda row: row[0].constant_guess(row[1], row[3])),
    *_share("agreement", "share whose sign is that of the realized step",
            lambda row: row[0].agreement(row[1], row[3])),
    *_share("cost", "share less that of the rung below, over the tokens that have both",
            lambda row: LadderTable.cost(*row)),
    Column("cause", "what lies between the two rungs", lambda row: row[0].cause(row[1])),
]  # fmt: skip
"""Columns of the ladder's table, one row per rung, set of tokens and criterion."""

LadderTable.COLUMNS = LADDER_TABLE_COLUMNS


def ladder_table(
    dump: Dump,
    question: Question | None = None,
    *,
    criteria: Sequence[str | Rule] = (),
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
) -> LadderTable:
    """Follow the sign of ΔD from a token's own logits to the realized step.

    Parameters
    ----------
    dump : Dump
        With the ladder's columns; without them the lowest rung and the step itself remain.
    question : Question, optional
        By default the paper's; its protocol names the arm.
    criteria : sequence of str or Rule
        Others to judge in addition to the question's two.
    bootstrap_seed : int
        Of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    backend : Backend, optional
        Where to read: by default on the cores of this machine.
    recompute : bool
        From the top-K log-probs even where D and Ḋ are recorded.

    Returns
    -------
    LadderTable
        `missing` says which rungs the dump does not have, and why.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question, or the protocol is `own`.
    DumpError
        A row holds an impossible value.
    """
    resolved = _shared(dump, question, "the ladder follows one update")
    arm, asked = resolved.criterion_arm, resolved.question
    rules = distinct([*asked.rules, *map(rule, criteria)])
    for each in rules.values():
        check_rule(dump, arm, each)
    recorded = dump.metadata(arm).extra.get("ladder")
    recorded = recorded if isinstance(recorded, dict) else {}
    values = {
        rung.name: rung.column or f"logits-{asked.divergence}"
        for rung in RUNGS
        if rung.name != "realized"
    }
    missing = {
        name: why for name, value in values.items() if (why := _lacks(dump, arm, value, asked))
    }
    names = {name: value for name, value in values.items() if name not in missing}
    strata: tuple[Rule, ...] = ()
    alike = ""
    if any(name in SAMPLED for name in names):
        try:
            strata = _strata(dump, arm, recorded)
        except (KeyError, TypeError, ValueError) as error:
            alike = f"the dump does not say which were sampled first ({error})"
    ask = Ask(asked, (*rules.values(), *strata), values=tuple(names.values()), recompute=recompute)
    got = read(dump, [arm], ask, backend=backend, progress=progress)
    outside = [found[0] for _, found in sorted(got.items())]
    weighted = unlike_weights(outside)
    pair = pair_of(
        resolved, got, 0, min(1, len(rules) - 1), weighted=weighted, bootstrap_seed=bootstrap_seed
    )
    seeds = tuple(_seed(each, names, len(rules), weighted) for each in outside)
    for name, value in {**names, "realized": ""}.items():
        if any((seed.grows[PLACES[name]] != UNKNOWN).any() for seed in seeds):
            continue
        reason = recorded.get("reasons", {}).get(name)
        missing[name] = (
            "no token is outside" if not any(len(seed.disagreement) for seed in seeds)
            else f"column `{value}` is NULL in every token outside"
            + (f" ({reason})" if reason else "") if value
            else "ΔD of every token outside is undetermined"
        )  # fmt: skip
    return LadderTable(pair, tuple(rules), seeds, missing, recorded, alike)


def _shared(dump: Dump, question: Question | None, why: str) -> Resolved:
    """A question resolved under one update."""
    resolved = (question or Question()).resolve(dump)
    if resolved.question.protocol == OWN:
        raise QuestionError(f"{why}, got `own`: ask for the protocol `shared:` and an arm")
    return resolved


def _lacks(dump: Dump, arm: str, value: str, question: Question) -> str:
    """Why an arm does not have a value's columns, empty where it has."""
    for column in VALUES[value].columns:
        if column not in dump.optional_columns(arm):
            return f"column `{column}` is missing"
        if column in (LINEAR, *(rung.column for rung in RUNGS)):
            metadata = dump.metadata(arm)
            ladder = metadata.extra.get("ladder")
            told = ladder.get("divergence") if isinstance(ladder, dict) else None
            followed = told or metadata.update.get("divergence") or "kl"
            if followed != question.divergence:
                return (
                    f"column `{column}` follows the divergence {followed}, not "
                    f"{question.divergence}"
                )
    return ""


def _strata(dump: Dump, arm: str, recorded: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules that keep the tokens that were sampled first, and those that came before the rest."""
    names = ("threshold", "divergence", "criterion", "baseline")
    sampled = Question(**{name: recorded[name] for name in names})
    for each in sampled.rules:
        check_rule(dump, arm, each)
        if each.scope == "sequence":
            raise CriterionError(f"criterion {each.name} judges whole responses")
    needs = tuple(column for each in sampled.rules for column in each.columns)
    return tuple(
        Rule(f"sampled-{name}", weight=partial(_drawn, sampled, name), needs=needs) for name in SETS
    )


def _drawn(sampled: Question, name: str, tokens: Tokens) -> Bools:
    """Where a token is outside the region of the sampling, and its pair disagrees."""
    region = {"threshold": sampled.threshold, "divergence": sampled.divergence}
    outside = np.asarray(tokens.divergence(sampled.divergence) > sampled.threshold)
    keep = [np.asarray(each.keeps(tokens, **region)) for each in sampled.rules]  # type: ignore[arg-type]
    return outside if name == "outside" else outside & (keep[0] != keep[1])


def _seed(outside: Outside, names: Mapping[str, str], rules: int, weighted: bool) -> SeedLadder:
    """The signs of one seed on every rung, and the tokens that each token stands for."""
    count = outside.keep.shape[1]
    grows = np.full((len(RUNGS), count), UNKNOWN, np.int8)
    made = np.where(outside.columns["undetermined"], np.nan, outside.columns["delta_d"])
    changes = {"realized": made, **{name: outside.columns[value] for name, value in names.items()}}
    for name, values in changes.items():
        grows[PLACES[name]] = np.where(np.isnan(values), UNKNOWN, values > 0)
    weight = outside.columns["weight"] if weighted else np.ones(count)
    stands_for = np.ones(count)
    kinds = outside.keep[rules:].sum(axis=0)
    for kind in np.unique(kinds):
        inside = kinds == kind
        sampled = int((inside & (grows[PLACES["own"]] != UNKNOWN)).sum())
        stands_for[inside] = inside.sum() / sampled if sampled else 0.0
    keep = outside.keep[:rules]
    return SeedLadder(grows, ~keep, keep[0] != keep[min(1, rules - 1)], weight, weight * stands_for)


@dataclass(frozen=True)
class Bin:
    """Tokens whose prediction lies in (low, high], closed below too in the first bin.

    `delta_d` is Σ ΔD / tokens, `increase` tokens with ΔD > 0 / tokens whose ΔD is determined.
    """

    label: str
    low: float
    high: float
    tokens: int
    undetermined: int
    prediction: float
    delta_d: Estimate
    increase: Estimate


@dataclass(frozen=True, eq=False)
class Calibrated:
    """One predictor against realized ΔD, of the tokens outside whose ΔD is known, by seed.

    Predictions are NaN where there is none; no sign is judged where ΔD is `unclear`, below the
    bound on its error; `weights` are the tokens that each stands for. Tied predictions may leave
    fewer bins than asked for.
    """

    predictor: Value
    predictions: tuple[Floats, ...]
    delta_d: tuple[Floats, ...]
    unclear: tuple[Bools, ...]
    weights: tuple[Floats, ...]
    bins_asked: int = DEFAULT_BINS
    bootstrap_seed: int = 0

    @cached_property
    def signs(self) -> Estimate:
        """Share of the determined tokens whose sign it predicted: p > 0 and ΔD > 0, or neither."""
        judged = [~np.isnan(p) & ~u for p, u in zip(self.predictions, self.unclear, strict=True)]
        return self._share(lambda p, d: (p > 0) == (d > 0), lambda p, d: np.ones_like(p), judged)

    @cached_property
    def slope(self) -> Estimate:
        """Σ p ΔD / Σ p² over finite predictions: the least-squares slope through the origin."""
        finite = [np.isfinite(p) for p in self.predictions]
        return self._share(lambda p, d: p * d, lambda p, d: p * p, finite)

    @cached_property
    def r_squared(self) -> float:
        """1 − Σ (ΔD − slope · p)² / Σ (ΔD − mean ΔD)²; NaN where ΔD does not vary."""
        p, d, w = self._pooled()
        finite = np.isfinite(p)
        p, d, w = p[finite], d[finite], w[finite]
        if not len(d) or np.all(d == d[0]):
            return math.nan
        rest, spread = (d - self.slope.value * p) ** 2, (d - (w @ d) / w.sum()) ** 2
        return 1 - float((w @ rest) / (w @ spread))

    @cached_property
    def spearman(self) -> float:
        """Spearman rank correlation of prediction and ΔD over the tokens of all seeds."""
        return rank_correlation(*self._pooled())

    @cached_property
    def spearman_by_seed(self) -> tuple[float, ...]:
        """The same within every seed; NaN with fewer than three tokens."""
        seeds = zip(self.predictions, self.delta_d, self.weights, strict=True)
        return tuple(rank_correlation(*each) for each in seeds)

    @cached_property
    def spearman_seed_mean(self) -> tuple[float, Interval]:
        """Its mean over the seeds that have one, with a 95 % bootstrap interval."""
        values = self.spearman_by_seed
        interval = statistics.bootstrap_mean(values, seed=self.bootstrap_seed)
        return statistics.mean(values), interval

    @cached_property
    def bins(self) -> tuple[Bin, ...]:
        """ΔD by quantile of the prediction; tokens without one are in none."""
        edges = quantile_edges(self._pooled()[0], self.bins_asked)
        places = [bin_of(p, edges) for p in self.predictions]
        found = []
        for at, (low, high) in enumerate(pairwise(edges.tolist())):
            chosen = [place == at for place in places]
            clear = [here & ~u for here, u in zip(chosen, self.unclear, strict=True)]
            tokens = sum(int(here.sum()) for here in chosen)
            mean = self._share(lambda p, d: p, lambda p, d: np.ones_like(p), chosen)
            found.append(
                Bin(
                    interval_label(low, high, first=not at),
                    low,
                    high,
                    tokens,
                    tokens - sum(int(here.sum()) for here in clear),
                    ratio(mean.part, mean.whole),
                    self._share(lambda p, d: d, lambda p, d: np.ones_like(p), chosen),
                    self._share(lambda p, d: d > 0, lambda p, d: np.ones_like(p), clear),
                )
            )
        return tuple(found)

    @property
    def unknown(self) -> int:
        """Tokens without a prediction."""
        return sum(int(np.count_nonzero(np.isnan(p))) for p in self.predictions)

    def _share(
        self,
        part: Callable[[Floats, Floats], NDArray[Any]],
        whole: Callable[[Floats, Floats], NDArray[Any]],
        rows: Sequence[Bools],
    ) -> Estimate:
        """Σ w part(p, ΔD) / Σ w whole(p, ΔD) over some tokens, by seed."""
        seeds = zip(self.predictions, self.delta_d, self.weights, rows, strict=True)
        some = [(p[here], d[here], w[here]) for p, d, w, here in seeds]
        parts, wholes = ([float(w @ of(p, d)) for p, d, w in some] for of in (part, whole))
        return Estimate.of(parts, wholes, self.bootstrap_seed)

    def _pooled(self) -> tuple[Floats, Floats, Floats]:
        """Predictions, ΔD and weights of all seeds."""
        p, d, w = (
            np.concatenate([np.empty(0), *each])
            for each in (self.predictions, self.delta_d, self.weights)
        )
        return p, d, w


@dataclass(frozen=True, eq=False)
class Calibration(Result):
    """Every push's prediction against realized ΔD, on the tokens outside.

    Attributes
    ----------
    pair : Pair
        Region and settled protocol, and the tokens outside; its criteria are not looked at.
    predictors : tuple of Calibrated
        The ratio first, then the predictions, then `linear_delta` where it was recorded.
    refused : dict of str to str
        Predictors that the dump cannot answer for, and why.
    """

    pair: Pair
    predictors: tuple[Calibrated, ...]
    refused: dict[str, str]

    @property
    def question(self) -> Question:
        """What was asked, its protocol settled."""
        return self.pair.question

    @property
    def base(self) -> pairs.Tokens:
        """How often ΔD > 0, whatever is predicted."""
        return self.pair.outside

    @property
    def rows(self) -> Sequence[tuple[Calibrated, Bin]]:
        """By predictor and bin."""
        return [(each, part) for each in self.predictors for part in each.bins]

    def objects(self) -> dict[str, Any]:
        """Predictors with their bins."""
        return {
            **_asked(self.pair),
            "base": pairs.base_object(self.pair),
            "directions": [
                {
                    **record(_OF_ALL, (each, None)),
                    "formula": each.predictor.meaning,
                    "bins": [record(_OF_BIN, (each, part)) for part in each.bins],
                }
                for each in self.predictors
            ],
            "refused": self.refused,
        }

    def parts(self) -> Iterable[str | Table]:
        """A row per predictor, then the bins of each."""
        question = self.question
        yield (
            f"predicted first-order change against ΔD · outside: {region(question)} · "
            f"{question.protocol}"
        )
        nats = f"; ΔD in{unit(question)}" if unit(question) else ""
        yield (
            f"{counted(len(self.pair.seeds), 'seed')}, {counted(self.base.tokens, 'token')} "
            f"outside: {pairs.base_text(self.base)}{nats}"
        )
        yield Table.of(_OF_ALL, [(each, None) for each in self.predictors])
        for each in self.predictors:
            if each.bins:
                yield f"{each.predictor.name}: {each.predictor.meaning}"
                yield Table.of(_OF_BIN, [(each, part) for part in each.bins])
            if each.unknown:
                yield f"{counted(each.unknown, 'token')} without a prediction, in no bin"
        yield pairs.bootstrap_text(self.pair.bootstrap_seed)
        yield (
            "The prediction of a criterion is Â · r · its push: right up to the step size, so its "
            "slope has no unit to compare; that of `linear_delta` should be 1."
        )
        yield from pairs.unknown_text([self.pair])
        yield from (f"{name} is left out: {why}" for name, why in self.refused.items())


def _signed(value: float, interval: Interval = statistics.UNDEFINED) -> str:
    """A number that is no share, with its interval, to three significant digits."""
    numbers = (value, *interval)
    texts = [DASH if math.isnan(n) else f"{n:+.3g}".replace("-", "−") for n in numbers]
    return texts[0] if texts[1] == DASH else f"{texts[0]} [{texts[1]}, {texts[2]}]"


_OF_ALL: Final = [
    Column("direction", "the criterion whose push predicts, or `linear_delta`",
           lambda row: row[0].predictor.name, "predictor", key=True),
    Column("tokens", "tokens outside, all seeds", lambda row: sum(map(len, row[0].delta_d))),
    Column("spearman", "rank correlation of prediction and ΔD, pooled over seeds",
           lambda row: row[0].spearman, "Spearman with ΔD, pooled",
           lambda row: number(row[0].spearman, signed=True)),
    *named("spearman_seed_mean", "the same within every seed, mean over seeds",
           lambda row: row[0].spearman_seed_mean[0], lambda row: row[0].spearman_seed_mean[1]),
    Column("", "", str, "mean over seeds", lambda row: _signed(*row[0].spearman_seed_mean)),
    *accuracy_columns("sign", "tokens outside", lambda row: row[0].signs),
    Column("", "", str, "sign of ΔD predicted", lambda row: str(row[0].signs)),
    *_share("slope", "Σ p ΔD / Σ p², least squares through the origin; p without its step size",
            lambda row: row[0].slope),
    Column("", "", str, "slope of ΔD",
           lambda row: _signed(row[0].slope.value, row[0].slope.ci95)),
    Column("r_squared", "1 − Σ (ΔD − slope · p)² / Σ (ΔD − mean)²", lambda row: row[0].r_squared,
           "R²", lambda row: number(row[0].r_squared, signed=True)),
]  # fmt: skip
_OF_BIN: Final = [
    Column("bin", "tokens by quantile of the prediction: the bin in words",
           lambda row: row[1].label, "prediction", key=True),
    Column("low", "lower end of the bin, not in it but in the first", lambda row: row[1].low),
    Column("high", "upper end of the bin, in it", lambda row: row[1].high),
    Column("bin_tokens", "tokens in the bin, all seeds", lambda row: row[1].tokens, "tokens"),
    Column("prediction", "mean prediction in the bin", lambda row: row[1].prediction,
           "mean prediction", lambda row: _signed(row[1].prediction)),
    *_share("delta_d", "mean ΔD in the bin: nats for KL, a probability for TV",
            lambda row: row[1].delta_d),
    Column("", "", str, "mean ΔD", lambda row: _signed(row[1].delta_d.value, row[1].delta_d.ci95)),
    Column("increase", "tokens in the bin with ΔD > 0", lambda row: row[1].increase.part),
    Column("undetermined", "tokens in the bin whose ΔD is below the bound on its error",
           lambda row: row[1].undetermined),
    *_share("increase_rate", "increase / (bin_tokens − undetermined)", lambda row: row[1].increase),
    Column("", "", str, "share with ΔD > 0", lambda row: str(row[1].increase)),
]  # fmt: skip
CALIBRATION_COLUMNS: Final = [each for each in (*_OF_ALL, *_OF_BIN) if each.name]
"""Columns of a calibration, one row per predictor and bin; those before `bin` are of the predictor
and the same in all its bins."""

Calibration.COLUMNS = CALIBRATION_COLUMNS


def calibrate(
    dump: Dump,
    question: Question | None = None,
    *,
    bins: int = DEFAULT_BINS,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
) -> Calibration:
    """Hold every push's prediction against realized ΔD.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        Region and protocol, which must be a shared one. With a threshold of 0 all tokens take
        part whose D is not 0.
    bins : int
        Bins by quantile of the prediction.
    bootstrap_seed, progress, backend
        As in `ladder_table`.
    recompute : bool
        From the top-K log-probs even where D and Ḋ are recorded.

    Returns
    -------
    Calibration
        At least the ratio's push.

    Raises
    ------
    QuestionError
        The protocol is `own`, fewer bins than 1, or what the dump cannot answer.
    DumpError
        A row holds an impossible value.
    """
    resolved = _shared(dump, question, "a calibration needs one update that judges all tokens")
    if bins < 1:
        raise QuestionError(f"`bins` must be at least 1, got {bins}")
    arm, asked = resolved.criterion_arm, resolved.question
    values = predictors(asked.divergence)
    refused = {
        name: why for name, value in values.items() if (why := _lacks(dump, arm, value, asked))
    }
    chosen = {name: value for name, value in values.items() if name not in refused}
    rules = tuple(CRITERIA[name] for name in chosen if name != LINEAR)
    ask = Ask(asked, rules, values=tuple(chosen.values()), recompute=recompute)
    got = read(dump, [arm], ask, backend=backend, progress=progress)
    outside = [found[0] for _, found in sorted(got.items())]
    weighted = unlike_weights(outside)
    pair = pair_of(resolved, got, 0, 0, weighted=weighted, bootstrap_seed=bootstrap_seed)
    known = [each[~np.isnan(each.columns["delta_d"])] for each in outside]
    weights = tuple(
        each.columns["weight"] if weighted else np.ones(each.keep.shape[1]) for each in known
    )

    def by_seed(name: str) -> tuple[NDArray[Any], ...]:
        """One of the columns that were read."""
        return tuple(each.columns[name] for each in known)

    return Calibration(
        pair,
        tuple(
            Calibrated(
                VALUES[value], by_seed(value), by_seed("delta_d"), by_seed("undetermined"), weights,
                bins, bootstrap_seed,
            )
            for value in chosen.values()
        ),
        refused,
    )  # fmt: skip


def rank_correlation(one: Floats, other: Floats, weights: Floats | None = None) -> float:
    """Spearman's rank correlation, ties sharing their mean rank, of pairs without NaN.

    NaN with fewer than three pairs, or where one side does not vary.

    >>> round(rank_correlation(np.array([1.0, 2, 3, 4]), np.array([0.1, 0.2, 0.9, 0.3])), 3)
    0.8
    """
    both = ~(np.isnan(one) | np.isnan(other))
    if np.count_nonzero(both) < LEAST_RANKED:
        return math.nan
    w = np.ones(len(one))[both] if weights is None else weights[both]
    centred = []
    for values in (one[both], other[both]):
        _, place = np.unique(values, return_inverse=True)
        count = np.bincount(place, weights=w)
        ranks = (np.cumsum(count) - (count - 1) / 2)[place]
        centred.append(ranks - (w @ ranks) / w.sum())
    first, second = centred
    size = math.sqrt(float(w @ first**2) * float(w @ second**2))
    return ratio(float(w @ (first * second)), size)


def _asked(pair: Pair) -> dict[str, Any]:
    """What was asked, of how many seeds, as JSON objects begin."""
    bootstrap = pairs.bootstrap_object(pair.bootstrap_seed)
    return {**pairs.asked(pair.question), "seeds": len(pair.seeds), "bootstrap": bootstrap}
