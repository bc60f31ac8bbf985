"""The ladder: where the sign of ΔD is lost between a token's own logits and the realized step.

A criterion foretells the sign of ΔD from the token's own policy gradient. Rung by rung the
change of D that is foretold becomes the one that happens: the token's logits alone, its own
gradient through shared parameters, its sequence's, the batch's, the optimizer's step to first
order, parts of the step, the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from . import statistics
from .counting import (
    Decider,
    Outside,
    Progress,
    checked_batches,
    columns_for,
    decisions,
    outside_of,
)
from .question import OWN, Question, QuestionError, check_columns, decider
from .result import Result
from .statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from deltad.dumps import Dump, Metadata

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rung:
    """One change of D, from what a criterion looks at to what happened.

    Attributes
    ----------
    name : str
        As tables and files call it.
    label : str
        In words: the direction that D is followed along.
    cause : str
        What is added on this rung to the one before it.
    column : str
        Of the dump; empty where it is computed from the policies.
    """

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
    Rung("update", "the optimizer's step, first order", "the optimizer", "linear_delta"),
    Rung("tenth", "a tenth of the step", "curvature, to a tenth", "delta_tenth"),
    Rung("realized", "the step", "curvature, to the step"),
    Rung("triple", "three times the step", "curvature, beyond the step", "delta_triple"),
)  # fmt: skip
"""From the bottom up."""

SETS: Final = ("outside", "disagreement")
SAMPLED: Final = ("own", "sequence")
"""The rungs that a sample of tokens has."""

_UNKNOWN: Final = -1


@dataclass(frozen=True, eq=False)
class Share:
    """A share of tokens, pooled over seeds.

    Attributes
    ----------
    above, below : ndarray of float64, shape (seed,)
        Its two counts in every seed; sampled tokens count for those that they stand for, so
        these may be broken.
    bootstrap_seed : int
        Of the interval's random numbers.
    """

    above: Floats
    below: Floats
    bootstrap_seed: int

    @property
    def numerator(self) -> float:
        """Tokens counted."""
        return float(self.above.sum())

    @property
    def denominator(self) -> float:
        """Tokens among which they were counted."""
        return float(self.below.sum())

    @property
    def share(self) -> float:
        """In [0, 1], for a difference in [−1, 1]; NaN over nothing."""
        return self.numerator / self.denominator if self.denominator else math.nan

    @cached_property
    def ci95(self) -> Interval:
        """Bootstrap over seeds; NaN with fewer than two."""
        return statistics.bootstrap_ratio(self.above, self.below, seed=self.bootstrap_seed)

    @property
    def by_seed(self) -> Floats:
        """The share in every seed, shape (seed,); NaN where it has no such token."""
        shares: Floats = np.full(len(self.above), np.nan)
        np.divide(self.above, self.below, out=shares, where=self.below > 0)
        return shares


@dataclass(frozen=True, eq=False)
class SeedLadder:
    """One seed's tokens outside the region.

    Attributes
    ----------
    seed, tokens : int
        Which, and how many tokens it has, stored or not.
    grows : ndarray of int8, shape (rung, token)
        1 where ΔD > 0 on a rung, 0 where not, −1 where it was not measured.
    masks : ndarray of bool, shape (criterion, token)
        Where a criterion foretells ΔD > 0.
    disagreement : ndarray of bool, shape (token,)
        The question's pair decides differently.
    weight : ndarray of float64, shape (token,)
        How many tokens a sampled one stands for.
    """

    seed: int
    tokens: int
    grows: NDArray[np.int8]
    masks: Bools
    disagreement: Bools
    weight: Floats


@dataclass(frozen=True, eq=False)
class LadderTable(Result):
    """Shares of signs that criteria foretell, rung by rung, in one arm of a dump.

    Attributes
    ----------
    question : Question
        Its protocol settled: `shared:<arm>`.
    criteria : tuple of str
        The question's criterion and baseline, then others.
    seeds : tuple of SeedLadder
        In ascending order.
    missing : mapping of str to str
        Rungs that the dump does not have, and why.
    recorded : mapping
        What the dump says of how the ladder was measured.
    bootstrap_seed : int
        Of the intervals' random numbers.
    """

    question: Question
    criteria: tuple[str, ...]
    seeds: tuple[SeedLadder, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, Any] = field(default_factory=dict)
    bootstrap_seed: int = 0
    _known: dict[tuple[str, ...], Share] = field(default_factory=dict, repr=False)

    @property
    def arm(self) -> str:
        """Whose update the upper rungs follow."""
        return self.question.protocol.partition(":")[2]

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs that the dump has, from the bottom up."""
        return tuple(rung for rung in RUNGS if rung.name not in self.missing)

    def right(self, rung: str, criterion: str, within: str = "outside") -> Share:
        """Share of tokens whose sign on a rung a criterion foretells.

        Parameters
        ----------
        rung : str
            Name of one of `rungs`.
        criterion : str
            One of `criteria`: masking foretells ΔD > 0, keeping ΔD ≤ 0.
        within : {"outside", "disagreement"}
            Which tokens.

        Returns
        -------
        Share
            Over the tokens that have the rung.
        """
        return self._pooled("right", rung, criterion, within)

    def increase(self, rung: str, within: str = "outside") -> Share:
        """Share of tokens whose D grows on a rung: the base rate there."""
        return self._pooled("increase", rung, "", within)

    def constant_guess(self, rung: str, within: str = "outside") -> float:
        """Share on which the better constant guess is right, in [0.5, 1]."""
        rate = self.increase(rung, within).share
        return math.nan if math.isnan(rate) else max(rate, 1 - rate)

    def agreement(self, rung: str, within: str = "outside") -> Share:
        """Share of tokens whose sign on a rung is that of the step as it was made."""
        return self._pooled("agreement", rung, "", within)

    def cost(self, rung: str, criterion: str, within: str = "outside") -> Share:
        """What a rung adds to a criterion's share of right signs, mostly below 0.

        Parameters
        ----------
        rung, criterion, within : str
            As in `right`.

        Returns
        -------
        Share
            Right on this rung less right on the one below, over the tokens that have both; on
            the lowest, less 1: what a criterion loses by seeing the top-K alone, or (the ratio)
            the sampled token alone.
        """
        return self._pooled("cost", rung, criterion, within)

    def cause(self, rung: str) -> str:
        """What lies between a rung and the one below it that the dump has."""
        below = self._below(rung)
        names = [each.name for each in RUNGS]
        first = 0 if below is None else names.index(below.name) + 1
        return " + ".join(each.cause for each in RUNGS[first : names.index(rung) + 1])

    def tokens(self, within: str = "outside") -> int:
        """How many tokens there are."""
        return sum(int(_chosen(seed, within).sum()) for seed in self.seeds)

    def sampled(self, within: str = "outside") -> int:
        """How many of them have the sampled rungs."""
        at = _place("own")
        return sum(
            int((_chosen(seed, within) & (seed.grows[at] != _UNKNOWN)).sum()) for seed in self.seeds
        )

    def to_json_object(self) -> dict[str, Any]:
        """Every share and cost; NaN is None."""
        from .export import without_nan
        from .ladder_text import ladder_object

        known: dict[str, Any] = without_nan(ladder_object(self))
        return known

    def columns(self) -> dict[str, list[Any]]:
        """A row a rung, set of tokens and criterion: `LADDER_TABLE_COLUMNS`."""
        from .ladder_text import ladder_columns

        return ladder_columns(self)

    def text(self) -> RenderableType:
        """Shares, base rates, agreement with the step, costs, and what is missing."""
        from .ladder_text import ladder_text

        return ladder_text(self)

    def figure(self) -> Figure:
        """Shares right and agreement with the step over the rungs."""
        from .figures.ladder import ladder_figure

        return ladder_figure(self)

    def _below(self, rung: str) -> Rung | None:
        """The next rung below that the dump has."""
        names = [each.name for each in self.rungs]
        at = names.index(rung)
        return self.rungs[at - 1] if at else None

    def _pooled(self, kind: str, rung: str, criterion: str, within: str) -> Share:
        """A share pooled over seeds; made once, so that its interval is drawn once."""
        key = (kind, rung, criterion, within)
        if key not in self._known:
            self._known[key] = Share(*self._counts(*key), self.bootstrap_seed)
        return self._known[key]

    def _counts(self, kind: str, rung: str, criterion: str, within: str) -> tuple[Floats, Floats]:
        """Numerator and denominator of a share in every seed."""
        below = self._below(rung) if kind == "cost" else None
        needed = {"agreement": [rung, "realized"], "cost": [rung, *([below.name] if below else [])]}
        rungs = needed.get(kind, [rung])
        places = [_place(each) for each in rungs]
        judge = self.criteria.index(criterion) if criterion else 0
        counts = np.zeros((2, len(self.seeds)))
        for at, seed in enumerate(self.seeds):
            known = _chosen(seed, within) & (seed.grows[places] != _UNKNOWN).all(axis=0)
            grows = seed.grows[places][:, known] == 1
            weight = np.ones(grows.shape[1])
            if any(each in SAMPLED for each in rungs):
                weight = seed.weight[known]
            right = (seed.masks[judge, known] == grows).astype(np.float64)
            value = {
                "right": right[0],
                "increase": grows[0],
                "agreement": grows[0] == grows[-1],
                "cost": right[0] - (right[-1] if below else 1.0),
            }[kind]
            counts[:, at] = (value * weight).sum(), weight.sum()
        return counts[0], counts[1]


