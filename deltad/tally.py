"""The one place where tokens are counted: kept, unsafe, contracting, undetermined.

Every command and the live monitor count by `count_pair`; rates are quotients of what it gives.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

FIELDS: Final = (
    "tokens", "undetermined", "bounded", "determined", "increase", "decrease",
    "weight", "weight_increase", "weight_decrease",
)  # fmt: skip
"""What is counted of a set of tokens: all of them; those whose |ΔD| is below the bound on its
error, and those with such a bound; the *determined*, whose ΔD is known and above its bound, and
of these those with ΔD > 0 and with ΔD < 0; and Σ weight of each of the last three."""

SETS: Final = (
    "outside", "disagreement", "criterion_kept", "baseline_kept",
    "criterion_right", "baseline_right", "criterion_right_apart", "baseline_right_apart",
)  # fmt: skip
"""The sets that a pair of criteria makes of the tokens outside: all; those that exactly one
masks; of these what each keeps; and where each predicted the sign of ΔD (kept: ΔD ≤ 0, masked:
ΔD > 0), of all outside and of those in disagreement."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Judged(NamedTuple):
    """Tokens outside the region and what the update did to them, each of shape (token,).

    Attributes
    ----------
    delta_d : ndarray of float64
        ΔD; NaN where the policy after the update was not read.
    undetermined : ndarray of bool
        Where |ΔD| is below the bound on its error.
    bounded : ndarray of bool
        Where that bound was recorded.
    weight : ndarray of float64
        Tokens that each stands for; 1 where all sequences were recorded.
    """

    delta_d: Floats
    undetermined: Bools
    bounded: Bools
    weight: Floats

    @classmethod
    def of(
        cls, delta_d: Floats, noise: Floats | None = None, weight: Floats | None = None
    ) -> Judged:
        """Judge ΔD by the bound on its error; without one everything is determined."""
        bounded = np.zeros(len(delta_d), np.bool_) if noise is None else ~np.isnan(noise)
        with np.errstate(invalid="ignore"):
            unclear = bounded if noise is None else np.asarray(np.abs(delta_d) < noise)
        return cls(delta_d, unclear, bounded, np.ones(len(delta_d)) if weight is None else weight)

    def some(self, rows: Bools) -> Judged:
        """Some of the tokens."""
        delta_d, undetermined, bounded, weight = self
        return Judged(delta_d[rows], undetermined[rows], bounded[rows], weight[rows])


def count(judged: Judged, rows: Bools) -> Floats:
    """Count sets of tokens: the `FIELDS` of each, all in float64.

    Parameters
    ----------
    judged : Judged
        The tokens.
    rows : ndarray of bool, shape (..., token)
        Which of them are in a set.

    Returns
    -------
    ndarray of float64, shape (..., field)
    """
    delta_d, undetermined, bounded, weight = judged
    determined = ~(undetermined | np.isnan(delta_d))
    up, down = determined & (delta_d > 0), determined & (delta_d < 0)
    sums = [weight * each for each in (determined, up, down)]
    every = np.ones_like(weight)
    fields = np.stack([every, undetermined, bounded, determined, up, down, *sums], axis=-1)
    return np.asarray(rows.astype(np.float64) @ fields)


def count_pair(judged: Judged, criterion: Bools, baseline: Bools) -> dict[str, Floats]:
    """Count the sets that two criteria make of the tokens outside.

    Parameters
    ----------
    judged : Judged
        The tokens outside.
    criterion, baseline : ndarray of bool, shape (token,)
        Which of them each keeps.

    Returns
    -------
    dict of str to ndarray of float64, shape (field,)
        By `SETS`, the `FIELDS` of each.

    Examples
    --------
    >>> judged = Judged.of(np.array([0.1, -0.2, 0.3]))
    >>> found = count_pair(judged, np.array([True, True, False]), np.array([True, False, True]))
    >>> [int(found[name][0]) for name in ("outside", "disagreement", "criterion_kept")]
    [3, 2, 1]
    >>> int(found["baseline_kept"][FIELDS.index("increase")])  # its only token was unsafe
    1
    """
    apart = criterion != baseline
    known = ~(judged.undetermined | np.isnan(judged.delta_d))
    right = [(keep != (judged.delta_d > 0)) & known for keep in (criterion, baseline)]
    sets = [
        np.ones_like(apart), apart, apart & criterion, apart & baseline,
        *right, *(each & apart for each in right),
    ]  # fmt: skip
    return dict(zip(SETS, count(judged, np.stack(sets)), strict=True))
