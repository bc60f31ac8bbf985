"""Truncated sampling: one side is normalised over fewer ids than the other."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from .distance import MARGIN, temperature
from .evidence import FEWEST, Bools, Evidence, Floats
from .findings import Finding
from .noise import residuals

EXACT: Final = 2e-5
"""Distance of a mass from 1 that float32 rounding of 20 log-probs explains."""

LOST: Final = 3e-3
"""Mass that one policy has outside what is all of the other: far above `EXACT`."""


def truncation(evidence: Evidence) -> Finding | None:
    """One policy holds all its mass on ids where the other has less than 1."""
    cut = Truncation(evidence)
    for side in ("behavior", "policy"):
        rows, kept = cut.of(side)
        judged = int(cut.judged.sum())
        if rows.sum() >= 5 and rows.sum() >= 0.02 * judged:
            values = kept[rows]
            infinite = int(np.isneginf(evidence.mu[evidence.listed]).sum())
            offset = evidence.pi - evidence.mu if side == "behavior" else evidence.mu - evidence.pi
            spread = _spread(np.where(evidence.usable, offset, np.nan)[rows])
            return Finding(
                "truncation", 0.97 if rows.sum() >= 20 else 0.85, int(rows.sum()),
                float(values.mean()),
                {"side": side, "rows_of_mass_1": int(rows.sum()), "rows_judged": judged,
                 "surviving_mass": float(values.mean()),
                 "surviving_mass_quantiles": np.quantile(values, [0.05, 0.5, 0.95]).tolist(),
                 "mean_offset_nats": float(np.log(values).mean()),
                 "offset_spread_in_a_row_nats": spread,
                 "entries_of_minus_infinity": infinite,
                 "declared_top_p": evidence.metadata.behavior.get("top_p"),
                 "declared_top_k": evidence.metadata.behavior.get("top_k")},
            )  # fmt: skip
    return _renormalised(evidence) or _unused_tail(evidence)


class Truncation:
    """Masses of both policies on the finite support of each other."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def judged(self) -> Bools:
        """Rows whose list is whole but for −∞."""
        e = self.evidence
        fills = e.filled("topk_behavior_logprobs") | e.filled("topk_pre_logprobs")
        possible = ~e.listed | ((e.ids >= 0) & (e.ids < e.metadata.vocab_size))
        nan = (np.isnan(e.mu) | np.isnan(e.pi)) & e.listed
        ordered = np.sort(np.where(e.listed, e.ids, -1), axis=1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
        whole = e.listed.sum(axis=1) < e.metadata.vocab_size
        return np.asarray(
            e.has_list
            & ~fills.any(axis=1)
            & possible.all(axis=1)
            & ~nan.any(axis=1)
            & ~twice
            & whole
        )

    def of(self, side: str) -> tuple[Bools, Floats]:
        """Rows in which `side` has mass 1 on its support and the other visibly less there."""
        e = self.evidence
        ours, theirs = (e.mu, e.pi) if side == "behavior" else (e.pi, e.mu)
        ours_token, theirs_token = (
            (e.mu_token, e.pi_token) if side == "behavior" else (e.pi_token, e.mu_token)
        )
        inside = e.listed & np.isfinite(ours)
        alone = ~e.is_listed & np.isfinite(ours_token) & e.usable_token
        mine = np.exp(np.where(inside, np.minimum(ours, 0), -np.inf)).sum(axis=1)
        mine = mine + np.where(alone, np.exp(np.minimum(ours_token, 0)), 0)
        other = np.exp(np.where(inside & np.isfinite(theirs), np.minimum(theirs, 0), -np.inf)).sum(
            axis=1
        )
        other = other + np.where(alone, np.exp(np.minimum(theirs_token, 0)), 0)
        # A sure row has mass 1 too, but goes on with ids as unlikely as the rest of its mass.
        last = np.where(inside, ours, np.inf).min(axis=1, initial=np.inf)
        last = np.exp(np.minimum(np.where(alone, np.minimum(last, ours_token), last), 0))
        whole = np.abs(mine - 1) < np.minimum(EXACT, last / 20)
        rows = self.judged & whole & (other < 1 - LOST) & (other > 1e-4)
        return rows, np.maximum(other, 1e-12)


def _spread(offset: Floats) -> float:
    """Median over rows of the spread of log π − log μ within a row, nats."""
    several = np.isfinite(offset).sum(axis=1) > 1
    return float(np.median(np.nanstd(offset[several], axis=1))) if several.any() else 0.0


def _unused_tail(evidence: Evidence) -> Finding | None:
    """Tokens were never sampled from a part of μ that should have given some.

    With c the mass of the ids likelier than the sampled one, P(c > q) under μ follows from
    the lists; truncated sampling never exceeds its p. The same with the rank for top-k, and
    with the ratio to the likeliest id for min-p.
    """
    if temperature(evidence) is not None:  # it moves samples out of μ's tail, or into it
        return None
    rows = np.flatnonzero(
        evidence.usable_token
        & (evidence.listed & np.isfinite(evidence.mu)).any(axis=1)
        & ~evidence.filled("topk_behavior_logprobs").any(axis=1)
    )
    if len(rows) < FEWEST:
        return None
    used = evidence.listed[rows] & np.isfinite(evidence.mu[rows])
    p = np.exp(np.where(used, np.minimum(evidence.mu[rows], 0), -np.inf))
    tail = np.maximum(1 - p.sum(axis=1), 0)
    mine = np.exp(np.minimum(evidence.mu_token[rows], 0))[:, None]
    before = np.where(p > mine * (1 + 1e-6), p, 0).sum(axis=1)
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    above = np.cumsum(ranked, axis=1) - ranked
    top = ranked[:, :1]
    best: tuple[float, str, float] | None = None
    for kind, seen, each, rest in (
        ("top-p", before, above, ranked.sum(axis=1)),
        ("min-p", np.log(top[:, 0] / mine[:, 0]), np.log(top / np.maximum(ranked, 1e-300)), None),
    ):
        limit = float(seen.max())
        beyond = np.where((each > limit + 1e-6) & (ranked > 0), ranked, 0).sum(axis=1)
        if rest is None:
            least = np.where(used, p, np.inf).min(axis=1)
            outside = np.where(np.log(top[:, 0] / least) >= limit, tail, 0.0)
        else:
            outside = np.where(rest > limit, tail, 0.0)
        expected = float((beyond + outside).sum())
        if best is None or expected > best[0]:
            best = (expected, kind, limit)
    if best is None or best[0] < 14:
        return None
    expected, kind, limit = best
    kept = limit if kind == "top-p" else float(np.exp(-limit))
    surviving = 1 - expected / len(rows)
    return Finding(
        "truncation", 0.85, len(rows), surviving,
        {"side": "sampling", "kind": kind, "limit": kept, "tokens_expected_beyond": expected,
         "tokens_beyond": 0, "surviving_mass": surviving},
    )  # fmt: skip


def _renormalised(evidence: Evidence) -> Finding | None:
    """One side's log-probs stand higher by the same everywhere: normalised over fewer ids.

    The cut lies beyond the lists, so that no mass is 1. Rows that a padded vocabulary adds on
    the other side look the same.
    """
    if len(evidence.rows) < FEWEST:
        return None
    rows = evidence.rows
    found = evidence.at_vanishing_drift(evidence.offset)
    if not np.isfinite(found.value) or not np.isfinite(found.error):
        return None
    slope = evidence.at_vanishing_drift(np.log(np.maximum(evidence.slope, 1e-3)))
    room = 0.03 + 0.8 * found.drift
    if abs(found.value) < room + 3 * found.error or abs(slope.value) > MARGIN:
        return None
    cut = Truncation(evidence)
    if any(cut.of(side)[0].sum() >= 5 for side in ("behavior", "policy")):
        return None
    if np.median(evidence.drift) > 0.25:
        return None
    # Rows agree on the offset; or, where the cut takes more from one than from another, each
    # row's ids do.
    low = evidence.drift <= np.quantile(evidence.drift, 0.5)
    spread, _ = residuals(evidence)
    near = np.abs(evidence.offset - found.value) < np.maximum(0.35 * abs(found.value), 0.05)
    constant = np.sign(found.value) * evidence.offset > 2 * spread
    even = max(float(near[low].mean()), float(constant[low].mean()))
    if even < 0.75:
        return None
    return Finding(
        "truncation", 0.75, len(rows), float(np.exp(-abs(found.value))),
        {"side": "behavior" if found.value < 0 else "policy",
         "pattern": "one offset in all rows: the cut lies beyond the lists",
         "mean_offset_nats": found.value, "offset_error": found.error, "rows_that_agree": even,
         "or": "the other side's softmax runs over a padded vocabulary"},
    )  # fmt: skip
