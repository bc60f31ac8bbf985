"""What is sampled from and how it is reported: temperature, truncation."""

from __future__ import annotations

from typing import Final

import numpy as np

from .evidence import FEWEST, Bools, Evidence, Floats, said
from .findings import DISTANCE, Cause, Finding, finding

# |log τ| that is no finding; at vanishing drift real updates left up to 0.06, with its error.
MARGIN: Final = 0.05
# What drift may leave in a log slope, as a share of ρ; healthy dumps showed up to 0.15.
DRIFT_BIAS: Final = 0.2
EVEN: Final = 0.7  # share of the rows of little drift that must agree on a temperature
EXACT: Final = 2e-5  # distance of a mass from 1 that float32 rounding of 20 log-probs explains
LOST: Final = 3e-3  # mass that one policy has outside what is all of the other: far above `EXACT`


@Cause(
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
    # Drift leaves a bias of the order of ρ² in a slope; 0.15 of it was never exceeded.
    room = MARGIN + 0.1 * min(found.drift, 1.0) ** 2
    if abs(found.value) < room + 2.5 * found.error:
        return None
    # Rows of little drift whose log slope is nearer to the found one than to 0. Drift alone moves
    # a row's slope by its share of ρ along x, one in √K.
    low = evidence.drift <= np.quantile(evidence.drift, 0.5)
    logs, drift = evidence.log_slope[low], evidence.drift[low]
    near = np.abs(logs - found.value) < np.maximum(0.35 * abs(found.value), 0.5 * drift + 0.02)
    even = (near & (np.sign(logs) == np.sign(found.value))).mean()
    if even < EVEN:
        return None
    # The error over prompts, and what drift may have left in the slope.
    half = 1.96 * found.error + DRIFT_BIAS * found.drift
    sampled, error = evidence.tilt
    score = abs(found.value) / np.hypot(found.error, room / 2)
    tau, low_tau, high_tau = np.exp([-found.value, -found.value - half, -found.value + half])
    return finding(
        min(0.97, 0.5 + 0.1 * score), found.rows, tau, tau=tau,
        tau_ci95=[float(low_tau), float(high_tau)], rows=found.rows, prompts=found.clusters,
        drift_of_these=found.drift, rows_that_agree=even,
        declared_temperature=evidence.metadata.temperature,
        samples_side_with_policy=sampled, samples_side_error=error,
    )  # fmt: skip


@Cause(
    "truncation", 7, size="surviving mass", needs="lists",
    advice="Use the same support on both sides: record log-probs before top-p, top-k and min-p "
    "(vLLM: logprobs_mode), or sample without truncation (top_p = 1, top_k = −1, min_p = 0).",
    explains=DISTANCE | {"vocabulary", "concentration"},
)  # fmt: skip
def truncation(evidence: Evidence) -> Finding | None:
    """One side renormalised over the ids that truncated sampling left."""
    judged = int(_judged(evidence).sum())
    gap = np.where(evidence.usable, evidence.pi - evidence.mu, np.nan)
    for side in ("behavior", "policy"):
        rows, mass = renormalised(evidence, side)
        if rows.sum() < 5 or rows.sum() < 0.02 * judged:
            continue
        kept, spread = mass[rows], gap[rows]
        spread = spread[np.isfinite(spread).sum(axis=1) > 1]
        behavior = evidence.metadata.behavior
        return finding(
            0.97 if rows.sum() >= 20 else 0.85, rows.sum(), kept.mean(),
            side=side, rows_of_mass_1=rows.sum(), rows_judged=judged, surviving_mass=kept.mean(),
            surviving_mass_quantiles=np.quantile(kept, [0.05, 0.5, 0.95]),
            mean_offset_nats=np.log(kept).mean(),
            offset_spread_in_a_row_nats=
                np.median(np.nanstd(spread, axis=1)) if len(spread) else 0.0,
            entries_of_minus_infinity=np.isneginf(evidence.mu[evidence.listed]).sum(),
            declared_top_p=said(behavior, "top_p"), declared_top_k=said(behavior, "top_k"),
        )  # fmt: skip
    return _one_offset(evidence) or _unused_tail(evidence)


def renormalised(evidence: Evidence, side: str) -> tuple[Bools, Floats]:
    """Rows in which `side` has mass 1 on its support, and the other's mass there, visibly less."""
    e = evidence
    sides = (e.mu, e.mu_token), (e.pi, e.pi_token)
    (ours, ours_token), (theirs, theirs_token) = sides if side == "behavior" else sides[::-1]
    inside = e.listed & np.isfinite(ours)
    alone = ~e.is_listed & np.isfinite(ours_token) & e.usable_token

    def mass(logs: Floats, used: Bools, token: Floats) -> Floats:
        """Of the used slots, and of a sampled token that is not listed."""
        listed = np.exp(np.where(used, np.minimum(logs, 0), -np.inf)).sum(axis=1)
        return np.asarray(listed + np.where(alone, np.exp(np.minimum(token, 0)), 0))

    mine = mass(ours, inside, ours_token)
    other = mass(theirs, inside & np.isfinite(theirs), theirs_token)
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
    fills = e.fills["topk_behavior_logprobs"] | e.fills["topk_pre_logprobs"]
    nan = (np.isnan(e.mu) | np.isnan(e.pi)) & e.listed
    partial = e.listed.sum(axis=1) < e.metadata.vocab_size
    broken = (fills | nan | e.impossible).any(axis=1) | e.has_duplicates
    return np.asarray(e.has_list & partial & ~broken)


def _one_offset(evidence: Evidence) -> Finding | None:
    """One side's log-probs stand higher by the same everywhere: normalised over fewer ids.

    The cut lies beyond the lists, so that no mass is 1. Rows that a padded vocabulary adds on
    the other side look the same.
    """
    rows = evidence.rows
    if len(rows) < FEWEST:
        return None
    weight = np.exp(np.where(evidence.usable, np.minimum(evidence.mu, 0), -np.inf))[rows]
    gap = np.where(evidence.usable, evidence.pi - evidence.mu, 0.0)[rows]
    offset: Floats = (weight * gap).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-300)
    found = evidence.at_vanishing_drift(offset)
    if not np.isfinite(found.value) or not np.isfinite(found.error):
        return None
    room = 0.03 + 0.8 * found.drift + 3 * found.error
    slope = evidence.at_vanishing_drift(evidence.log_slope).value
    if abs(found.value) < room or abs(slope) > MARGIN:
        return None
    if is_cut(evidence) or np.median(evidence.drift) > 0.25:
        return None
    # Rows agree on the offset; or, where the cut takes more from one than from another, each
    # row's ids do.
    low = evidence.drift <= np.quantile(evidence.drift, 0.5)
    near = np.abs(offset - found.value) < np.maximum(0.35 * abs(found.value), 0.05)
    constant = np.sign(found.value) * offset > 2 * evidence.residual
    even = max(near[low].mean(), constant[low].mean())
    if even < 0.75:
        return None
    return finding(
        0.75, len(rows), np.exp(-abs(found.value)),
        side="behavior" if found.value < 0 else "policy",
        pattern="one offset in all rows: the cut lies beyond the lists",
        mean_offset_nats=found.value, offset_error=found.error, rows_that_agree=even,
        **{"or": "the other side's softmax runs over a padded vocabulary"},
    )  # fmt: skip


