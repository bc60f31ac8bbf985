"""Whole responses: which tokens stand in a state that a sibling shares.

A token's state is its prompt and the response before it. Siblings (responses of one group in
the same step) begin in one state, so their first tokens share it; they go on sharing as long
as their tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .counting import checked_batches
from .engine import Progress

if TYPE_CHECKING:
    from deltad.dumps import Dump

OWN_STATE: Final = 0
SHARED_STATE: Final = 1
UNKNOWN_STATE: Final = -1
STATES: Final = ("own", "shared")
"""Names of the states that are known, by number."""

COLUMNS: Final = ("step", "group", "sequence", "position", "token_id")
_INCOMPLETE: Final = -1


class Responses:
    """How far every response of a seed goes along with a sibling.

    Parameters
    ----------
    tokens : ndarray of int, shape (token, 5)
        The `COLUMNS` of every token of a seed, in any order.
    whole : bool
        Whether no token was left out on purpose.
    """

    def __init__(self, tokens: NDArray[np.int64], *, whole: bool) -> None:
        self._shared: dict[tuple[int, int], int] = {}
        if not whole:
            return
        order = np.lexsort(tuple(tokens[:, at] for at in (3, 2, 1, 0)))
        rows = tokens[order].tolist()
        for _, group in groupby(rows, key=lambda row: (row[0], row[1])):
            self._read_group(list(group))

    def state(self, step: ArrayLike, sequence: ArrayLike, position: ArrayLike) -> NDArray[np.intp]:
        """Whether tokens stand in a state of their own.

        Parameters
        ----------
        step, sequence, position : ArrayLike of int, shape (token,)
            Which tokens.

        Returns
        -------
        ndarray of int, shape (token,)
            `SHARED_STATE` where another response of the group has the same tokens before this
            position, and always at position 0; else `OWN_STATE`; `UNKNOWN_STATE` behind the
            first position where some token of the group is missing.
        """
        keys = zip(np.asarray(step).tolist(), np.asarray(sequence).tolist(), strict=True)
        reach = np.array([self._shared.get(key, _INCOMPLETE) for key in keys], dtype=np.intp)
        place = np.asarray(position)
        known = np.where(place <= reach, SHARED_STATE, OWN_STATE)
        known = np.where(reach == _INCOMPLETE, UNKNOWN_STATE, known)
        return np.where(place == 0, SHARED_STATE, known)

    def _read_group(self, rows: list[list[int]]) -> None:
        """Note the longest prefix that every response of a group shares with another."""
        step = rows[0][0]
        responses: list[tuple[tuple[int, ...], int]] = []
        for sequence, tokens in groupby(rows, key=lambda row: row[2]):
            found = list(tokens)
            if [row[3] for row in found] != list(range(len(found))):
                return  # a token is missing, and could be what sets siblings apart
            responses.append((tuple(row[4] for row in found), sequence))
        responses.sort()
        reach = [0] * len(responses)
        # Among sorted responses, the one that shares the longest prefix is a neighbour.
        for at, ((one, _), (other, _)) in enumerate(pairwise(responses)):
            common = _common(one, other)
            reach[at] = max(reach[at], common)
            reach[at + 1] = common
        self._shared |= {
            (step, sequence): shared for (_, sequence), shared in zip(responses, reach, strict=True)
        }


def read_responses(
    dump: Dump, arm: str, seed: int, *, progress: Progress | None = None
) -> Responses:
    """Read the responses of one seed of one arm; nothing is read of a thinned dump.

    Parameters
    ----------
    dump, arm, seed
        Which rows.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    Responses
        All unknown but for first positions where the dump stores only some tokens or sequences.

    Raises
    ------
    DumpError
        A row holds an impossible value.
    """
    whole = all(
        part.metadata.stored_above is None and part.metadata.sampling is None
        for part in dump.files(arm, seed)
    )
    blocks = [np.empty((0, len(COLUMNS)), dtype=np.int64)]
    if whole:
        for batch, _ in checked_batches(dump, arm, seed, COLUMNS, progress=progress):
            blocks.append(np.stack([batch[name].astype(np.int64) for name in COLUMNS], axis=1))
    return Responses(np.concatenate(blocks), whole=whole)


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    """How many tokens two responses begin with in common."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
