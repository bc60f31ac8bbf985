"""Misaligned rows: the policy's distribution at t belongs to another position."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from .evidence import FEWEST, Evidence, Ints
from .findings import Finding
from .matching import PAIRS, correlation, looked_up, sides
from .renormalised import Truncation

DISTANCES: Final = (1, -1, 2, -2, 3, -3)
"""Shifts that are tried."""


def shift(evidence: Evidence) -> Finding | None:
    """The policy's row at t matches μ's row at t − d better than μ's row at t."""
    if not len(evidence.rows):
        return None
    if evidence.misplaced > 0.2:
        return _rolled(evidence)
    votes = {d: _votes(evidence, d) for d in DISTANCES}
    best: tuple[float, int, int, bool] | None = None
    for d, (nearer, position) in votes.items():
        for start in (False, True):
            chosen = nearer[position < abs(d)] if start else nearer
            if len(chosen) < 10:
                continue
            share = float(chosen.mean())
            if best is None or share > best[0] + (0.05 if start else 0.0):
                best = (share, d, len(chosen), start)
    tried = {str(d): float(each[0].mean()) for d, each in votes.items() if len(each[0])}
    if best is not None and best[0] > 0.6:
        share, d, pairs, start = best
        score = (share - 0.5) * 2 * np.sqrt(pairs)
        if score > 3:
            return Finding(
                "shift", float(min(0.98, 0.5 + 0.5 * share)), pairs, float(d),
                {"pattern": "the first rows of responses" if start else "all rows",
                 "nearer_to_t_minus_d": share, "pairs": pairs, "tried": tried},
            )  # fmt: skip
    return _entropy_shift(evidence) or _misaligned_start(evidence, tried)


def _entropy_shift(evidence: Evidence) -> Finding | None:
    """π's entropy at t follows that of μ's list at t − d, and not that at t.

    Needs no id that two lists share, as their log-probs do.
    """
    if "pre_entropy" not in evidence.sample.columns:
        return None
    policy = np.asarray(evidence.sample["pre_entropy"], dtype=np.float64)
    behavior = evidence.list_entropy
    known = np.isfinite(policy) & np.isfinite(behavior)
    found: dict[int, tuple[float, float, int]] = {}
    for d in DISTANCES:
        rows, others = evidence.neighbours(d)
        both = known[rows] & known[others]
        pairs = int(both.sum())
        if pairs >= FEWEST:
            rows, others = rows[both], others[both]
            there, here = correlation(
                np.stack([policy[rows], policy[rows]]),
                np.stack([behavior[others], behavior[rows]]),
                np.ones((2, pairs), np.bool_),
            )
            found[d] = (float(there), float(here), pairs)
    if not found:
        return None
    d = max(found, key=lambda each: found[each][0])
    r, here, pairs = found[d]
    # Fisher's z of the two, whose difference has variance 2 / n.
    score = (math.atanh(min(r, 0.999)) - math.atanh(max(here, -0.999))) * math.sqrt(pairs / 2)
    if r < 0.7 or here > 0.5 * r or score < 5:
        return None
    return Finding(
        "shift", float(min(0.97, 0.6 + 0.4 * r)), pairs, float(d),
        {"pattern": "entropies", "correlation_at_t_minus_d": r, "correlation_at_t": here,
         "pairs": pairs, "tried": {str(each): value[0] for each, value in found.items()}},
    )  # fmt: skip


def _rolled(evidence: Evidence) -> Finding | None:
    """The policy's scalar at t is its list's entry where the token at t − d is listed."""
    slot = np.where(evidence.is_listed, evidence.sampled_slot.argmax(axis=1), -1)
    shares = {}
    for d in DISTANCES:
        rows, others = evidence.neighbours(d)
        tells = (slot[others] >= 0) & (slot[others] != slot[rows])
        rows, others = rows[tells], others[tells]
        if len(rows) >= 6:
            gap = np.abs(evidence.pi[rows, slot[others]] - evidence.pi_token[rows])
            shares[d] = (float((gap < 1e-4).mean()), len(rows))
    if not shares:
        return None
    d = max(shares, key=lambda each: shares[each][0])
    share, pairs = shares[d]
    if share < 0.7:
        return None
    return Finding(
        "shift", 0.97, pairs, float(d),
        {"pattern": "rows stored at another place", "agree_at_t_minus_d": share, "pairs": pairs,
         "tried": {str(each): found[0] for each, found in shares.items()}},
    )  # fmt: skip


def _votes(evidence: Evidence, d: int) -> tuple[Ints, Ints]:
    """Whether π at t follows μ at t − d (1) or at t (0), where it takes sides; position of t."""
    rows, others = evidence.neighbours(d)
    if len(rows) > PAIRS:
        pick = np.linspace(0, len(rows) - 1, PAIRS).astype(np.int64)
        rows, others = rows[pick], others[pick]
    theirs = looked_up(evidence, others, evidence.ids[rows])
    taken, some = sides(evidence, rows, theirs)
    return taken, np.asarray(evidence.sample["position"], dtype=np.int64)[rows][some]


def _misaligned_start(evidence: Evidence, tried: dict[str, float]) -> Finding | None:
    """Rows at the beginning of responses hold unrelated distributions, later ones do not."""
    cut = Truncation(evidence)
    if any(cut.of(side)[0].sum() >= 5 for side in ("behavior", "policy")):
        return None  # few slots are left, and correlations mean little
    position = np.asarray(evidence.sample["position"])[evidence.rows]
    for length in (3, 2, 1):
        first, later = position < length, position >= length
        edge = position == length - 1
        if edge.sum() < 4 or later.sum() < 10:
            continue
        # One in twenty of the later rows is worse than this.
        limit = max(float(np.quantile(evidence.drift[later], 0.95)), 0.6)
        worse = evidence.drift > limit
        share = min(float(worse[position == each].mean()) for each in range(length)
                    if (position == each).any())  # fmt: skip
        score = (share - 0.05) * np.sqrt(edge.sum() / (0.05 * 0.95))
        # Responses share their first states, so updates move these most: with AdamW up to 0.68 were
        # worse in a sound seed, 0.87 and more where they were misaligned.
        if share > 0.75 and score > 4:
            return Finding(
                "shift", 0.8, int(first.sum()), float(length),
                {"pattern": "the first rows of responses hold other distributions",
                 "unrelated_at_start": share, "unrelated_later": 0.05, "tried": tried},
            )  # fmt: skip
    return None