def _unused_tail(evidence: Evidence) -> Finding | None:
    """Tokens were never sampled from a part of μ that should have given some.

    With c the mass of the ids likelier than the sampled one, P(c > q) under μ follows from
    the lists; truncated sampling never exceeds its p. The same with the rank for top-k, and
    with the ratio to the likeliest id for min-p.
    """
    if temperature(evidence) is not None:  # it moves samples out of μ's tail, or into it
        return None
    used = evidence.listed & np.isfinite(evidence.mu)
    fills = evidence.fills["topk_behavior_logprobs"]
    rows = np.flatnonzero(evidence.usable_token & used.any(axis=1) & ~fills.any(axis=1))
    if len(rows) < FEWEST:
        return None
    p = np.exp(np.where(used, np.minimum(evidence.mu, 0), -np.inf))[rows]
    mine = np.exp(np.minimum(evidence.mu_token[rows], 0))[:, None]
    tail = np.maximum(1 - p.sum(axis=1), 0)
    ranked = -np.sort(-p, axis=1)
    above = np.cumsum(ranked, axis=1) - ranked
    before = np.where(p > mine * (1 + 1e-6), p, 0).sum(axis=1)
    top = ranked[:, :1]
    least = np.where(used[rows], p, np.inf).min(axis=1)
    # How far down: every sampled token, every listed id, and the tail, which begins below the list
    kinds = {
        "top-p": (before, above, ranked.sum(axis=1)),
        "min-p": (
            np.log(top / mine)[:, 0], np.log(top / np.maximum(ranked, 1e-300)),
            np.log(top[:, 0] / least),
        ),
    }  # fmt: skip
    expected, kind, limit = -1.0, "", 0.0
    for each, (sampled, listed, rest) in kinds.items():
        furthest = float(sampled.max())
        beyond = np.where((listed > furthest + 1e-6) & (ranked > 0), ranked, 0).sum()
        outside = tail[rest > furthest if each == "top-p" else rest >= furthest].sum()
        if beyond + outside > expected:
            expected, kind, limit = float(beyond + outside), each, furthest
    if expected < 14:
        return None
    surviving = 1 - expected / len(rows)
    return finding(
        0.85, len(rows), surviving, side="sampling", kind=kind,
        limit=limit if kind == "top-p" else np.exp(-limit),
        tokens_expected_beyond=expected, tokens_beyond=0, surviving_mass=surviving,
    )  # fmt: skip
