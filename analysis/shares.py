"""Shares of tokens with what they are made of: counts by seed, and an interval over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from . import statistics
from .rates import ratio
from .statistics import Interval


@dataclass(frozen=True, eq=False)
class Share:
    """Σ part / Σ whole over seeds.

    Attributes
    ----------
    parts, wholes : tuple of float
        A seed's two counts (or sums); both 0 where it has no such token.
    bootstrap_seed : int
        Seed of the interval's random numbers.

    Examples
    --------
    >>> share = Share.of([1, 2, 0], [2, 4, 0])
    >>> share.part, share.whole, share.rate, share.ci95
    (3.0, 6.0, 0.5, (0.5, 0.5))
    """

    parts: tuple[float, ...]
    wholes: tuple[float, ...]
    bootstrap_seed: int = 0

    @classmethod
    def of(cls, parts: ArrayLike, wholes: ArrayLike, bootstrap_seed: int = 0) -> Share:
        """Take a number a seed of each."""
        return cls(
            tuple(np.asarray(parts, dtype=np.float64).tolist()),
            tuple(np.asarray(wholes, dtype=np.float64).tolist()),
            bootstrap_seed,
        )

    @classmethod
    def undefined(cls, seeds: int) -> Share:
        """A share of nothing, where there is nothing to be right about."""
        return cls((0.0,) * seeds, (0.0,) * seeds)

    @property
    def part(self) -> float:
        """Σ part over seeds."""
        return float(sum(self.parts))

    @property
    def whole(self) -> float:
        """Σ whole over seeds."""
        return float(sum(self.wholes))

    @property
    def rate(self) -> float:
        """Σ part / Σ whole; NaN over nothing."""
        return ratio(self.part, self.whole)

    @cached_property
    def ci95(self) -> Interval:
        """95 % bootstrap interval over seeds; NaN where fewer than two have such a token."""
        return statistics.bootstrap_ratio(self.parts, self.wholes, seed=self.bootstrap_seed)

    @property
    def by_seed(self) -> tuple[float, ...]:
        """Every seed's own share, NaN where it has no such token."""
        return tuple(ratio(*pair) for pair in zip(self.parts, self.wholes, strict=True))