def ladder_table(
    dump: Dump,
    question: Question | None = None,
    *,
    criteria: Sequence[str] = (),
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
) -> LadderTable:
    """Follow the sign of ΔD from a token's own logits to the realized step.

    Parameters
    ----------
    dump : Dump
        With the ladder's columns; without them the lowest rung and the step itself remain.
    question : Question, optional
        By default the paper's; its protocol names the arm.
    criteria : sequence of str
        Others to judge beside the question's two.
    bootstrap_seed : int
        Of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every block read.

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
    asked = question or Question()
    if asked.protocol == OWN:
        raise QuestionError(
            "the ladder follows one update: ask for the protocol `shared:` and an arm"
        )
    resolved = asked.resolve(dump)
    arm = resolved.criterion_arm
    names = tuple(
        dict.fromkeys((resolved.question.criterion, resolved.question.baseline, *criteria))
    )
    deciders = [decider(name) for name in names]
    for each in deciders:
        check_columns(dump, arm, each)
    recorded = dump.metadata(arm).extra.get("ladder")
    recorded = recorded if isinstance(recorded, dict) else {}
    missing = _missing(dump, arm, resolved.question)
    columns = [
        *columns_for(*deciders),
        *(rung.column for rung in RUNGS if rung.column and rung.name not in missing),
    ]
    if "logits" not in missing:
        columns.append("pre_collision")
    seeds = tuple(
        _seed(dump, arm, seed, resolved.question, deciders, list(dict.fromkeys(columns)), recorded,
              missing, progress)
        for seed in dump.seeds(arm)
    )  # fmt: skip
    for rung in RUNGS:
        if rung.name not in missing and all(
            (seed.grows[_place(rung.name)] == _UNKNOWN).all() for seed in seeds
        ):
            reason = recorded.get("reasons", {}).get(rung.name)
            missing[rung.name] = (
                f"column `{rung.column}` is NULL in every token outside"
                + (f" ({reason})" if reason else "")
                if any(len(seed.disagreement) for seed in seeds)
                else "no token is outside"
            )
    return LadderTable(resolved.question, names, seeds, missing, recorded, bootstrap_seed)


def _missing(dump: Dump, arm: str, question: Question) -> dict[str, str]:
    """Rungs that an arm does not have, and why."""
    present = dump.optional_columns(arm)
    found: dict[str, str] = {}
    if "pre_collision" not in present:
        found["logits"] = "column `pre_collision` is missing"
    metadata = dump.metadata(arm)
    followed = _followed(metadata)
    for rung in RUNGS:
        if rung.column and rung.column not in present:
            found[rung.name] = f"column `{rung.column}` is missing"
        elif rung.column and followed != question.divergence:
            found[rung.name] = (
                f"column `{rung.column}` follows the divergence {followed}, not "
                f"{question.divergence}"
            )
    return found


def _followed(metadata: Metadata) -> str:
    """The divergence that the ladder's columns follow."""
    ladder = metadata.extra.get("ladder")
    named = ladder.get("divergence") if isinstance(ladder, dict) else None
    return str(named or metadata.update.get("divergence") or "kl")


