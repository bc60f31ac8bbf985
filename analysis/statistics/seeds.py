"""What every statistic over seeds starts from: a number a seed, and intervals as two ends."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL: Final = 0.95
"""Of every interval."""

Interval = tuple[float, float]
UNDEFINED: Final[Interval] = (float("nan"), float("nan"))


def mean(values: ArrayLike) -> float:
    """Mean of the values that are not NaN.

    Parameters
    ----------
    values : ArrayLike of float, shape (seed,)
        One number a seed; NaN where it is undefined.

    Returns
    -------
    float
        NaN over no values.

    Examples
    --------
    >>> mean([1.0, float("nan"), 2.0])
    1.5
    """
    numbers = floats(values)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else float("nan")


def floats(values: ArrayLike) -> NDArray[np.float64]:
    """Values as a float64 vector."""
    return np.asarray(values, dtype=np.float64).reshape(-1)
