"""Causes that the two distributions give away: who holds which policy, at what temperature."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .evidence import FEWEST, Bools, Evidence, Floats, Ints
from .findings import Finding
from .noise import declared, precision, twin_noise

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

DRIFT_BIAS: Final = 0.2
"""What drift may leave in a log slope, as a share of ρ; healthy dumps showed up to 0.15."""

PAIRS: Final = 4000
"""Pairs of rows looked at for one shift."""

EVEN: Final = 0.7
"""Share of the rows of little drift that must agree on a temperature."""

UNRELATED: Final = 0.62
"""ρ (r = 0.85) that a tenth of all rows of related policies stay below."""


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
    return _misaligned_start(evidence, tried)


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
    theirs = _looked_up(evidence, others, evidence.ids[rows])
    sides, some = _sides(evidence, rows, theirs)
    return sides, np.asarray(evidence.sample["position"], dtype=np.int64)[rows][some]


def _looked_up(evidence: Evidence, rows: Ints, ids: NDArray[np.integer]) -> Floats:
    """Values of log μ that some rows give to ids, NaN where they do not list them."""
    found = np.full(ids.shape, np.nan)
    for slot in range(evidence.ids.shape[1]):
        listed = np.where(evidence.usable[rows, slot], evidence.ids[rows, slot], -2)
        found = np.where(ids == listed[:, None], evidence.mu[rows, slot][:, None], found)
    return found


def _sides(evidence: Evidence, rows: Ints, theirs: Floats) -> tuple[Ints, Bools]:
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
    with_own, with_theirs = (_correlation(policy, each, shared) for each in (own, theirs))
    to_own, to_theirs = (
        np.where(shared, np.abs(policy - each), 0.0).sum(axis=1) for each in (own, theirs)
    )
    others = (with_theirs > np.maximum(with_own + 0.25, 0.6)) & (to_theirs < 0.7 * to_own)
    mine = (with_own > with_theirs) | (to_own < to_theirs)
    some = tells & (others | mine)
    return others[some].astype(np.int64), some


def _correlation(log_p: Floats, log_q: Floats, used: Bools) -> Floats:
    """Pearson's r over the used slots of each row; 0 where one of them is constant."""
    n = np.maximum(used.sum(axis=1, keepdims=True), 1)
    p, q = (np.where(used, each, 0.0) for each in (log_p, log_q))
    p, q = (np.where(used, each - each.sum(axis=1, keepdims=True) / n, 0.0) for each in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (p * q).sum(axis=1) / np.sqrt((p * p).sum(axis=1) * (q * q).sum(axis=1))
    return np.asarray(np.where(np.isfinite(r), r, 0.0))


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
        if share > 0.5 and score > 4:
            return Finding(
                "shift", 0.8, int(first.sum()), float(length),
                {"pattern": "the first rows of responses hold other distributions",
                 "unrelated_at_start": share, "unrelated_later": 0.05, "tried": tried},
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
    if even < EVEN:
        return None
    # Beside the error over prompts, what drift may have left in the slope.
    half = 1.96 * found.error + DRIFT_BIAS * found.drift
    low, high = found.value - half, found.value + half
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

    The maximum-likelihood λ of

        p ∝ exp((1 + α) x + λ g),    g = y − (a + b x),

    over the usable slots, with x = log μ, y = log π and g what is left of y after a row's own
    line: 0 where the recorded μ is the sampler, 1 where π is. α takes up a temperature.

    Returns
    -------
    value, error : float
        λ and its standard error; NaN where the rows cannot tell.
    """
    place = np.full(len(evidence), -1)
    place[evidence.rows] = np.arange(len(evidence.rows))
    rows = np.flatnonzero((evidence.usable & evidence.sampled_slot).any(axis=1) & (place >= 0))
    if len(rows) < FEWEST:
        return np.nan, np.nan
    used = evidence.usable[rows]
    n = used.sum(axis=1, keepdims=True)
    x = np.where(used, evidence.mu[rows], 0.0)
    y = np.where(used, evidence.pi[rows], 0.0)
    x = np.where(used, x - x.sum(axis=1, keepdims=True) / n, 0.0)
    y = np.where(used, y - y.sum(axis=1, keepdims=True) / n, 0.0)
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


def stale(evidence: Evidence) -> Finding | None:
    """μ is older than the sampler, or further back than the recorded updates can have gone."""
    value, error = tilt(evidence)
    common: dict[str, Any] = {
        "samples_side_with_policy": value,
        "samples_side_error": error,
    }
    if 0.25 < value < 0.95 and value > 5 * error and not _noisy_behavior(evidence):
        return Finding(
            "stale", float(min(0.95, 0.6 + 0.05 * value / error)), len(evidence),
            float(value / (1 - value)),
            {"pattern": "tokens were sampled from a policy between μ and π", **common},
        )  # fmt: skip
    if len(evidence.rows) < FEWEST:
        return None
    ahead = same_way(evidence)
    if np.median(evidence.drift) > 0.3 and not ahead > 0.4:
        return None  # so far, and not the way the updates go: another model
    lag = Lag(evidence)
    common["along_the_update"] = ahead
    middle = float(np.nanmedian(evidence.divergence))
    # Noise is far from μ too, and not because of any update.
    if lag.lowest > 3 and middle > 0.02 and precision(evidence) is None:
        return Finding(
            "stale", 0.75, len(evidence), lag.value,
            {"pattern": "μ is further from π than the updates since the rollout can have gone",
             **common, **lag.evidence},
        )  # fmt: skip
    return None


def _noisy_behavior(evidence: Evidence) -> bool:
    """Whether μ differs between rows of the same prefix: the sampler is then not what it says."""
    noise, pairs, side = twin_noise(evidence)
    return pairs >= 5 and side == "behavior" and noise > declared(evidence)[1]


def same_way(evidence: Evidence) -> float:
    """Median correlation of the way from μ to π with the way of the recorded update.

    Updates of one chain go partly the same way; what another model differs by does not.
    """
    rows = evidence.rows
    used = evidence.usable[rows] & np.isfinite(evidence.post[rows])
    far = evidence.pi[rows] - evidence.mu[rows] * evidence.slope[:, None]
    return float(np.median(_correlation(far, evidence.post[rows] - evidence.pi[rows], used)))


class Lag:
    """How many updates of the recorded size lie between μ and π, over those since the rollout.

    Updates of one size that all go one way carry the policy s sizes away in s steps; those that
    do not, less. For each seed and step the median over rows of

        log √(D(μ^b, π) / D(π, π')) / 2 + log (ρ(μ, π) / ρ(π, π')) / 2 − log s

    with π' the policy after the step, s the step's number and b the slope at vanishing drift,
    which takes out a temperature. It is about 0 or below for a chain that begins at its rollout.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.value = self.lowest = self.flat = float("nan")
        self.blocks = 0
        rows = evidence.rows
        if len(rows) < FEWEST:
            return
        step = np.asarray(evidence.sample["step"], dtype=np.float64)[rows]
        slope = evidence.at_vanishing_drift(np.log(np.maximum(evidence.slope, 1e-3))).value
        used = evidence.usable[rows] & np.isfinite(evidence.post[rows])
        used &= ~evidence.filled("topk_post_logprobs")[rows]
        scaled = evidence.mu[rows] * (float(np.exp(slope)) if np.isfinite(slope) else 1.0)
        far = _conditional(scaled, evidence.pi[rows], used)
        near = _conditional(evidence.pi[rows], evidence.post[rows], used)
        usable = (far > 0) & (near > 1e-9) & (evidence.update_drift > 1e-6) & (evidence.drift > 0)
        if usable.sum() < FEWEST:
            return
        value = np.full(len(rows), np.nan)
        value[usable] = (
            0.25 * np.log(far[usable] / near[usable])
            + 0.5 * np.log(evidence.drift[usable] / evidence.update_drift[usable])
            - np.log(np.maximum(step[usable], 1.0))
        )
        seed = np.asarray(evidence.sample["seed"])[rows]
        block = (seed.astype(np.int64) << 32) + step.astype(np.int64)
        medians = [
            float(np.median(value[usable & (block == each)]))
            for each in np.unique(block[usable])
            if (usable & (block == each)).sum() >= 6
        ]
        self.blocks = len(medians)
        if self.blocks >= 2:
            self.value = float(np.exp(np.mean(medians)))
            error = float(np.std(medians, ddof=1)) / np.sqrt(self.blocks)
            self.lowest = self.value * float(np.exp(-2 * error))
        low, high = np.quantile(step, [1 / 3, 2 / 3])
        if low < high:
            first, last = evidence.drift[step <= low], evidence.drift[step >= high]
            self.flat = float(np.median(first) / max(np.median(last), 1e-9))

    @property
    def evidence(self) -> dict[str, Any]:
        """As evidence."""
        return {
            "updates_away_over_steps": self.value,
            "at_least": self.lowest,
            "first_drift_over_last": self.flat,
        }


def _conditional(log_p: Floats, log_q: Floats, used: Bools) -> Floats:
    """KL of two unnormalised rows over the used slots alone, nats."""
    p, q = (_normalised(each, used) for each in (log_p, log_q))
    gap = np.where(used, p - q, 0.0)
    return np.asarray((np.where(used, np.exp(p), 0.0) * gap).sum(axis=1))


def _normalised(logs: Floats, used: Bools) -> Floats:
    """log-softmax over the used slots."""
    masked = np.where(used, logs, -np.inf)
    top = masked.max(axis=1, keepdims=True, initial=-1e30)
    total = np.log(np.maximum(np.exp(masked - top).sum(axis=1, keepdims=True), 1e-300))
    return np.asarray(masked - top - total)


def other_model(evidence: Evidence) -> Finding | None:
    """The policies have less in common than any update leaves them."""
    if len(evidence.rows) < FEWEST:
        return None
    if evidence.misplaced > 0.2:
        return Finding(
            "other-model", 0.9, len(evidence), evidence.misplaced,
            {"pattern": "the policy's rows belong to other tokens",
             "scalars_that_are_another_entry": evidence.misplaced},
        )  # fmt: skip
    low, middle = np.quantile(evidence.drift, [0.1, 0.5])
    correlation = float(np.median(evidence.correlation))
    lag = Lag(evidence)
    mean = float(np.nanmean(evidence.divergence))
    value, error = tilt(evidence)
    # Unrelated even where they agree best; or further than updates go, or as far at the first
    # step as at the last.
    unrelated = low > UNRELATED and not lag.lowest < 1.4
    flat = 0.65 < lag.flat < 1.5
    # One seed is one chain, which may go further than most; several tell how far chains go.
    several = len(np.unique(evidence.sample["seed"])) > 1
    remote = lag.lowest > 2.8 or (several and lag.lowest > 1.45 and flat and low > 0.2)
    if mean < 0.12 or middle < 0.3 or not (unrelated or remote) or same_way(evidence) > 0.4:
        return None
    return Finding(
        "other-model",
        0.95 if (low > UNRELATED and remote) or lag.lowest > 4 else 0.75,
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
    moved = _moved_ids(evidence)
    if moved is not None:
        return moved
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
    everything = always.mean() > 0.9 and lost > 0.4
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


def _moved_ids(evidence: Evidence) -> Finding | None:
    """π at id j is μ at id j − o: one side's ids are o further."""
    rows = evidence.rows
    if len(rows) > PAIRS:
        rows = rows[np.linspace(0, len(rows) - 1, PAIRS).astype(np.int64)]
    best: tuple[float, int, int] | None = None
    for offset in (1, -1, 2, -2):
        theirs = _looked_up(evidence, rows, evidence.ids[rows] - offset)
        sides, _ = _sides(evidence, rows, theirs)
        if len(sides) >= 10 and (best is None or sides.mean() > best[0]):
            best = (float(sides.mean()), offset, len(sides))
    # On ids that are numbers, drift itself goes by an id or two.
    if best is None or best[0] < (0.8 if abs(best[1]) == 1 else 0.92):
        return None
    share, offset, judged = best
    return Finding(
        "vocabulary", 0.9, judged, float(offset),
        {"pattern": "ids are moved by a constant on one side", "offset": offset,
         "rows_nearer_to_moved_ids": share, "rows_judged": judged},
    )  # fmt: skip


def missing_mass(evidence: Evidence) -> Finding | None:
    """π lacks the same share of its mass wherever μ is sure: it is normalised over more ids."""
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
