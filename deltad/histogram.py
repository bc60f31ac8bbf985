"""A histogram of divergences with fixed bins, so that counts of any two can be added."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

BINS_PER_DECADE: Final = 40
"""Bins are 10^(1/40) = 1.059 wide: a quantile is off by a factor of 10^(1/80) = 1.029 at most."""

LEAST: Final = -10
"""Decade below which everything counts as 0: D is rounding there."""

MOST: Final = 3
"""Decade above which everything counts as one; KL with its floored tail stays far below."""

_ZERO: Final = -1
_ABOVE: Final = (MOST - LEAST) * BINS_PER_DECADE


@dataclass(frozen=True)
class LogHistogram:
    """Counts of numbers ≥ 0 in bins of equal width on a logarithmic scale.

    Attributes
    ----------
    counts : mapping of int to int
        Numbers in a bin, by the bin's place; −1 holds those below 10^LEAST.
    """

    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> LogHistogram:
        """Count numbers; what is below 0 by rounding counts as 0, and NaN not at all.

        Parameters
        ----------
        values : ndarray, shape (token,)
            Divergences.

        Returns
        -------
        LogHistogram
            Empty where there are none.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.floor((np.log10(np.maximum(values, 0.0)) - LEAST) * BINS_PER_DECADE)
        known = place[~np.isnan(values)]
        bins, counts = np.unique(np.clip(known, _ZERO, _ABOVE).astype(np.int64), return_counts=True)
        return cls(dict(zip(bins.tolist(), counts.tolist(), strict=True)))

    @property
    def total(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts.values())

    def __add__(self, other: LogHistogram) -> LogHistogram:
        """Both together."""
        return LogHistogram(dict(sorted((Counter(self.counts) + Counter(other.counts)).items())))

    def quantile(self, share: float) -> float:
        """Find the number that a share of all numbers does not exceed.

        Parameters
        ----------
        share : float
            In (0, 1].

        Returns
        -------
        float
            Geometric middle of the bin in which that number lies, within a factor of
            10^(1/80); 0 for the lowest bin, ∞ for the highest, NaN where nothing was counted.

        Raises
        ------
        ValueError
            `share` is not in (0, 1].

        Examples
        --------
        >>> histogram = LogHistogram.of(np.array([0.0, 0.1, 0.2, 0.4]))
        >>> histogram.quantile(0.25), round(histogram.quantile(0.75), 2)
        (0.0, 0.21)
        """
        if not 0 < share <= 1:
            raise ValueError(f"`share` must be in (0, 1], got {share!r}")
        rank = math.ceil(share * self.total - 1e-9)  # 0.1 · 30 is a hair above 3
        seen = 0
        for place, count in sorted(self.counts.items()):
            seen += count
            if seen >= rank:
                if place in (_ZERO, _ABOVE):
                    return 0.0 if place == _ZERO else math.inf
                return float(10 ** (LEAST + (place + 0.5) / BINS_PER_DECADE))
        return math.nan
