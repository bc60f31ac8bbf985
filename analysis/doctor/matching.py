"""Which of two rows of μ a row of π follows."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .evidence import Bools, Evidence, Floats, Ints

PAIRS: Final = 4000
"""Pairs of rows looked at for one shift."""


def looked_up(evidence: Evidence, rows: Ints, ids: NDArray[np.integer]) -> Floats:
    """Values of log μ that some rows give to ids, NaN where they do not list them."""
    found = np.full(ids.shape, np.nan)
    for slot in range(evidence.ids.shape[1]):
        listed = np.where(evidence.usable[rows, slot], evidence.ids[rows, slot], -2)
        found = np.where(ids == listed[:, None], evidence.mu[rows, slot][:, None], found)
    return found


def sides(evidence: Evidence, rows: Ints, theirs: Floats) -> tuple[Ints, Bools]:
    """Whether π follows other values than the row's own μ, over the ids that both have.

    By correlation, which no temperature and no offset changes, and by distance.

    Returns
    -------
    sides : array of int
        1 for the others, 0 for its own; rows that take no side are left out.
    some : array of bool, shape (row,)
        Rows that take sides.
    """
    own, policy = evidence.mu[rows], evidence.pi[rows]
    shared = evidence.usable[rows] & np.isfinite(theirs)
    gap = np.abs(np.where(shared, theirs - own, 0.0))
    # Only where the two differ can π take sides.
    tells = (shared.sum(axis=1) >= 3) & (gap.max(axis=1, initial=0) > 1.0)
    with_own, with_theirs = (correlation(policy, each, shared) for each in (own, theirs))
    to_own, to_theirs = (
        np.where(shared, np.abs(policy - each), 0.0).sum(axis=1) for each in (own, theirs)
    )
    others = (with_theirs > np.maximum(with_own + 0.25, 0.6)) & (to_theirs < 0.7 * to_own)
    mine = (with_own > with_theirs) | (to_own < to_theirs)
    some = tells & (others | mine)
    return others[some].astype(np.int64), some


def correlation(log_p: Floats, log_q: Floats, used: Bools) -> Floats:
    """Pearson's r over the used slots of each row; 0 where one of them is constant."""
    n = np.maximum(used.sum(axis=1, keepdims=True), 1)
    p, q = (np.where(used, each, 0.0) for each in (log_p, log_q))
    p, q = (np.where(used, each - each.sum(axis=1, keepdims=True) / n, 0.0) for each in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (p * q).sum(axis=1) / np.sqrt((p * p).sum(axis=1) * (q * q).sum(axis=1))
    return np.asarray(np.where(np.isfinite(r), r, 0.0))
