"""The ladder: where the sign of ΔD is lost between a token's own logits and the realized step.

A criterion foretells the sign of ΔD from the token's own policy gradient. Rung by rung the
change of D that is foretold becomes the one that happens: the token's logits alone, its own
gradient through shared parameters, its sequence's, the batch's, the optimizer's step to first
order, parts of the step, the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from . import statistics
from .question import Question
from .result import Result
from .statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

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

UNKNOWN: Final = -1
"""Stands in `SeedLadder.grows` for a sign that was not measured."""


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
    seeds: tuple[SeedLadder, ...] = field(repr=False)
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
        at = place("own")
        return sum(
            int((_chosen(seed, within) & (seed.grows[at] != UNKNOWN)).sum()) for seed in self.seeds
        )

    def to_json_object(self) -> dict[str, Any]:
        """Every share and cost; NaN is None."""
        from .export import without_nan
        from .forms.ladder import ladder_object

        known: dict[str, Any] = without_nan(ladder_object(self))
        return known

    def columns(self) -> dict[str, list[Any]]:
        """A row a rung, set of tokens and criterion: `LADDER_TABLE_COLUMNS`."""
        from .forms.ladder import ladder_columns

        return ladder_columns(self)

    def text(self) -> RenderableType:
        """Shares, base rates, agreement with the step, costs, and what is missing."""
        from .forms.ladder import ladder_text

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
        places = [place(each) for each in rungs]
        judge = self.criteria.index(criterion) if criterion else 0
        counts = np.zeros((2, len(self.seeds)))
        for at, seed in enumerate(self.seeds):
            known = _chosen(seed, within) & (seed.grows[places] != UNKNOWN).all(axis=0)
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


def place(rung: str) -> int:
    """Index of a rung in `RUNGS`."""
    return [each.name for each in RUNGS].index(rung)


def _chosen(seed: SeedLadder, within: str) -> Bools:
    """Which tokens of a seed are meant."""
    return seed.disagreement if within == "disagreement" else np.ones_like(seed.disagreement)
