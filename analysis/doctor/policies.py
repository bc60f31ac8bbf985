"""Causes that the two distributions give away: who holds which policy, at what temperature."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np

from .evidence import FEWEST, Bools, Evidence, Floats, Ints
from .findings import Finding

EXACT: Final = 2e-5
"""Distance of a mass from 1 that float32 rounding of 20 log-probs explains."""

LOST: Final = 3e-3
"""Mass that one policy has outside what is all of the other: far above `EXACT`."""

EQUAL: Final = 1e-5
"""|log r| below which two float32 log-probs are one number."""

DISTANCES: Final = (1, -1, 2, -2, 3, -3)
"""Shifts that are tried."""

MARGIN: Final = 0.05
"""|log τ| that is no finding: at vanishing drift real updates left up to 0.04."""

PAIRS: Final = 4000


def recomputed(evidence: Evidence) -> Finding | None:
    """μ equals π to the last digit in every row."""
    usable = evidence.usable_token
    if usable.sum() < FEWEST:
        return None
    same = np.abs(evidence.mu_token - evidence.pi_token) <= EQUAL
    share = float(same[usable].mean())
    slots = evidence.usable & evidence.has_list[:, None]
    lists = (
        float((np.abs(evidence.mu - evidence.pi)[slots] <= EQUAL).mean()) if slots.any() else np.nan
    )
    if share < 0.99 and not lists >= 0.99:
        return None
    moved = np.nanmedian(evidence.update) if slots.any() else np.nan
    steps = len(np.unique(evidence.sample["step"]))
    # The first update after a rollout has r = 1 by right; several in a row have not, unless
    # nothing moves.
    sure = 0.98 if steps > 1 and (share >= 0.99) else 0.75
    return Finding(
        "recomputed",
        sure,
        int((same & usable).sum()),
        share,
        {
            "equal_scalars": share,
            "equal_list_entries": lists,
            "steps": steps,
            "median_update_nats": float(moved),
        },
    )


def shift(evidence: Evidence) -> Finding | None:
    """The policy's row at t matches μ's row at t − d better than μ's row at t."""
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
    return _misaligned_start(evidence, tried)


def _votes(evidence: Evidence, d: int) -> tuple[Bools, Ints]:
    """For pairs of rows d apart that can tell: is π at t nearer to μ at t − d; position of t."""
    rows, others = evidence.neighbours(d)
    if len(rows) > PAIRS:
        pick = np.linspace(0, len(rows) - 1, PAIRS).astype(np.int64)
        rows, others = rows[pick], others[pick]
    if not len(rows):
        return np.zeros(0, np.bool_), np.zeros(0, np.int64)
    theirs = np.full(evidence.ids[rows].shape, np.nan)
    for slot in range(evidence.ids.shape[1]):
        ids = np.where(evidence.usable[others, slot], evidence.ids[others, slot], -2)
        match = evidence.ids[rows] == ids[:, None]
        theirs = np.where(match, evidence.mu[others, slot][:, None], theirs)
    own, policy = evidence.mu[rows], evidence.pi[rows]
    # Only where the two rows of μ differ can π take sides.
    tells = evidence.usable[rows] & np.isfinite(theirs) & (np.abs(theirs - own) > 1.0)
    gain = np.where(tells, np.abs(policy - own) - np.abs(policy - theirs), 0.0).sum(axis=1)
    some = tells.any(axis=1)
    return gain[some] > 0, evidence.sample["position"][rows][some].astype(np.int64)