def _seed(
    dump: Dump,
    arm: str,
    seed: int,
    question: Question,
    deciders: Sequence[Decider],
    columns: Sequence[str],
    recorded: Mapping[str, Any],
    missing: Mapping[str, str],
    progress: Progress | None,
) -> SeedLadder:
    """Judge the tokens outside of one seed."""
    grows: list[NDArray[np.int8]] = [np.empty((len(RUNGS), 0), np.int8)]
    keep: list[Bools] = [np.empty((len(deciders), 0), np.bool_)]
    strata: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for batch, metadata in checked_batches(dump, arm, seed, columns, progress=progress):
        found = outside_of(batch, metadata, question)
        if found is not None:
            grows.append(_grows(found, question, missing))
            keep.append(decisions(found.tokens, question, deciders))
            strata.append(_strata(found, recorded))
    up, kept = np.concatenate(grows, axis=1), np.concatenate(keep, axis=1)
    measured = up[_place("own")] != _UNKNOWN
    return SeedLadder(
        seed=seed,
        tokens=dump.rows_seen(arm, seed),
        grows=up,
        masks=~kept,
        disagreement=kept[0] != kept[1],
        weight=_weights(np.concatenate(strata), measured),
    )


def _grows(found: Outside, question: Question, missing: Mapping[str, str]) -> NDArray[np.int8]:
    """Sign of ΔD of every token on every rung, shape (rung, token)."""
    rows = np.full((len(RUNGS), len(found.delta_d)), _UNKNOWN, np.int8)
    for at, rung in enumerate(RUNGS):
        if rung.name in missing:
            continue
        if rung.name == "realized":
            values = found.delta_d
        elif rung.name == "logits":
            direction = found.tokens.direction(question.divergence, "exact").total
            values = np.asarray(found.tokens.advantage * direction)
        else:
            values = found.batch[rung.column]
        rows[at] = np.where(np.isnan(values), _UNKNOWN, values > 0)
    return rows


