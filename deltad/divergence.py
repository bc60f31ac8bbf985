"""D(μ‖π) of two policies at a token, in nats (KL) or as a probability (TV).

A new divergence goes here as a function of a `Support`, one entry of `DIVERGENCES`, and its
derivative in `deltad.direction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from deltad._array import Array, namespace
from deltad.support import Support

KL_TAIL_FLOOR: Final = 1e-12
"""Least policy tail mass in the KL tail term, as DPPO implementations have it."""


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


def _finite(xp: Array, log_mu: Array) -> Array:
    """−∞ made 0: its term is dropped, and must not turn into NaN on the way."""
    return xp.where(xp.isfinite(log_mu), log_mu, xp.zeros_like(log_mu))


DIVERGENCES: Final[Mapping[str, Callable[[Support], Array]]] = MappingProxyType(
    {"kl": kl, "tv": tv}
)
"""Every divergence by the name that options and dumps use."""
