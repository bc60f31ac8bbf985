"""The equations once more, token by token in plain Python floats, apart from the package.

Works on whole distributions: μ and π as lists over the vocabulary, a list of ids that the
engine returned, and the sampled id. Everything the package computes from log-probs at a few
ids must come out as what these functions compute from the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]


def support_of(listed: Sequence[int], sampled: int) -> list[int]:
    """S: the listed ids (padding dropped) united with the sampled one."""
    ids = [i for i in listed if i >= 0]
    return ids if sampled in ids else [*ids, sampled]


def atoms(mu: Vector, pi: Vector, ids: Sequence[int]) -> list[tuple[float, float]]:
    """(μ, π) of each id of S, then of the tail bucket."""
    inside = [(mu[i], pi[i]) for i in ids]
    if len(ids) >= len(mu):
        return [*inside, (0.0, 0.0)]
    rest = [j for j in range(len(mu)) if j not in ids]
    return [*inside, (math.fsum(mu[j] for j in rest), math.fsum(pi[j] for j in rest))]


def kl(mu: Vector, pi: Vector, ids: Sequence[int]) -> float:
    """Forward KL of the reduced distributions."""
    *inside, (mu_tail, pi_tail) = atoms(mu, pi, ids)
    terms = [m * math.log(m / p) for m, p in inside if m > 0]
    if mu_tail > 0:
        terms.append(mu_tail * math.log(mu_tail / max(pi_tail, 1e-12)))
    return math.fsum(terms)


def tv(mu: Vector, pi: Vector, ids: Sequence[int]) -> float:
    """Total variation of the reduced distributions."""
    return math.fsum(abs(m - p) for m, p in atoms(mu, pi, ids)) / 2


def pushed(pi: Vector, sampled: int, eta: float) -> list[float]:
    """π after adding η (e_k − π) to its logits."""
    logits = [
        (math.log(p) if p > 0 else -math.inf) + eta * ((j == sampled) - p) for j, p in enumerate(pi)
    ]
    peak = max(logits)
    weights = [math.exp(z - peak) for z in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def central_difference(
    divergence: object, mu: Vector, pi: Vector, ids: Sequence[int], sampled: int
) -> float:
    """d D / dη at η = 0, by central difference and one Richardson step.

    With h = 1e-3 the error is O(h⁴) = 1e-12 times the fifth derivative, beside a rounding of
    about 1e-16 / h = 1e-13.
    """
    assert callable(divergence)

    def slope(h: float) -> float:
        up = divergence(mu, pushed(pi, sampled, h), ids)
        down = divergence(mu, pushed(pi, sampled, -h), ids)
        return float(up - down) / (2 * h)

    h = 1e-3
    return (4 * slope(h / 2) - slope(h)) / 3
