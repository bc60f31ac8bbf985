"""The top-K log-probs of single tokens, quantised for display; nothing is decided by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .encode import UNKNOWN, encode, quantised
from .gather import Columns

PAGE_BYTES: Final = 14_000_000
"""What a page should not exceed by much; the top-K fills what the rest leaves."""

_SECTION_BYTES: Final = 1_500_000  # tables, figures, style and script
_TRIAL_ROWS: Final = 2_000


@dataclass(frozen=True, eq=False)
class Details:
    """Top-K lists of some tokens.

    Attributes
    ----------
    columns : dict of str to ndarray
        `detail_row` (detail,): the token that each belongs to, ascending. `detail_ids`,
        int32, (detail, topk). `detail_mu`, `detail_pi`, `detail_post`, uint16, (detail, topk):
        −log μ in steps of `QUANTUM`, and π before and after as the difference to the one before
        it, modulo 65,536.
    least : float
        Every token with D above it is among them; NaN where all with vectors are.
    with_vectors : int
        Tokens that have vectors at all.
    """

    columns: Columns
    least: float
    with_vectors: int


def details_of(rows: Columns, *, left: int) -> Details:
    """Take the tokens with the largest D for which there is room.

    Parameters
    ----------
    rows : dict of str to ndarray
        Of the page's arm; see `gather.arm_rows`.
    left : int
        Bytes of the page that are taken already.

    Returns
    -------
    Details
        Of all tokens with vectors where they fit.
    """
    known = np.flatnonzero(rows["vectors"])
    room = PAGE_BYTES - _SECTION_BYTES - left
    count = len(known)
    if count > _TRIAL_ROWS:
        trial = known[:: max(1, count // _TRIAL_ROWS)]
        size = sum(len(encode(values)) for values in _lists(rows, trial).values())
        count = max(_TRIAL_ROWS, min(count, int(room * len(trial) / size)))
    if count == len(known):
        return Details(_lists(rows, known), np.nan, len(known))
    d_pre = rows["d_pre"][known]
    ranked = np.argsort(-d_pre, kind="stable")
    chosen = np.sort(known[ranked[:count]])
    return Details(_lists(rows, chosen), float(d_pre[ranked[count]]), len(known))


def _lists(rows: Columns, chosen: NDArray[np.intp]) -> Columns:
    """The lists of some tokens, padding unknown."""
    ids = rows["topk_ids"][chosen]
    there = ids >= 0
    levels = []
    for name in ("behavior", "pre", "post"):
        nats = -rows[f"topk_{name}_logprobs"][chosen].astype(np.float64)
        levels.append(np.where(there, quantised(np.where(there, nats, 0)), UNKNOWN))
    mu, pi, post = (level.astype(np.uint16) for level in levels)
    return {
        "detail_row": chosen.astype(np.int32),
        "detail_ids": ids.astype(np.int32),
        "detail_mu": mu,
        "detail_pi": pi - mu,
        "detail_post": post - pi,
    }