def _strata(found: Outside, recorded: Mapping[str, Any]) -> NDArray[np.int64]:
    """Which of the groups, that were sampled one before the other, a token belongs to."""
    try:
        region = Question(
            threshold=recorded["threshold"],
            divergence=recorded["divergence"],
            criterion=recorded["criterion"],
            baseline=recorded["baseline"],
        )
        keep = decisions(
            found.tokens, region, [decider(region.criterion), decider(region.baseline)]
        )
    except (KeyError, TypeError, ValueError):  # the dump does not say how it was sampled
        return np.zeros(len(found.delta_d), np.int64)
    outside = found.tokens.divergence(region.divergence) > region.threshold
    return np.where(outside & (keep[0] != keep[1]), 0, np.where(outside, 1, 2))


def _weights(strata: NDArray[np.int64], measured: Bools) -> Floats:
    """Tokens of a stratum a sampled one stands for; 1 where all were sampled, 0 where none."""
    weight = np.ones(len(strata))
    for each in np.unique(strata):
        inside = strata == each
        sampled = int((inside & measured).sum())
        weight[inside] = inside.sum() / sampled if sampled else 0.0
    return weight


def _place(rung: str) -> int:
    """Index of a rung in `RUNGS`."""
    return [each.name for each in RUNGS].index(rung)


def _chosen(seed: SeedLadder, within: str) -> Bools:
    """Which tokens of a seed are meant."""
    return seed.disagreement if within == "disagreement" else np.ones_like(seed.disagreement)
