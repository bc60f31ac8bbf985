"""How far the policies are apart: recomputed log-probs, old weights, another model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .evidence import FEWEST, Bools, Evidence, Floats, correlation
from .findings import DISTANCE, Finding, cause
from .precision import EVEN, declared, precision, spread_of_rows, twin_noise
from .sampling import tilt

EQUAL: Final = 1e-5
"""|log r| below which two float32 log-probs are one number."""

UNRELATED: Final = 0.62
"""ρ (r = 0.85) that a tenth of all rows of related policies stay below."""

REMOTE: Final = 0.25
"""Mean D of all tokens, nats, from which on it may be another model.

Chains of updates from three base models that looked like one otherwise stayed below 0.18.
"""


@cause(
    "recomputed", 2, size="share with r = 1", needs="tokens",
    advice="Record the engine's own log-probs at sampling time; recomputed ones hide every "
    "difference between engine and trainer, and r is 1 by construction.",
    explains=frozenset({"topk-convention", "stale", "precision"}),
)  # fmt: skip
def recomputed(evidence: Evidence) -> Finding | None:
    """μ was computed by the trainer instead of taken from the engine."""
    usable = evidence.usable_token
    if usable.sum() < FEWEST:
        return None
    same = np.abs(evidence.mu_token - evidence.pi_token) <= EQUAL
    share = float(same[usable].mean())
    slots = evidence.usable & evidence.has_list[:, None]
    equal = np.abs(evidence.mu - evidence.pi)[slots] <= EQUAL
    lists = float(equal.mean()) if len(equal) else np.nan
    if share < 0.99 and not lists >= 0.99:
        return None
    update = evidence.update[np.isfinite(evidence.update)]
    moved = float(np.median(update)) if len(update) else np.nan
    steps = len(np.unique(evidence.sample["step"]))
    # The first update after a rollout has r = 1 by right; several in a row have not, unless
    # nothing moves.
    sure = 0.98 if steps > 1 and (share >= 0.99) else 0.75
    return Finding(
        "recomputed", sure, int((same & usable).sum()), share,
        {"equal_scalars": share, "equal_list_entries": lists, "steps": steps,
         "median_update_nats": moved},
    )  # fmt: skip


@cause(
    "stale", 3, size="distance back", needs="lists",
    advice="Synchronise the engine's weights before each rollout, take log-probs from the weights "
    "that sampled, and record the staleness in the metadata.",
    explains=DISTANCE | {"shift", "vocabulary", "topk-convention", "concentration"},
)  # fmt: skip
def stale(evidence: Evidence) -> Finding | None:
    """μ comes from older weights than the sampler's, or than the updates explain."""
    value, error = tilt(evidence)
    common: dict[str, Any] = {"samples_side_with_policy": value, "samples_side_error": error}
    noise, pairs, side = twin_noise(evidence)
    # A μ that differs between rows of the same prefix is not what the sampler says it is.
    noisy = pairs >= 5 and side == "behavior" and noise > declared(evidence)[1]
    if 0.25 < value < 0.95 and value > 5 * error and not noisy:
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
    lag = _lag(evidence)
    common["along_the_update"] = ahead
    middle = float(np.nanmedian(evidence.divergence))
    # Noise is far from μ too, and not because of any update.
    noisy = precision(evidence) is not None or spread_of_rows(evidence) <= EVEN
    if lag.lowest > 3 and middle > 0.02 and not noisy:
        return Finding(
            "stale", 0.75, len(evidence), lag.value,
            {"pattern": "μ is further from π than the updates since the rollout can have gone",
             **common, **lag.evidence},
        )  # fmt: skip
    return None


@cause(
    "other-model", 8, size="median correlation", needs="lists",
    advice="Check the checkpoint, revision and adapter on both sides, that weights were "
    "synchronised at all, and that both read the same prompt.",
    explains=DISTANCE | {"vocabulary", "concentration"},
)  # fmt: skip
def other_model(evidence: Evidence) -> Finding | None:
    """Engine and trainer do not hold the same model, or do not read the same prompt."""
    if len(evidence.rows) < FEWEST:
        return None
    if evidence.misplaced > 0.2:
        return Finding(
            "other-model", 0.9, len(evidence), evidence.misplaced,
            {"pattern": "the policy's rows belong to other tokens",
             "scalars_that_are_another_entry": evidence.misplaced},
        )  # fmt: skip
    low, middle = np.quantile(evidence.drift, [0.1, 0.5])
    related = float(np.median(evidence.correlation))
    lag = _lag(evidence)
    mean = float(np.nanmean(evidence.divergence))
    value, error = tilt(evidence)
    # Unrelated even where they agree best; or further than updates go, or as far at the first
    # step as at the last.
    unrelated = low > UNRELATED and not lag.lowest < 1.4
    flat = 0.65 < lag.flat < 1.5
    # One seed is one chain, which may go further than most; several tell how far chains go.
    several = len(np.unique(evidence.sample["seed"])) > 1
    remote = lag.lowest > 2.2 or (several and lag.lowest > 1.45 and flat and low > 0.2)
    sample = evidence.sample
    # Of tokens that are not stored D is small.
    everywhere = mean * sample.stored / sample.seen if sample.thinned else mean
    if everywhere < REMOTE or middle < 0.3 or not (unrelated or remote) or same_way(evidence) > 0.4:
        return None
    usable = evidence.usable_token
    sampled = {
        f"mean_log_{name}_of_sampled": float(np.mean(values[usable]))
        for name, values in (("mu", evidence.mu_token), ("pi", evidence.pi_token))
        if usable.any()
    }
    sure = 0.95 if (low > UNRELATED and remote) or lag.lowest > 4 else 0.75
    return Finding(
        "other-model", sure, len(evidence.rows), related,
        {"median_correlation": related, "mean_divergence_nats": mean,
         "drift_of_best_tenth": float(low), "median_drift": float(middle), **sampled,
         "samples_side_with_policy": value, "samples_side_error": error, **lag.evidence},
    )  # fmt: skip


