"""Ḋ: how a divergence moves when the sampled token's log-prob is pushed up.

The push is one policy-gradient step on the token's own logits, dz = e_k − π, the gradient of
log π_k. A positive Ḋ says that the push carries π away from μ. The part that e_k makes is
called *local*, the part that −π makes *global*.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np

from deltad._array import Array, namespace
from deltad.support import Support

TAILS: Final = ("aggregated", "uniform", "exact")
"""What is assumed of Σ_{j∉S} π_j²: one atom, n − |S| equal atoms, or its measured value."""


class Direction(NamedTuple):
    """Ḋ and its two terms, each of shape (token,), in the unit of its divergence."""

    local: Array
    global_: Array

    @property
    def total(self) -> Array:
        """Ḋ = local + global."""
        return self.local + self.global_


def kl_direction(
    support: Support, *, tail: str = "aggregated", collision: Array | None = None
) -> Direction:
    """Derivative of the forward KL along the sampled token's own policy gradient.

    Ḋ = (π_k − μ_k) + Σ_S π_i(μ_i − π_i) + (C_t/π_t)(μ_t − π_t)

    Parameters
    ----------
    support : Support
        Both policies on S and the tail. Over the whole vocabulary there is no tail term.
    tail : {"aggregated", "uniform", "exact"}
        C_t = Σ_{j∉S} π_j²: π_t², π_t²/(n − |S|), or from `collision`.
    collision : Array, shape (token,), optional
        Σ_j π_j² over the whole vocabulary; needed by the exact tail alone.

    Returns
    -------
    Direction
        In nats per unit of step; positive: pushing k up increases D(μ‖π). Local term:
        π_k − μ_k.

    Raises
    ------
    ValueError
        An unknown tail, or the exact one without `collision`.

    Notes
    -----
    arXiv:2607.10848v1 gives the aggregated and the uniform tail. The exact one is the
    derivative of the reduced divergence itself, since d π_t = −C_t − π_t(π_k − Σ_j π_j²);
    C_t is clamped to [π_t²/(n − |S|), π_t²], and the term is 0 where π_t = 0. On the binary
    support with an aggregated tail Ḋ = 2(π_k − μ_k)(1 − π_k): the direction of the ratio.

    Examples
    --------
    >>> import numpy as np
    >>> from deltad.support import binary_support
    >>> d = kl_direction(binary_support(np.log([0.5]), np.log([0.25])))
    >>> float(d.total[0].round(4)), float(d.local[0].round(4))
    (-0.375, -0.25)
    """
    xp = namespace(support.mu)
    share = _tail_share(xp, support, tail, collision)
    inside = xp.sum(support.pi * (support.mu - support.pi), axis=-1)
    return Direction(
        local=support.pi_sampled - support.mu_sampled,
        global_=inside + share * (support.mu_tail - support.pi_tail),
    )


def tv_direction(
    support: Support, *, tail: str = "aggregated", collision: Array | None = None
) -> Direction:
    """Derivative of the total variation along the sampled token's own policy gradient.

    Ḋ = −½[s_k π_k − Σ s_i π_i² − (π_k − Σ_j π_j²) Σ s_i π_i], s = sign(μ − π), sign(0) = 0

    Parameters
    ----------
    support : Support
        Both policies on S and the tail; sums run over S and the tail's atoms.
    tail : {"aggregated", "uniform", "exact"}
        As in `kl_direction`.
    collision : Array, shape (token,), optional
        As in `kl_direction`.

    Returns
    -------
    Direction
        Per unit of step. Local term: −½ π_k (s_k − Σ s_i π_i).

    Raises
    ------
    ValueError
        As `kl_direction`.

    Notes
    -----
    D is not differentiable where some π_i = μ_i; sign(0) = 0 takes the middle of its
    one-sided derivatives there.
    """
    xp = namespace(support.mu)
    tail_collision = _tail_share(xp, support, tail, collision) * support.pi_tail
    sign = xp.sign(support.mu - support.pi)
    tail_sign = xp.sign(support.mu_tail - support.pi_tail)
    squares = support.pi * support.pi
    signed_mass = xp.sum(sign * support.pi, axis=-1) + tail_sign * support.pi_tail
    signed_squares = xp.sum(sign * squares, axis=-1) + tail_sign * tail_collision
    all_squares = xp.sum(squares, axis=-1) + tail_collision
    sign_sampled = xp.sum(xp.where(support.sampled, sign, xp.zeros_like(sign)), axis=-1)
    return Direction(
        local=-0.5 * support.pi_sampled * (sign_sampled - signed_mass),
        global_=0.5 * (signed_squares - all_squares * signed_mass),
    )


def ratio_direction(behavior_logprob: Array, policy_logprob: Array) -> Array:
    """PPO's direction r − 1 = π_k/μ_k − 1, whose sign is that of the binary divergences.

    Parameters
    ----------
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats; what exceeds 0 by rounding counts as 0.

    Returns
    -------
    Array, shape (token,)
        In [−1, ∞], without unit; ∞ where it overflows. Exactly 0 only where both log-probs
        are equal.

    Examples
    --------
    >>> import numpy as np
    >>> float(ratio_direction(np.log([0.2]), np.log([0.3]))[0].round(4))
    0.5
    """
    xp = namespace(behavior_logprob)
    with np.errstate(over="ignore"):
        return xp.expm1(_log_ratio(xp, behavior_logprob, policy_logprob))


def ratio(behavior_logprob: Array, policy_logprob: Array) -> Array:
    """Importance ratio r = π_k/μ_k.

    Parameters
    ----------
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats; what exceeds 0 by rounding counts as 0.

    Returns
    -------
    Array, shape (token,)
        In [0, ∞], without unit; 0 or ∞ where it underflows or overflows.

    Examples
    --------
    >>> import numpy as np
    >>> float(ratio(np.log([0.2]), np.log([0.3]))[0].round(4))
    1.5
    """
    xp = namespace(behavior_logprob)
    with np.errstate(over="ignore"):
        return xp.exp(_log_ratio(xp, behavior_logprob, policy_logprob))


def _log_ratio(xp: Array, behavior_logprob: Array, policy_logprob: Array) -> Array:
    """Log π_k − log μ_k in nats, each clamped to at most 0."""
    zero = xp.zeros_like(behavior_logprob)
    behavior = xp.where(behavior_logprob > 0, zero, behavior_logprob)
    policy = xp.where(policy_logprob > 0, zero, policy_logprob)
    return policy - behavior


def _tail_share(xp: Array, support: Support, tail: str, collision: Array | None) -> Array:
    """C_t/π_t, the mean probability of a token drawn from π's tail; 0 where π_t = 0."""
    if tail == "aggregated":
        return support.pi_tail
    atoms = xp.where(support.tail_size > 1, support.tail_size, xp.ones_like(support.tail_size))
    if tail == "uniform":
        return support.pi_tail / atoms
    if tail != "exact":
        raise ValueError(f"`tail` must be one of {', '.join(TAILS)}, got {tail!r}")
    if collision is None:
        raise ValueError("the exact tail needs `collision`, Σ_j π_j² over the whole vocabulary")
    square = support.pi_tail * support.pi_tail
    tail_collision = collision - xp.sum(support.pi * support.pi, axis=-1)
    tail_collision = xp.where(tail_collision < square / atoms, square / atoms, tail_collision)
    tail_collision = xp.where(tail_collision > square, square, tail_collision)
    has_tail = support.pi_tail > 0
    divisor = xp.where(has_tail, support.pi_tail, xp.ones_like(square))
    return xp.where(has_tail, tail_collision / divisor, xp.zeros_like(square))


class DirectionFunction(Protocol):
    """Derivative of one divergence; called as `kl_direction` is."""

    def __call__(
        self, support: Support, *, tail: str = ..., collision: Array | None = ...
    ) -> Direction:
        """Ḋ of the support."""
        ...


DIRECTIONS: Final[Mapping[str, DirectionFunction]] = MappingProxyType(
    {"kl": kl_direction, "tv": tv_direction}
)
"""The derivative of every divergence in `deltad.divergence.DIVERGENCES`, by the same name."""
