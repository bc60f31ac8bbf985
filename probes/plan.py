"""Which parts of a batch a forward must take to reach some of its positions: pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_STOPS = 128
"""Different lengths that are told apart when sequences are put together."""


@dataclass(frozen=True)
class Branch:
    """Sequences that one forward takes, all equally far.

    Attributes
    ----------
    rows : tuple of int
        Rows of the batch, ascending.
    stop : int
        Columns up to here are taken.
    """

    rows: tuple[int, ...]
    stop: int


@dataclass(frozen=True)
class Trunk:
    """What some sequences begin with alike, and the forwards that go on from there.

    Attributes
    ----------
    length : int
        Columns that are forwarded once, of the first row of the first branch; 0 for none.
    branches : tuple of Branch
        Each is forwarded from column `length` on.
    """

    length: int
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Plan:
    """The forwards that reach every wanted position of a batch.

    Attributes
    ----------
    trunks : tuple of Trunk
        Their branches hold every row with a wanted position, each once.
    """

    trunks: tuple[Trunk, ...]

    @property
    def tokens(self) -> int:
        """Positions that are forwarded."""
        return sum(
            trunk.length
            + sum(len(each.rows) * (each.stop - trunk.length) for each in trunk.branches)
            for trunk in self.trunks
        )

    @property
    def shares(self) -> bool:
        """Whether some prompt is forwarded once for several sequences."""
        return any(trunk.length for trunk in self.trunks)


def make_plan(
    row: NDArray[np.int64],
    column: NDArray[np.int64],
    *,
    overhead: int,
    groups: Mapping[int, int] | None = None,
    common: Callable[[Sequence[int]], int] | None = None,
) -> Plan:
    """Leave out rows without wanted positions and everything after the last one of a row.

    Parameters
    ----------
    row, column : array of int, shape (position,)
        Where something is wanted.
    overhead : int
        What one more forward costs, in positions.
    groups : mapping of int to int, optional
        Group of each row; rows of one group may begin alike.
    common : callable, optional
        Takes rows and gives the number of columns in which all of them are alike. Without it
        nothing is shared.

    Returns
    -------
    Plan
        Without trunks if nothing is wanted.
    """
    stops = _extremes(row, column + 1, np.maximum)
    firsts = _extremes(row, column, np.minimum)
    if groups is None or common is None:
        return Plan((Trunk(0, _branches(stops, overhead)),) if stops else ())
    members: dict[int, list[int]] = {}
    for each in sorted(stops):
        members.setdefault(groups[each], []).append(each)
    trunks, alone = [], dict(stops)
    for rows in members.values():
        if len(rows) < 2:
            continue
        # What is wanted must lie behind what is shared: only there hidden states are kept.
        length = min(common(rows), min(firsts[each] for each in rows))
        if (len(rows) - 1) * length <= overhead:
            continue
        own = {each: alone.pop(each) for each in rows}
        trunks.append(Trunk(length, _branches(own, overhead)))
    if alone:
        trunks.append(Trunk(0, _branches(alone, overhead)))
    return Plan(tuple(trunks))


def _extremes(
    row: NDArray[np.int64], column: NDArray[np.int64], extreme: np.ufunc
) -> dict[int, int]:
    """Largest or smallest column of each row."""
    rows, inverse = np.unique(row, return_inverse=True)
    if not len(rows):
        return {}
    begin = 0 if extreme is np.maximum else np.iinfo(np.int64).max
    found = np.full(len(rows), begin, np.int64)
    extreme.at(found, inverse, column)
    return dict(zip(rows.tolist(), found.tolist(), strict=True))


def _branches(stops: Mapping[int, int], overhead: int) -> tuple[Branch, ...]:
    """Put rows together that end near each other: the cheapest way, by dynamic programming.

    All rows of a branch are padded to its longest, a branch costs `overhead`; rows in order of
    length, so that a branch is a run of them.
    """
    coarse = _coarse(stops)
    lengths = sorted(set(coarse.values()), reverse=True)
    counts = [sum(1 for each in coarse.values() if each == length) for length in lengths]
    cheapest, best = [0], [0]  # of the first i lengths, and where their last branch begins
    for end in range(1, len(lengths) + 1):
        rows, options = 0, []
        for begin in range(end - 1, -1, -1):
            rows += counts[begin]
            options.append((cheapest[begin] + overhead + rows * lengths[begin], begin))
        cost, begin = min(options)
        cheapest.append(cost)
        best.append(begin)
    found, end = [], len(lengths)
    while end:
        begin = best[end]
        mine = set(lengths[begin:end])
        rows_here = tuple(sorted(each for each, stop in coarse.items() if stop in mine))
        found.append(Branch(rows_here, max(stops[each] for each in rows_here)))
        end = begin
    return tuple(reversed(found))


def _coarse(stops: Mapping[int, int]) -> dict[int, int]:
    """Round lengths up where there are too many different ones."""
    different = set(stops.values())
    if len(different) <= _MOST_STOPS:
        return dict(stops)
    unit = -(-max(different) // _MOST_STOPS)
    return {row: -(-stop // unit) * unit for row, stop in stops.items()}
