"""Bins by quantile of numbers that may be tied."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

UNKNOWN = -1
"""The bin of what has no number."""


def quantile_edges(values: ArrayLike, bins: int) -> NDArray[np.float64]:
    """Edges between bins that hold about as many numbers each, none of them empty.

    Parameters
    ----------
    values : ArrayLike of float, shape (token,)
        NaN takes no part.
    bins : int
        How many bins, at least 1.

    Returns
    -------
    ndarray of float64, shape (edge,)
        Ascending, all of them values that occur: the least one, and the upper end of each
        bin. Tied numbers lie in one bin, so there may be fewer bins than asked for: one where
        all are equal (its two edges the same), and no edge at all over no numbers.

    Notes
    -----
    The upper end of bin i of m is the smallest value with at least a share i/m of all numbers
    at or below it (the inverse of the empirical distribution), so it lies in its own bin.

    Examples
    --------
    >>> quantile_edges([1, 2, 3, 4], 2).tolist(), quantile_edges([0, 0, 0, 7], 4).tolist()
    ([1.0, 2.0, 4.0], [0.0, 0.0, 7.0])
    """
    numbers = np.sort(np.asarray(values, dtype=np.float64))
    numbers = numbers[~np.isnan(numbers)]
    if not len(numbers):
        return np.empty(0)
    # Whole numbers, since i · n / m may exceed what it should be by rounding.
    places = [-(-i * len(numbers) // bins) - 1 for i in range(1, bins + 1)]
    ends = np.unique(numbers[np.maximum(places, 0)])
    return np.concatenate([numbers[:1], ends])


def bin_of(values: ArrayLike, edges: NDArray[np.float64]) -> NDArray[np.intp]:
    """The bin of every number, from 0; `UNKNOWN` for NaN.

    Parameters
    ----------
    values : ArrayLike of float, shape (token,)
        A number beyond the edges is in the first or last bin.
    edges : ndarray of float64, shape (edge,)
        As `quantile_edges` gives them: a number equal to an edge lies below it.

    Returns
    -------
    ndarray of int, shape (token,)
        In [0, edges − 2].

    Examples
    --------
    >>> bin_of([1, 2, 3, float("nan")], quantile_edges([1, 2, 3, 4], 2)).tolist()
    [0, 0, 1, -1]
    """
    numbers = np.asarray(values, dtype=np.float64)
    found = np.searchsorted(edges[1:-1], numbers, side="left")
    return np.where(np.isnan(numbers), UNKNOWN, found)


def interval_label(low: float, high: float, *, first: bool) -> str:
    """A bin's interval: closed above, and below too where it is the first.

    Examples
    --------
    >>> interval_label(0.15, 0.2, first=True), interval_label(3, 3, first=True)
    ('[0.15, 0.2]', '3')
    """
    if low == high:
        return _number(high)
    return f"{'[' if first else '('}{_number(low)}, {_number(high)}]"


def _number(value: float) -> str:
    """Three significant digits, all of a whole number's."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value)).replace("-", "−")
    return f"{value:.3g}".replace("-", "−")
