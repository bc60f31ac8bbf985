"""What is sampled from and how it is reported: temperature, truncation."""

from __future__ import annotations

from typing import Final

import numpy as np

from .evidence import FEWEST, Bools, Evidence, Floats, centred, said
from .findings import DISTANCE, Finding, cause
from .precision import residuals

MARGIN: Final = 0.05
"""|log τ| that is no finding; at vanishing drift real updates left up to 0.06, with its error."""

DRIFT_BIAS: Final = 0.2
"""What drift may leave in a log slope, as a share of ρ; healthy dumps showed up to 0.15."""

EVEN: Final = 0.7
"""Share of the rows of little drift that must agree on a temperature."""

EXACT: Final = 2e-5
"""Distance of a mass from 1 that float32 rounding of 20 log-probs explains."""

LOST: Final = 3e-3
"""Mass that one policy has outside what is all of the other: far above `EXACT`."""


@cause(
    "temperature", 9, size="τ", needs="lists",
    advice="Divide the logits by the sampling temperature once on both sides, before the "
    "log-softmax (vLLM: logprobs_mode = processed_logprobs).",
    explains=(DISTANCE - {"other-model"}) | {"vocabulary", "concentration", "truncation"},
)  # fmt: skip
def temperature(evidence: Evidence) -> Finding | None:
    """One side applies a temperature that the other does not."""
    found = evidence.at_vanishing_drift(evidence.log_slope)
    if not np.isfinite(found.value) or not np.isfinite(found.error):
        return None
    tau = float(np.exp(-found.value))
    # Drift leaves a bias of the order of ρ² in a slope; 0.15 of it was never exceeded.
    room = MARGIN + 0.1 * min(found.drift, 1.0) ** 2
    if abs(found.value) < room + 2.5 * found.error:
        return None
    even = _even(evidence, found.value)
    if even < EVEN:
        return None
    # The error over prompts, and what drift may have left in the slope.
    half = 1.96 * found.error + DRIFT_BIAS * found.drift
    low, high = found.value - half, found.value + half
    sampled, error = tilt(evidence)
    score = abs(found.value) / np.hypot(found.error, room / 2)
    return Finding(
        "temperature", float(min(0.97, 0.5 + 0.1 * score)), found.rows, tau,
        {"tau": tau, "tau_ci95": [float(np.exp(-high)), float(np.exp(-low))], "rows": found.rows,
         "prompts": found.clusters, "drift_of_these": found.drift, "rows_that_agree": even,
         "declared_temperature": evidence.metadata.temperature,
         "samples_side_with_policy": sampled, "samples_side_error": error},
    )  # fmt: skip


def _even(evidence: Evidence, value: float) -> float:
    """Share of the rows of little drift whose log slope is nearer to `value` than to 0."""
    low = evidence.drift <= np.quantile(evidence.drift, 0.5)
    logs, drift = evidence.log_slope[low], evidence.drift[low]
    # What drift alone does to a row's slope: its share of ρ along x, one in √K.
    near = np.abs(logs - value) < np.maximum(0.35 * abs(value), 0.5 * drift + 0.02)
    right = np.sign(logs) == np.sign(value)
    return float((near & right).mean()) if low.any() else 0.0


def tilt(evidence: Evidence) -> tuple[float, float]:
    """Where between μ and π the policy lies that the tokens were sampled from.

    The maximum-likelihood λ and its standard error, NaN where the rows cannot tell, of

        p ∝ exp((1 + α) x + λ g),    g = y − (a + b x),

    over the usable slots, with x = log μ, y = log π and g what is left of y after a row's own
    line: 0 where the recorded μ is the sampler, 1 where π is. α takes up a temperature.
    """
    place = np.full(len(evidence), -1)
    place[evidence.rows] = np.arange(len(evidence.rows))
    rows = np.flatnonzero((evidence.usable & evidence.sampled_slot).any(axis=1) & (place >= 0))
    if len(rows) < FEWEST:
        return np.nan, np.nan
    used = evidence.usable[rows]
    x, y = centred(evidence.mu[rows], used), centred(evidence.pi[rows], used)
    rest = y - evidence.slope[place[rows]][:, None] * x
    both = np.stack([x, np.clip(rest, -6, 6)])
    hit = np.where(evidence.sampled_slot[rows] & used, both, 0.0).sum(axis=2)
    value = np.zeros(2)
    for _ in range(15):
        logits = np.where(used, (1 + value[0]) * both[0] + value[1] * both[1], -np.inf)
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        mean = (weight * both).sum(axis=2)
        second = np.einsum("ts,its,jts->ij", weight, both, both) - mean @ mean.T
        if not np.isfinite(second).all() or np.linalg.det(second) < 1e-9:
            return np.nan, np.nan
        step = np.linalg.solve(second, (hit - mean).sum(axis=1))
        value = np.clip(value + np.clip(step, -0.5, 0.5), -2, 3)
        if np.abs(step).max() < 1e-6:
            break
    return float(value[1]), float(np.sqrt(np.linalg.inv(second)[1, 1]))


