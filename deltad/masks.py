"""The registry of criteria: which tokens lose their gradient.

Every trust-region mask of the field is a *proximity* (is this token outside the region?) and
a *direction* (would its gradient carry it further out?). A token is masked where both say yes:

    outside(token) and Â · direction(token) > 0

A new criterion is one entry of `CRITERIA`; tables, the command line and the law tests find it
there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np

from deltad._array import Array, namespace
from deltad.direction import DIRECTIONS, TAILS, Direction, ratio, ratio_direction
from deltad.divergence import DIVERGENCES
from deltad.support import Support, binary_support

DEFAULT_THRESHOLD: Final = 0.15
"""δ of DPPO's and the paper's masks: nats for KL, a probability for TV."""

CLIP_LOW: Final = 0.2
"""GRPO clip-higher leaves r ≥ 1 − CLIP_LOW alone (DAPO, arXiv:2503.14476)."""

CLIP_HIGH: Final = 0.28
"""GRPO clip-higher leaves r ≤ 1 + CLIP_HIGH alone (DAPO, arXiv:2503.14476)."""


class CriterionError(ValueError):
    """A criterion that does not exist, does not fit the question or lacks a column."""


@dataclass(frozen=True)
class Tokens:
    """What criteria look at: one batch of tokens; derived values are computed once.

    Attributes
    ----------
    advantage : Array, shape (token,)
        Â.
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats.
    support : Support, optional
        Both policies on S; without it only binary proximities and the ratio are known.
    collision : Array, shape (token,), optional
        Σ_j π_j² over the whole vocabulary, for the exact tail.
    full : mapping of name to (D, Ḋ), optional
        Divergence and direction over the whole vocabulary by divergence name, each of shape
        (token,), for the `full` criteria.
    """

    advantage: Array
    behavior_logprob: Array
    policy_logprob: Array
    support: Support | None = None
    collision: Array | None = None
    full: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    _known: dict[tuple[str, ...], Array] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def ratio_direction(self) -> Array:
        """PPO's direction r − 1, shape (token,)."""
        return ratio_direction(self.behavior_logprob, self.policy_logprob)

    @cached_property
    def ratio(self) -> Array:
        """Importance ratio r = π_k/μ_k, shape (token,)."""
        return ratio(self.behavior_logprob, self.policy_logprob)

    def divergence(self, name: str) -> Array:
        """D on the top-K support, shape (token,)."""
        return self._once(("topk", name), lambda: DIVERGENCES[name](self._topk()))

    def binary_divergence(self, name: str) -> Array:
        """D on the support {k, rest}, shape (token,)."""
        return self._once(("binary", name), lambda: DIVERGENCES[name](self._binary))

    def full_divergence(self, name: str) -> Array:
        """D over the whole vocabulary, shape (token,)."""
        return self._whole(name)[0]

    def direction(self, name: str, tail: str) -> Direction:
        """Ḋ on the top-K support with its two terms, each of shape (token,)."""
        if tail == "exact" and self.collision is None:
            raise CriterionError(
                "the exact tail needs the column `pre_collision`, which is missing: "
                "record it, or ask for another tail"
            )
        collision = self.collision if tail == "exact" else None
        known: Direction = self._once(
            ("direction", name, tail),
            lambda: DIRECTIONS[name](self._topk(), tail=tail, collision=collision),
        )
        return known

    def full_direction(self, name: str) -> Array:
        """Ḋ over the whole vocabulary, shape (token,)."""
        return self._whole(name)[1]

    @cached_property
    def _binary(self) -> Support:
        """The support {k, rest}, from the entry in the top-K where there is one."""
        if self.support is None:
            return binary_support(self.behavior_logprob, self.policy_logprob)
        support = self.support
        return binary_support(support.log_mu_sampled, support.log_pi_sampled, check=False)

    def _topk(self) -> Support:
        """The top-K support, or an error that says it is missing."""
        if self.support is None:
            raise CriterionError("these tokens have no top-K log-probs, which this needs")
        return self.support

    def _whole(self, name: str) -> tuple[Array, Array]:
        """D and Ḋ over the whole vocabulary, or an error that says which columns are missing."""
        if name not in self.full:
            raise CriterionError(
                f"the whole vocabulary's divergence needs the columns `full_{name}_pre` and "
                f"`full_{name}_direction`, which are missing: record them, or ask for another tail"
            )
        return self.full[name]

    def _once(self, key: tuple[str, ...], compute: Callable[[], Array]) -> Array:
        """Value of `compute()`, kept for the next question about the same tokens."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]


@dataclass(frozen=True)
class Criterion:
    """One rule that decides which tokens keep their gradient.

    Attributes
    ----------
    name : str
        As options and dumps name it.
    proximity : str
        In words, how a token is found outside the region.
    direction : str
        In words, what says that a gradient carries it further out.
    outside : callable of (Tokens, threshold, divergence) to Array of bool
        The proximity.
    push : callable of Tokens to Array
        The direction; Â times it positive means further out.
    source : str
        Where in the literature it comes from.
    family : str, optional
        The divergence it is bound to: "kl", "tv", or None where any will do.
    columns : tuple of str
        Optional columns of a dump that it needs.
    """

    name: str
    proximity: str
    direction: str
    outside: Callable[[Tokens, float, str], Array]
    push: Callable[[Tokens], Array]
    source: str
    family: str | None = None
    columns: tuple[str, ...] = ()

    def check_family(self, divergence: str) -> None:
        """Refuse a divergence that this criterion's prediction is not the derivative of.

        Raises
        ------
        CriterionError
            `divergence` is unknown, or of another family than the prediction.
        """
        if divergence not in DIVERGENCES:
            raise CriterionError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {divergence!r}"
            )
        if self.family is not None and self.family != divergence:
            raise CriterionError(
                f"criterion {self.name} predicts the {self.family.upper()} divergence and cannot "
                f"judge a {divergence.upper()} region: ask for {self.family} or for "
                f"{self.name.replace(f'-{self.family}-', f'-{divergence}-')}"
            )

    def keep(
        self, tokens: Tokens, *, threshold: float = DEFAULT_THRESHOLD, divergence: str = "kl"
    ) -> Array:
        """Decide which tokens' gradients pass.

        Parameters
        ----------
        tokens : Tokens
            One batch.
        threshold : float
            δ ≥ 0: nats for KL, a probability for TV.
        divergence : {"kl", "tv"}
            The region's divergence.

        Returns
        -------
        Array of bool, shape (token,)
            False where the token is outside the region and Â times the direction is
            positive, both strictly.

        Raises
        ------
        CriterionError
            The threshold is negative or not finite, the divergence does not fit, or a needed
            column is missing.

        Examples
        --------
        μ_k = 0.5 fell to π_k = 0.25, and a negative advantage would push it on:

        >>> import numpy as np
        >>> tokens = Tokens(np.asarray([1.0, -1.0]), np.log([0.5, 0.5]), np.log([0.25, 0.25]))
        >>> criterion("binary-kl").keep(tokens, threshold=0.1).tolist()
        [True, False]
        """
        self.check_family(divergence)
        if not 0 <= threshold < math.inf:
            raise CriterionError(f"`threshold` must be finite and not negative, got {threshold!r}")
        with np.errstate(invalid="ignore"):  # 0 · ∞ is no push: NaN > 0 is False
            further = tokens.advantage * self.push(tokens) > 0
        return ~(self.outside(tokens, threshold, divergence) & further)


def criterion(name: str) -> Criterion:
    """Look a criterion up by name.

    Raises
    ------
    CriterionError
        No such name; the message lists those that exist.
    """
    if name == NONE.name:
        return NONE
    if name not in CRITERIA:
        raise CriterionError(f"there is no criterion {name!r}; choose one of {', '.join(CRITERIA)}")
    return CRITERIA[name]


def _outside_topk(tokens: Tokens, threshold: float, divergence: str) -> Array:
    """D on the top-K support is above the threshold."""
    return tokens.divergence(divergence) > threshold


def _outside_clip(tokens: Tokens, threshold: float, divergence: str) -> Array:
    """Importance ratio out of the clip range, whose bounds are fixed."""
    return (tokens.ratio > 1 + CLIP_HIGH) | (tokens.ratio < 1 - CLIP_LOW)


def _ratio(tokens: Tokens) -> Array:
    """PPO's direction."""
    return tokens.ratio_direction


