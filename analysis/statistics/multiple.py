"""Several tests at once: Holm's correction."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .seeds import floats


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """p-values corrected for being several, by Holm's step-down rule.

    A corrected value of at most α may be called significant: the chance that any true null
    among them is then called so is at most α, however the tests depend on each other.

    Parameters
    ----------
    p_values : ArrayLike of float, shape (test,)
        In [0, 1]; NaN where a test could not be made.

    Returns
    -------
    ndarray of float64, shape (test,)
        In the same order, each at least what it was; NaN stays NaN and takes no part: m below
        is the number of the others.

    Raises
    ------
    ValueError
        A value outside [0, 1].

    Notes
    -----
    With p₍₁₎ ≤ … ≤ p₍ₘ₎: max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎) (Holm 1979).

    Examples
    --------
    >>> [round(float(p), 3) for p in holm([0.04, 0.01, float("nan"), 0.03])]
    [0.06, 0.03, nan, 0.06]
    """
    numbers = floats(p_values)
    tested = np.flatnonzero(~np.isnan(numbers))
    if np.any((numbers[tested] < 0) | (numbers[tested] > 1)):
        raise ValueError(f"p-values must lie in [0, 1], got {numbers[tested]}")
    order = tested[np.argsort(numbers[tested], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    corrected = np.full(len(numbers), np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * numbers[order]))
    return corrected