@cause(
    "truncation", 7, size="surviving mass", needs="lists",
    advice="Use the same support on both sides: record log-probs before top-p, top-k and min-p "
    "(vLLM: logprobs_mode), or sample without truncation (top_p = 1, top_k = −1, min_p = 0).",
    explains=DISTANCE | {"vocabulary", "concentration"},
)  # fmt: skip
def truncation(evidence: Evidence) -> Finding | None:
    """One side renormalised over the ids that truncated sampling left."""
    for side in ("behavior", "policy"):
        rows, kept = renormalised(evidence, side)
        judged = int(_judged(evidence).sum())
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
                 "declared_top_p": said(evidence.metadata.behavior, "top_p"),
                 "declared_top_k": said(evidence.metadata.behavior, "top_k")},
            )  # fmt: skip
    return _one_offset(evidence) or _unused_tail(evidence)


def renormalised(evidence: Evidence, side: str) -> tuple[Bools, Floats]:
    """Rows in which `side` has mass 1 on its support, and the other's mass there, visibly less."""
    e = evidence
    sides = (e.mu, e.mu_token), (e.pi, e.pi_token)
    (ours, ours_token), (theirs, theirs_token) = sides if side == "behavior" else sides[::-1]
    inside = e.listed & np.isfinite(ours)
    alone = ~e.is_listed & np.isfinite(ours_token) & e.usable_token
    mine = np.exp(np.where(inside, np.minimum(ours, 0), -np.inf)).sum(axis=1)
    mine = mine + np.where(alone, np.exp(np.minimum(ours_token, 0)), 0)
    shared = inside & np.isfinite(theirs)
    other = np.exp(np.where(shared, np.minimum(theirs, 0), -np.inf)).sum(axis=1)
    other = other + np.where(alone, np.exp(np.minimum(theirs_token, 0)), 0)
    # A sure row has mass 1 too, but goes on with ids as unlikely as the rest of its mass.
    last = np.where(inside, ours, np.inf).min(axis=1, initial=np.inf)
    last = np.exp(np.minimum(np.where(alone, np.minimum(last, ours_token), last), 0))
    whole = np.abs(mine - 1) < np.minimum(EXACT, last / 20)
    rows = _judged(evidence) & whole & (other < 1 - LOST) & (other > 1e-4)
    return rows, np.maximum(other, 1e-12)


def is_cut(evidence: Evidence) -> bool:
    """Whether several rows of one side have mass 1 where the other has less."""
    return any(renormalised(evidence, side)[0].sum() >= 5 for side in ("behavior", "policy"))


def _judged(evidence: Evidence) -> Bools:
    """Rows whose list is whole but for −∞."""
    e = evidence
    fills = e.filled("topk_behavior_logprobs") | e.filled("topk_pre_logprobs")
    nan = (np.isnan(e.mu) | np.isnan(e.pi)) & e.listed
    impossible = e.listed & ((e.ids < 0) | (e.ids >= e.metadata.vocab_size))
    partial = e.listed.sum(axis=1) < e.metadata.vocab_size
    broken = (fills | nan | impossible).any(axis=1) | e.has_duplicates
    return np.asarray(e.has_list & partial & ~broken)


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


def _one_offset(evidence: Evidence) -> Finding | None:
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
    slope = evidence.at_vanishing_drift(evidence.log_slope)
    room = 0.03 + 0.8 * found.drift
    if abs(found.value) < room + 3 * found.error or abs(slope.value) > MARGIN:
        return None
    if is_cut(evidence) or np.median(evidence.drift) > 0.25:
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
