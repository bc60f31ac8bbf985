"""Two rates compared seed by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .intervals import bootstrap_mean
from .seeds import Interval, floats, mean
from .signed import (
    permutation_flips,
    permutation_is_exact,
    permutation_test,
    sign_test,
    wilcoxon_test,
)


@dataclass(frozen=True)
class Paired:
    """Two rates compared seed by seed, over the seeds in which both exist.

    Attributes
    ----------
    seeds : int
        Seeds in which both rates exist.
    lower, tied, higher : int
        Seeds in which the criterion's rate is below, equal to, above the baseline's.
    difference : float
        Mean over the paired seeds of criterion − baseline; NaN without paired seeds.
    difference_ci95 : tuple of float
        Bootstrap over the paired seeds; NaN with fewer than two.
    sign_test_p, wilcoxon_p, permutation_p : float
        Two-sided; NaN where no paired seed differs.
    permutation_flips : int
        Sign flips that the permutation test looked at.
    """

    seeds: int
    lower: int
    tied: int
    higher: int
    difference: float
    difference_ci95: Interval
    sign_test_p: float
    wilcoxon_p: float
    permutation_p: float
    permutation_flips: int

    @property
    def permutation_exact(self) -> bool:
        """Whether the permutation test looked at every sign flip, or at a random sample."""
        return permutation_is_exact(self.lower + self.higher)


def compare_paired(criterion: ArrayLike, baseline: ArrayLike, *, bootstrap_seed: int = 0) -> Paired:
    """Compare two rates seed by seed.

    Parameters
    ----------
    criterion, baseline : ArrayLike of float, shape (seed,)
        Rates in [0, 1]; NaN where a seed has none.
    bootstrap_seed : int
        Seed of the random numbers of the bootstrap, and of the permutation test where it
        draws.

    Returns
    -------
    Paired
        All counts 0 and all numbers NaN where no seed has both rates.

    Examples
    --------
    >>> pair = compare_paired([0.2, 0.5, float("nan")], [0.4, 0.5, 0.1])
    >>> pair.seeds, pair.lower, pair.tied, pair.higher, round(pair.difference, 12)
    (2, 1, 1, 0, -0.1)
    """
    ours, theirs = floats(criterion), floats(baseline)
    both = ~(np.isnan(ours) | np.isnan(theirs))
    ours, theirs = ours[both], theirs[both]
    differences = ours - theirs
    lower = int(np.count_nonzero(ours < theirs))
    higher = int(np.count_nonzero(ours > theirs))
    return Paired(
        seeds=len(differences),
        lower=lower,
        tied=len(differences) - lower - higher,
        higher=higher,
        difference=mean(differences),
        difference_ci95=bootstrap_mean(differences, seed=bootstrap_seed),
        sign_test_p=sign_test(lower, higher),
        wilcoxon_p=wilcoxon_test(differences),
        permutation_p=permutation_test(differences, seed=bootstrap_seed),
        permutation_flips=permutation_flips(lower + higher),
    )
