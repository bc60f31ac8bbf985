"""Rows that break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Finding(NamedTuple):
    """Rows of a batch that break one rule.

    Attributes
    ----------
    column : str
        Where.
    kind : str
        The rule.
    rows : array of int
        Offending rows of the batch, ascending, at least one.
    describe : callable of int to str
        What was expected and found in a row of the batch.
    """

    column: str
    kind: str
    rows: NDArray[np.intp]
    describe: Callable[[int], str]


def anywhere(bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows with a True in any slot."""
    return np.asarray(bad.any(axis=1), dtype=np.bool_)


def find(
    name: str, kind: str, bad: NDArray[np.bool_], describe: Callable[[int], str]
) -> Iterator[Finding]:
    """One finding where `bad` is True anywhere."""
    if bad.any():
        yield Finding(name, kind, np.flatnonzero(bad), describe)
