"""D(μ‖π) of two policies at a token, and Ḋ: how D moves when the token's log-prob is pushed up.

The push is one policy-gradient step on the token's own logits, dz = e_k − π, the gradient of
log π_k. A positive Ḋ says that the push carries π away from μ. The part that e_k makes is called
*local*, the part that −π makes *global*. A new divergence is two functions of a `Support` and one
entry of `DIVERGENCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from deltad._array import Array, namespace
from deltad.support import Support

KL_TAIL_FLOOR: Final = 1e-12
"""Least policy tail mass in the KL tail term, as DPPO implementations have it."""


TAILS: Final = ("aggregated", "uniform", "exact")
"""What is assumed of Σ_{j∉S} π_j²: one atom, n − |S| equal atoms, or its measured value."""


class Direction(NamedTuple):
    """Ḋ and its two terms, each of shape (token,), in the unit of its divergence."""

    total: Array
    local: Array
    global_: Array


def kl(support: Support) -> Array:
    """Forward Kullback–Leibler divergence of the reduced policies.

    D = Σ_S μ_i log(μ_i/π_i) + μ_t log(μ_t / max(π_t, 1e-12)), where terms with μ = 0 are 0.

    Parameters
    ----------
    support : Support
        Both policies on S and the tail.

    Returns
    -------
    Array, shape (token,)
        Nats, in [0, ∞) up to rounding. At most the divergence over the whole vocabulary.

    Notes
    -----
    arXiv:2607.10848v1, the top-K divergence of its mask. The floor keeps the rounding of a
    support that holds all the mass of π from deciding.

    Examples
    --------
    >>> import numpy as np
    >>> from deltad.support import binary_support
    >>> float(kl(binary_support(np.log([0.5]), np.log([0.25])))[0].round(4))
    0.1438
    """
    xp = namespace(support.mu)
    zero = xp.zeros_like(support.mu)
    terms = xp.where(
        support.mu > 0, support.mu * (_finite(xp, support.log_mu) - support.log_pi), zero
    )
    has_tail = support.mu_tail > 0
    one = xp.ones_like(support.mu_tail)
    floor = KL_TAIL_FLOOR * one
    pi_tail = xp.where(support.pi_tail > floor, support.pi_tail, floor)
    tail = support.mu_tail * (xp.log(xp.where(has_tail, support.mu_tail, one)) - xp.log(pi_tail))
    return xp.sum(terms, axis=-1) + xp.where(has_tail, tail, xp.zeros_like(tail))


def tv(support: Support) -> Array:
    """Total variation of the reduced policies.

    D = ½(Σ_S |μ_i − π_i| + |μ_t − π_t|)

    Parameters
    ----------
    support : Support
        Both policies on S and the tail.

    Returns
    -------
    Array, shape (token,)
        In [0, 1] up to rounding. At most the divergence over the whole vocabulary.

    Examples
    --------
    >>> import numpy as np
    >>> from deltad.support import binary_support
    >>> float(tv(binary_support(np.log([0.5]), np.log([0.25])))[0].round(4))
    0.25
    """
    xp = namespace(support.mu)
    inside = xp.sum(xp.abs(support.mu - support.pi), axis=-1)
    return (inside + xp.abs(support.mu_tail - support.pi_tail)) / 2


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
    local = support.pi_sampled - support.mu_sampled
    global_ = inside + share * (support.mu_tail - support.pi_tail)
    return Direction(local + global_, local, global_)


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
    local = -0.5 * support.pi_sampled * (sign_sampled - signed_mass)
    global_ = 0.5 * (signed_squares - all_squares * signed_mass)
    return Direction(local + global_, local, global_)


def _finite(xp: Array, log_mu: Array) -> Array:
    """−∞ made 0: its term is dropped, and must not turn into NaN on the way."""
    return xp.where(xp.isfinite(log_mu), log_mu, xp.zeros_like(log_mu))


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


@dataclass(frozen=True)
class Divergence:
    """One divergence.

    Attributes
    ----------
    name : str
        As options and dumps name it.
    value : callable of Support to Array, shape (token,)
        D.
    direction : callable
        Its derivative, called as `kl_direction` is.
    unit : str
        Of D and ΔD; empty for a probability.
    """

    name: str
    value: Callable[[Support], Array]
    direction: DirectionFunction
    unit: str = ""


DIVERGENCES: Final[Mapping[str, Divergence]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Divergence("kl", kl, kl_direction, "nats"),
            Divergence("tv", tv, tv_direction),
        )
    }
)
"""Every divergence by the name that options and dumps use."""
