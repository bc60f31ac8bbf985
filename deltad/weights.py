"""Neighbours' masks and soft weights, as one number a token.

Every method of the field multiplies the plain importance-weighted gradient of a token,

    r Â ∇ log π_k,        r = π_k/μ_k,

by a weight w: a mask by 0 or 1, a capped importance weight by min(r, C)/r, a smooth one by
something in between (DRPO's by less than 0 where it pulls a token back). So they can stand
beside each other on one dump, whatever they were written as. `WEIGHTS` holds them by name;
every criterion of `deltad.masks` is among them, as the weight 1 where it keeps and 0 where it
masks.

Here μ is the behaviour policy, the one that sampled. Some of these methods were written for two
policies of the trainer and a third of the engine, and correct for the engine alone
(π_old/μ); on a dump, which knows the policy of the step and μ, the whole ratio is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from deltad._array import Array, namespace
from deltad.masks import (
    CRITERIA,
    DEFAULT_THRESHOLD,
    NONE,
    Criterion,
    CriterionError,
    Tokens,
)

ICEPOP_LOW: Final = 0.5
"""α of IcePop, the smallest ratio that keeps its gradient; the value is commonly used."""

ICEPOP_HIGH: Final = 5.0
"""β of IcePop, the largest ratio that keeps its gradient; others take 2 (slime, miles)."""

CISPO_CAP: Final = 5.0
"""ε_max of CISPO, where the importance weight is clipped (ScaleRL's setting in TRL)."""

TIS_CAP: Final = 2.0
"""C of truncated importance sampling (default of verl's rollout correction)."""

MIS_CAP: Final = 2.0
"""C of masked importance sampling (the setting in TRL's documentation)."""

DRPO_THRESHOLD: Final = DEFAULT_THRESHOLD
"""δ of DRPO: the shift |π_k − μ_k| at which a token that drifts away weighs nothing.

DRPO shares its region with DPPO's binary TV mask, so that mask's δ is taken; what the paper's
runs used could not be verified.
"""


def cap(tokens: Tokens, *, cap: float) -> Array:
    """Weight of a capped importance weight relative to the uncapped one.

    w = min(r, C)/r = min(1, C/r)

    Parameters
    ----------
    tokens : Tokens
        One batch.
    cap : float
        C > 0, where the importance weight stops to grow; its gradient is stopped.

    Returns
    -------
    Array, shape (token,)
        In [0, 1]; 1 where r ≤ C, and 0 where r overflows.

    Raises
    ------
    CriterionError
        `cap` is not a positive number.

    Notes
    -----
    CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5, without a lower bound as there) and
    truncated importance sampling ("Your efficient RL framework secretly brings you off-policy
    RL training", Yao et al. 2025) are this weight with different caps. Both stop the gradient
    of the weight, so every token keeps pushing.

    Examples
    --------
    r = 4 with a cap of 2 counts half, r = 1 in full:

    >>> import numpy as np
    >>> tokens = Tokens(np.ones(2), np.log([0.2, 0.2]), np.log([0.8, 0.2]))
    >>> cap(tokens, cap=2.0).round(12).tolist()
    [0.5, 1.0]
    """
    _positive("cap", cap)
    xp = namespace(tokens.advantage)
    ratio = tokens.ratio
    one = xp.ones_like(ratio)
    return xp.where(ratio > cap, cap / xp.where(ratio > cap, ratio, one), one)


def band(tokens: Tokens, *, low: float, high: float) -> Array:
    """Weight 1 where the ratio lies in a band, 0 elsewhere, whatever the advantage.

    w = 1 where low ≤ r ≤ high, else 0

    Parameters
    ----------
    tokens : Tokens
        One batch.
    low, high : float
        0 ≤ low ≤ 1 ≤ high; both ends belong to the band.

    Returns
    -------
    Array, shape (token,)
        0 or 1, in the dtype of the log-probs.

    Raises
    ------
    CriterionError
        The band does not hold r = 1.

    Notes
    -----
    IcePop ("Small leak can sink a great ship", Ling team 2025; Ring-1T, arXiv:2510.18855, and
    INTELLECT-3, arXiv:2512.16144, Eq. 1) drops tokens on both sides. Masked importance
    sampling (TRL's `token_mask`) drops the upper side alone: low = 0. Unlike clip-higher, both
    also drop a token whose gradient would bring the ratio back.

    Examples
    --------
    >>> import numpy as np
    >>> tokens = Tokens(np.ones(3), np.log([0.1, 0.1, 0.9]), np.log([0.9, 0.1, 0.1]))
    >>> band(tokens, low=0.5, high=5.0).tolist()
    [0.0, 1.0, 0.0]
    """
    if not 0 <= low <= 1 <= high < math.inf:
        raise CriterionError(
            f"`low` and `high` must bound a band around r = 1, got [{low!r}, {high!r}]"
        )
    xp = namespace(tokens.advantage)
    ratio = tokens.ratio
    zero, one = xp.zeros_like(ratio), xp.ones_like(ratio)
    return xp.where((ratio >= low) & (ratio <= high), one, zero)


def drpo(tokens: Tokens, *, delta: float) -> Array:
    """DRPO's smooth weight, linear in the sampled token's shift of probability.

    w = 1 − sign(Â (r − 1)) |π_k − μ_k|/δ

    Parameters
    ----------
    tokens : Tokens
        One batch.
    delta : float
        δ > 0, a probability: where a token that drifts away weighs nothing.

    Returns
    -------
    Array, shape (token,)
        In [1 − 1/δ, 1 + 1/δ]. Below 1 where the gradient carries π_k away from μ_k, 0 at a
        shift of δ and *negative* beyond (it pulls back); above 1 where it brings π_k back.

    Raises
    ------
    CriterionError
        `delta` is not a positive number.

    Notes
    -----
    Divergence regularized policy optimization, "Rethinking the divergence regularization in LLM
    RL", arXiv:2606.09821. The weight is the derivative of its objective
    r Â − (|Â|/2δ) μ_k (r − 1)² by log π_k over r Â: (1 − sign(Â)(π_k − μ_k)/δ). The objective
    and the weight were checked against each other and against two descriptions of the paper
    (the second one the documentation of UniRL, its authors' framework); the paper itself could
    not be read. Where Â = 0 there is nothing to weigh, and w = 1.

    Examples
    --------
    A shift of 0.1 with δ = 0.2, pushed on and pushed back:

    >>> import numpy as np
    >>> tokens = Tokens(np.asarray([1.0, -1.0]), np.log([0.3, 0.3]), np.log([0.4, 0.4]))
    >>> drpo(tokens, delta=0.2).round(12).tolist()
    [0.5, 1.5]
    """
    _positive("delta", delta)
    xp = namespace(tokens.advantage)
    behavior = xp.exp(xp.where(tokens.behavior_logprob > 0, 0.0, tokens.behavior_logprob))
    policy = xp.exp(xp.where(tokens.policy_logprob > 0, 0.0, tokens.policy_logprob))
    return 1 - xp.sign(tokens.advantage) * (policy - behavior) / delta


@dataclass(frozen=True)
class Weight:
    """What one method multiplies a token's importance-weighted gradient by.

    Attributes
    ----------
    name : str
        As options and tables name it.
    formula : str
        In words and symbols.
    function : callable of Tokens and keywords to Array
        The formula; takes the parameters, or `threshold` and `divergence` where it is a
        criterion's decision.
    source : str
        Where in the literature it comes from, and what is known of the parameters.
    parameters : mapping of str to float
        Its own parameters with their defaults; empty for a criterion.
    columns : tuple of str
        Optional columns of a dump that it needs.
    criterion : Criterion, optional
        The criterion whose decision it is; None where it has a formula of its own.
    """

    name: str
    formula: str
    function: Callable[..., Array]
    source: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    criterion: Criterion | None = None

    def compute(
        self,
        tokens: Tokens,
        *,
        threshold: float = DEFAULT_THRESHOLD,
        divergence: str = "kl",
        **parameters: float,
    ) -> Array:
        """Weigh every token.

        Parameters
        ----------
        tokens : Tokens
            One batch.
        threshold : float
            δ of a criterion, as `Criterion.keep` takes it; no other weight looks at it.
        divergence : {"kl", "tv"}
            The region's divergence of a criterion; no other weight looks at it.
        **parameters : float
            In place of the defaults in `parameters`.

        Returns
        -------
        Array, shape (token,)
            In the dtype of the log-probs; 1 where r = 1.

        Raises
        ------
        CriterionError
            An unknown parameter or an impossible value; for a criterion also what
            `Criterion.keep` raises.

        Examples
        --------
        >>> import numpy as np
        >>> tokens = Tokens(np.ones(2), np.log([0.1, 0.1]), np.log([0.8, 0.1]))
        >>> weight("tis").compute(tokens, cap=4.0).round(12).tolist()
        [0.5, 1.0]
        """
        unknown = sorted(parameters.keys() - self.parameters.keys())
        if unknown:
            takes = ", ".join(self.parameters) or "none"
            raise CriterionError(
                f"weight {self.name} has no parameter {', '.join(unknown)}; its own: {takes}"
            )
        if self.criterion is not None:
            return self.function(tokens, threshold=threshold, divergence=divergence)
        with np.errstate(over="ignore"):
            return self.function(tokens, **{**self.parameters, **parameters})

    def keep(
        self, tokens: Tokens, *, threshold: float = DEFAULT_THRESHOLD, divergence: str = "kl"
    ) -> Array:
        """Decide which tokens still push in their own direction: w > 0.

        Parameters
        ----------
        tokens : Tokens
            One batch.
        threshold, divergence
            As in `compute`.

        Returns
        -------
        Array of bool, shape (token,)
            The same as `Criterion.keep` for a criterion.
        """
        return self.compute(tokens, threshold=threshold, divergence=divergence) > 0


def weight(name: str) -> Weight:
    """Look a weight up by name.

    Raises
    ------
    CriterionError
        No such name; the message lists those that exist.
    """
    if name not in WEIGHTS:
        raise CriterionError(f"there is no weight {name!r}; choose one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name]


def _positive(name: str, value: float) -> None:
    """Refuse a parameter that is not a positive number."""
    if not 0 < value < math.inf:
        raise CriterionError(f"`{name}` must be positive and finite, got {value!r}")


def _of(criterion: Criterion) -> Weight:
    """Weight 1 where a criterion keeps, 0 where it masks."""

    def decided(tokens: Tokens, *, threshold: float, divergence: str) -> Array:
        """Its decision in the dtype of the log-probs."""
        xp = namespace(tokens.advantage)
        kept = criterion.keep(tokens, threshold=threshold, divergence=divergence)
        return xp.astype(kept, tokens.behavior_logprob.dtype)

    return Weight(
        name=criterion.name,
        formula=f"0 where {criterion.proximity} and Â · ({criterion.direction}) > 0, else 1",
        function=decided,
        source=criterion.source,
        columns=criterion.columns,
        criterion=criterion,
    )


WEIGHTS: Final[Mapping[str, Weight]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            _of(NONE),
            *(_of(rule) for rule in CRITERIA.values()),
            Weight(
                name="icepop",
                formula="1 where α ≤ r ≤ β, else 0",
                function=band,
                source="IcePop: Ring-1T (arXiv:2510.18855), INTELLECT-3 (arXiv:2512.16144); "
                "α and β are a draft's in prime-rl after the latter, read in neither report",
                parameters=MappingProxyType({"low": ICEPOP_LOW, "high": ICEPOP_HIGH}),
            ),
            Weight(
                name="mis",
                formula="1 where r ≤ C, else 0",
                function=lambda tokens, *, cap: band(tokens, low=0.0, high=cap),
                source="masked importance sampling a token, TRL's `token_mask`",
                parameters=MappingProxyType({"cap": MIS_CAP}),
            ),
            Weight(
                name="tis",
                formula="min(r, C)/r",
                function=cap,
                source="truncated importance sampling a token (Yao et al. 2025), TRL's "
                "`token_truncate`, verl's `rollout_is: token`",
                parameters=MappingProxyType({"cap": TIS_CAP}),
            ),
            Weight(
                name="cispo",
                formula="min(r, ε_max)/r",
                function=cap,
                source="CISPO: MiniMax-M1 (arXiv:2506.13585), ε_max as in ScaleRL "
                "(arXiv:2510.13786)",
                parameters=MappingProxyType({"cap": CISPO_CAP}),
            ),
            Weight(
                name="drpo",
                formula="1 − sign(Â (r − 1)) |π_k − μ_k|/δ",
                function=drpo,
                source="DRPO (arXiv:2606.09821)",
                parameters=MappingProxyType({"delta": DRPO_THRESHOLD}),
            ),
        )
    }
)
"""Every weight by name. The variants of masked and truncated importance sampling that judge a
whole response by the product of its ratios are no function of one token and are left out."""
