"""How far the policies are apart, and why: temperature, old weights, another model."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .evidence import FEWEST, Bools, Evidence, Floats
from .findings import Finding
from .matching import correlation
from .noise import EVEN as EVEN_NOISE
from .noise import declared, precision, spread_of_rows, twin_noise

EQUAL: Final = 1e-5
"""|log r| below which two float32 log-probs are one number."""

MARGIN: Final = 0.05
"""|log τ| that is no finding; at vanishing drift real updates left up to 0.06, with its error."""

DRIFT_BIAS: Final = 0.2
"""What drift may leave in a log slope, as a share of ρ; healthy dumps showed up to 0.15."""

EVEN: Final = 0.7
"""Share of the rows of little drift that must agree on a temperature."""

UNRELATED: Final = 0.62
"""ρ (r = 0.85) that a tenth of all rows of related policies stay below."""

REMOTE: Final = 0.25
"""Mean D of all tokens, nats, from which on it may be another model.

Chains of updates from three base models that looked like one otherwise stayed below 0.18.
"""


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
    noisy = precision(evidence) is not None or spread_of_rows(evidence) <= EVEN_NOISE
    if lag.lowest > 3 and middle > 0.02 and not noisy:
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
    return float(np.median(correlation(far, evidence.post[rows] - evidence.pi[rows], used)))


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
    p, q = (normalised(each, used) for each in (log_p, log_q))
    gap = np.where(used, p - q, 0.0)
    return np.asarray((np.where(used, np.exp(p), 0.0) * gap).sum(axis=1))


def normalised(logs: Floats, used: Bools) -> Floats:
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
            **sampled,
            "samples_side_with_policy": value,
            "samples_side_error": error,
            **lag.evidence,
        },
    )