def same_way(evidence: Evidence) -> float:
    """Median correlation of the way from μ to π with the way of the recorded update.

    Updates of one chain go partly the same way; what another model differs by does not.
    """
    rows = evidence.rows
    used = evidence.usable[rows] & np.isfinite(evidence.post[rows])
    far = evidence.pi[rows] - evidence.mu[rows] * evidence.slope[:, None]
    return float(np.median(correlation(far, evidence.post[rows] - evidence.pi[rows], used)))


@dataclass
class Lag:
    """How many updates of the recorded size lie between μ and π, over those since the rollout.

    With the same less two standard errors, and the drift of the first steps over the last's.
    """

    value: float = math.nan
    lowest: float = math.nan
    flat: float = math.nan

    @property
    def evidence(self) -> dict[str, float]:
        """As a finding shows it."""
        names = ("updates_away_over_steps", "at_least", "first_drift_over_last")
        return dict(zip(names, (self.value, self.lowest, self.flat), strict=True))


def _lag(evidence: Evidence) -> Lag:
    """Estimate the lag; NaN where the rows are too few.

    Updates of one size that all go one way carry the policy s sizes away in s steps; those that
    do not, less. For each seed and step the median over rows of

        log √(D(μ^b, π) / D(π, π')) / 2 + log (ρ(μ, π) / ρ(π, π')) / 2 − log s

    with π' the policy after the step, s the step's number and b the slope at vanishing drift,
    which takes out a temperature. It is about 0 or below for a chain that begins at its rollout.
    """
    lag, rows = Lag(), evidence.rows
    if len(rows) < FEWEST:
        return lag
    step = np.asarray(evidence.sample["step"], dtype=np.float64)[rows]
    slope = evidence.at_vanishing_drift(evidence.log_slope).value
    pi, post, used = evidence.pi[rows], evidence.post[rows], evidence.usable_post[rows]
    scaled = evidence.mu[rows] * (float(np.exp(slope)) if np.isfinite(slope) else 1.0)
    far, near = _conditional(scaled, pi, used), _conditional(pi, post, used)
    drift, moved = evidence.drift, evidence.update_drift
    usable = (far > 0) & (near > 1e-9) & (moved > 1e-6) & (drift > 0)
    if usable.sum() < FEWEST:
        return lag
    value = 0.25 * np.log(far / near) + 0.5 * np.log(drift / moved) - np.log(np.maximum(step, 1.0))
    seed = np.asarray(evidence.sample["seed"])[rows].astype(np.int64)
    block = (seed << 32) + step.astype(np.int64)
    blocks = [usable & (block == each) for each in np.unique(block[usable])]
    medians = [float(np.median(value[mine])) for mine in blocks if mine.sum() >= 6]
    if len(medians) >= 2:
        lag.value = float(np.exp(np.mean(medians)))
        error = float(np.std(medians, ddof=1)) / np.sqrt(len(medians))
        lag.lowest = lag.value * float(np.exp(-2 * error))
    low, high = np.quantile(step, [1 / 3, 2 / 3])
    if low < high:
        first, last = drift[step <= low], drift[step >= high]
        lag.flat = float(np.median(first) / max(np.median(last), 1e-9))
    return lag


def _conditional(log_p: Floats, log_q: Floats, used: Bools) -> Floats:
    """KL of two rows over the used slots alone, each normalised over them, nats."""
    normal = []
    for logs in (log_p, log_q):
        masked = np.where(used, logs, -np.inf)
        top = masked.max(axis=1, keepdims=True, initial=-1e30)
        total = np.log(np.maximum(np.exp(masked - top).sum(axis=1, keepdims=True), 1e-300))
        normal.append(masked - top - total)
    p, q = normal
    return np.asarray((np.where(used, np.exp(p), 0.0) * np.where(used, p - q, 0.0)).sum(axis=1))