def _misaligned_start(evidence: Evidence, tried: dict[str, float]) -> Finding | None:
    """Rows at the beginning of responses hold unrelated distributions, later ones do not."""
    position = np.asarray(evidence.sample["position"])[evidence.rows]
    broken = evidence.correlation < 0.3
    # What is broken by a wide margin: π gives the list far less than μ does, or reorders it.
    for length in (3, 2, 1):
        first, later = position < length, position >= length
        if first.sum() < 10 or later.sum() < 10:
            continue
        edge = broken[position == length - 1]
        here, there = float(broken[first].mean()), float(broken[later].mean())
        if len(edge) and edge.mean() > 0.5 and here > 0.5 and there < 0.15:
            return Finding(
                "shift", 0.8, int(first.sum()), float(length),
                {"pattern": "the first rows of responses hold other distributions",
                 "unrelated_at_start": here, "unrelated_later": there, "tried": tried},
            )  # fmt: skip
    return None


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
    return _unused_tail(evidence)


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
        return (
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
        rows = self.judged & (np.abs(mine - 1) < EXACT) & (other < 1 - LOST) & (other > 1e-4)
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


def temperature(evidence: Evidence) -> Finding | None:
    """The slope of log π against log μ at vanishing drift is not 1."""
    slope = np.maximum(evidence.slope, 1e-3)
    found = evidence.at_vanishing_drift(np.log(slope))
    if not np.isfinite(found.value) or not np.isfinite(found.error):
        return None
    tau = float(np.exp(-found.value))
    # Drift leaves a bias of the order of ρ² in a slope; 0.15 of it was never exceeded.
    room = MARGIN + 0.1 * min(found.drift, 1.0) ** 2
    if abs(found.value) < room + 2.5 * found.error:
        return None
    even = _even(evidence, found.value)
    if even < 0.6:
        return None
    low, high = found.interval
    sampled, error = tilt(evidence)
    score = abs(found.value) / np.hypot(found.error, room / 2)
    declared = evidence.metadata.temperature
    evidence_: dict[str, Any] = {
        "tau": tau,
        "tau_ci95": [float(np.exp(-high)), float(np.exp(-low))],
        "rows": found.rows,
        "prompts": found.clusters,
        "drift_of_these": found.drift,
        "rows_that_agree": even,
        "declared_temperature": declared,
        "samples_side_with_policy": sampled,
        "samples_side_error": error,
    }
    return Finding("temperature", float(min(0.97, 0.5 + 0.1 * score)), found.rows, tau, evidence_)


def _even(evidence: Evidence, value: float) -> float:
    """Share of the rows of little drift whose log slope is nearer to `value` than to 0."""
    low = evidence.drift <= np.quantile(evidence.drift, 0.5)
    logs = np.log(np.maximum(evidence.slope[low], 1e-3))
    drift = evidence.drift[low]
    # What drift alone does to a row's slope: its share of ρ along x, one in √K.
    near = np.abs(logs - value) < np.maximum(0.35 * abs(value), 0.5 * drift + 0.02)
    right = np.sign(logs) == np.sign(value)
    return float((near & right).mean()) if low.any() else 0.0


def tilt(evidence: Evidence) -> tuple[float, float]:
    """Where between μ and π the policy lies that the tokens were sampled from.

    The maximum-likelihood λ of p ∝ μ (π/μ)^λ over the usable slots: 0 where the recorded μ
    is the sampler, 1 where π is. With its standard error.
    """
    rows = np.flatnonzero((evidence.usable & evidence.sampled_slot).any(axis=1))
    if len(rows) < FEWEST:
        return np.nan, np.nan
    used = evidence.usable[rows]
    base = np.where(used, evidence.mu[rows], -np.inf)
    gap = np.where(used, np.clip(evidence.pi[rows] - evidence.mu[rows], -8, 8), 0.0)
    hit = np.where(evidence.sampled_slot[rows] & used, gap, 0.0).sum(axis=1)
    value, information = 0.0, 0.0
    for _ in range(12):
        logits = base + value * gap
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        mean = (weight * gap).sum(axis=1)
        information = float(((weight * gap**2).sum(axis=1) - mean**2).sum())
        if information < 1e-6:
            return np.nan, np.nan
        value += float(np.clip((hit - mean).sum() / information, -0.5, 0.5))
        value = float(np.clip(value, -2, 3))
    return value, float(1 / np.sqrt(information))


def stale(evidence: Evidence) -> Finding | None:
    """μ is older than the sampler, or further back than the recorded updates can have gone."""
    value, error = tilt(evidence)
    lag = Lag(evidence)
    common = {"samples_side_with_policy": value, "samples_side_error": error, **lag.evidence}
    if np.isfinite(value) and value > 0.25 and value > 5 * error and value < 0.97:
        return Finding(
            "stale", float(min(0.95, 0.6 + 0.05 * value / error)), len(evidence),
            float(value / max(1 - value, 0.03)),
            {"pattern": "tokens were sampled from a policy between μ and π", **common},
        )  # fmt: skip
    if lag.far and lag.ratio > 4:
        return Finding(
            "stale", 0.75, len(evidence), lag.ratio,
            {"pattern": "μ is further from π than the updates since the rollout can have gone",
             **common},
        )  # fmt: skip
    return None


class Lag:
    """How many updates of the recorded size lie between μ and π.

    Updates of one size u (KL) that all go one way carry the policy s² u away in s steps; those
    that do not, less. √(D / u) / s is therefore about 1 or below for tokens s updates after
    their rollout.
    """

    def __init__(self, evidence: Evidence) -> None:
        step = np.asarray(evidence.sample["step"], dtype=np.float64)
        d, u = evidence.divergence, evidence.update
        usable = np.isfinite(d) & np.isfinite(u) & (u > 1e-9)
        self.ratio, self.drift = float("nan"), float("nan")
        self.far = False
        self.early_share = float("nan")
        if usable.sum() < FEWEST:
            return
        early = usable & (step <= np.quantile(step[usable], 0.5))
        since = np.maximum(step[early], 1.0)
        lags = np.sqrt(d[early] / u[early]) / since
        self.ratio = float(np.median(lags))
        self.drift = float(np.quantile(evidence.drift, 0.1)) if len(evidence.drift) else np.nan
        first = usable & (step == step[usable].min())
        late = usable & (step >= np.quantile(step[usable], 0.75))
        self.early_share = float(d[first].mean() / max(d[late].mean(), 1e-12))
        self.far = bool(d[usable].mean() > 0.1)

    @property
    def evidence(self) -> dict[str, Any]:
        """As evidence."""
        return {"lag_over_steps": self.ratio, "first_step_over_last": self.early_share}


def other_model(evidence: Evidence) -> Finding | None:
    """The policies have less in common than any update leaves them."""
    if len(evidence.rows) < FEWEST:
        return None
    drift = evidence.drift
    low, middle = np.quantile(drift, [0.1, 0.5])
    correlation = float(np.median(evidence.correlation))
    lag = Lag(evidence)
    mean = float(np.nanmean(evidence.divergence))
    value, error = tilt(evidence)
    unrelated = low > 0.62 and mean > 0.3
    remote = lag.ratio > 3.5 and middle > 0.25 and mean > 0.15
    if not (unrelated or remote):
        return None
    return Finding(
        "other-model",
        float(np.clip(0.6 + 0.2 * (low > 0.62) + 0.05 * min(lag.ratio, 6), 0, 0.95)),
        len(evidence.rows),
        correlation,
        {
            "median_correlation": correlation,
            "mean_divergence_nats": mean,
            "drift_of_best_tenth": float(low),
            "median_drift": float(middle),
            "mean_log_mu_of_sampled": float(np.mean(evidence.mu_token[evidence.usable_token])),
            "mean_log_pi_of_sampled": float(np.mean(evidence.pi_token[evidence.usable_token])),
            "samples_side_with_policy": value,
            "samples_side_error": error,
            **lag.evidence,
        },
    )


def wrong_ids(evidence: Evidence) -> Finding | None:
    """Some ids are always wrong, the others never: ids mean other tokens on one side."""
    usable = evidence.usable & (evidence.mu > np.log(0.02))
    if usable.sum() < FEWEST:
        return None
    rows, slots = np.nonzero(usable)
    ids = evidence.ids[rows, slots]
    gap = evidence.pi[rows, slots] - evidence.mu[rows, slots]
    broken = np.abs(gap) > 2.5
    # Once a prompt and id, so that siblings do not vote together.
    votes = np.unique(np.stack([ids, evidence.cluster[rows], broken], axis=1), axis=0)
    distinct, place = np.unique(votes[:, 0], return_inverse=True)
    count = np.bincount(place.reshape(-1))
    bad = np.bincount(place.reshape(-1), weights=votes[:, 2])
    several = count >= 3
    if several.sum() < 4:
        return None
    share = bad[several] / count[several]
    always, never = share > 0.8, share < 0.2
    overall = float(votes[:, 2].mean())
    split = float((always | never).mean())
    correlation = float(np.median(evidence.correlation)) if len(evidence.rows) else 1.0
    lost = float(np.median(evidence.mass_mu - evidence.mass_pi))
    if always.sum() < 2 or overall < 0.03:
        return None
    everything = always.mean() > 0.9 and lost > 0.5
    if not everything and (split < 0.75 or never.sum() < 1):
        return None
    return Finding(
        "vocabulary",
        0.9 if everything or split > 0.85 else 0.75,
        int(np.isin(evidence.ids, distinct[several][always]).any(axis=1).sum()),
        float(always.mean()),
        {
            "pattern": "ids mean other tokens on one side",
            "ids_judged": int(several.sum()),
            "ids_always_wrong": int(always.sum()),
            "ids_never_wrong": int(never.sum()),
            "examples": [int(each) for each in distinct[several][always][:5]],
            "median_correlation": correlation,
        },
    )


def missing_mass(evidence: Evidence) -> Finding | None:
    """π lacks the same share of its mass wherever μ is sure: it is normalised over more ids."""
    if len(evidence.rows) < FEWEST:
        return None
    rows = evidence.rows
    found = evidence.at_vanishing_drift(evidence.offset)
    if not np.isfinite(found.value) or not np.isfinite(found.error):
        return None
    room = 0.03 + 0.8 * found.drift
    if abs(found.value) < room + 3 * found.error:
        return None
    offsets = evidence.offset[evidence.drift <= np.quantile(evidence.drift, 0.5)]
    even = float((np.abs(offsets - found.value) < np.maximum(0.35 * abs(found.value), 0.05)).mean())
    if even < 0.7:
        return None
    return Finding(
        "vocabulary", 0.7, len(rows), float(1 - np.exp(found.value)),
        {"pattern": "one side is normalised over other ids", "offset_nats": found.value,
         "offset_error": found.error, "rows_that_agree": even},
    )  # fmt: skip


def vocabulary(evidence: Evidence) -> Finding | None:
    """Ids out of range, ids that mean other tokens, or mass beyond the vocabulary."""
    from .values import ids_out_of_range

    return ids_out_of_range(evidence) or wrong_ids(evidence) or missing_mass(evidence)