def _binary(family: str) -> Criterion:
    """DPPO's mask on the support {k, rest}."""
    return Criterion(
        name=f"binary-{family}",
        proximity=f"binary {family.upper()} > δ",
        direction="r − 1",
        outside=lambda tokens, threshold, _: tokens.binary_divergence(family) > threshold,
        push=_ratio,
        source=f"DPPO-Binary-{family.upper()} (TRL, verl)",
    )


def _predictive(family: str, tail: str) -> Criterion:
    """The paper's mask on the top-K support, its tail as assumed."""
    return Criterion(
        name=f"predictive-{family}-{tail}",
        proximity=f"top-K {family.upper()} > δ",
        direction=f"Ḋ of the top-K {family.upper()}, {tail} tail",
        outside=_outside_topk,
        push=lambda tokens: tokens.direction(family, tail).total,
        source="arXiv:2607.10848v1" if tail != "exact" else "deltad; see deltad.direction",
        family=family,
        columns=("pre_collision",) if tail == "exact" else (),
    )


def _predictive_full(family: str) -> Criterion:
    """The paper's mask over the whole vocabulary."""
    return Criterion(
        name=f"predictive-{family}-full",
        proximity=f"{family.upper()} over the vocabulary > δ",
        direction=f"Ḋ of the {family.upper()} over the vocabulary",
        outside=lambda tokens, threshold, _: tokens.full_divergence(family) > threshold,
        push=lambda tokens: tokens.full_direction(family),
        source="arXiv:2607.10848v1",
        family=family,
        columns=(f"full_{family}_pre", f"full_{family}_direction"),
    )


NONE: Final = Criterion(
    name="none",
    proximity="never outside",
    direction="r − 1",
    outside=lambda tokens, threshold, divergence: namespace(tokens.advantage).zeros_like(
        tokens.ratio_direction, dtype=namespace(tokens.advantage).bool
    ),
    push=_ratio,
    source="the unmasked policy gradient",
)
"""Keeps every token; the unmasked update that arms branch beside."""

CRITERIA: Final[Mapping[str, Criterion]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Criterion(
                name="ratio",
                proximity="top-K divergence > δ",
                direction="r − 1",
                outside=_outside_topk,
                push=_ratio,
                source="DPPO-TopK-KL/TV (TRL, verl)",
            ),
            *(
                _predictive_full(family) if tail == "full" else _predictive(family, tail)
                for family in DIVERGENCES
                for tail in (*TAILS, "full")
            ),
            *(_binary(family) for family in DIVERGENCES),
            Criterion(
                name="clip-higher",
                proximity=f"r > {1 + CLIP_HIGH:g} or r < {1 - CLIP_LOW:g}",
                direction="r − 1",
                outside=_outside_clip,
                push=_ratio,
                source="GRPO clip-higher, DAPO (arXiv:2503.14476)",
            ),
        )
    }
)
"""Every criterion that masks, by name."""
