"""How far the policies are apart: recomputed log-probs, old weights, another model, noise."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.special import log_softmax

from .evidence import (
    FEWEST,
    Bools,
    Evidence,
    Floats,
    Ints,
    correlation,
    divergence,
    drift_of,
    rounded_to,
    said,
)
from .findings import DISTANCE, Cause, Finding, finding

EQUAL: Final = 1e-5  # |log r| below which two float32 log-probs are one number
UNRELATED: Final = 0.62  # ρ (r = 0.85) that a tenth of all rows of related policies stay below
# Mean D of all tokens, nats, from which on it may be another model: chains of updates from three
# base models that looked like one otherwise stayed below 0.18.
REMOTE: Final = 0.25

EXPECTED: Final = {
    "float64": 1e-5, "fp64": 1e-5, "float32": 2e-3, "fp32": 2e-3, "tf32": 0.01,
    "float16": 0.02, "fp16": 0.02, "bfloat16": 0.08, "bf16": 0.08,
    "int8": 0.35, "float8": 0.35, "fp8": 0.35, "int4": 1.0, "fp4": 1.0,
}  # fmt: skip
"""Standard deviation of a log-prob (nats) that a precision explains, generously: SmolLM2's
engines moved log-probs by 4e-2 in bfloat16 and by 0.2 in int8 on average."""

UNDECLARED: Final = "not declared"
HALVES: Final = {"bfloat16": 512, "float16": 4096}  # rounding moves a value by this part at most
LARGEST: Final = 0.7  # noise (nats) beyond which no precision of a working model is to blame
OUTLIER: Final = 6.0  # times the bulk's standard deviation from which a row is an outlier
# Interquartile range of the log of rows' residuals below which they are one noise: a row of 20
# independent residuals alone gives 0.22, a real update's drift 1 and more.
EVEN: Final = 0.45


@Cause(
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
    share = same[usable].mean()
    equal = np.abs(evidence.mu - evidence.pi)[evidence.usable] <= EQUAL
    lists = equal.mean() if len(equal) else np.nan
    if share < 0.99 and not lists >= 0.99:
        return None
    update = divergence(evidence.pi, evidence.post, evidence.usable_post)
    steps = len(np.unique(evidence.sample["step"]))
    # The first update after a rollout has r = 1 by right; several in a row have not, unless
    # nothing moves.
    return finding(
        0.98 if steps > 1 and share >= 0.99 else 0.75, (same & usable).sum(), share,
        equal_scalars=share, equal_list_entries=lists, steps=steps,
        median_update_nats=np.nan if np.isnan(update).all() else np.nanmedian(update),
    )  # fmt: skip


@Cause(
    "stale", 3, size="distance back", needs="lists",
    advice="Synchronise the engine's weights before each rollout, take log-probs from the weights "
    "that sampled, and record the staleness in the metadata.",
    explains=DISTANCE | {"shift", "vocabulary", "topk-convention", "concentration"},
)  # fmt: skip
def stale(evidence: Evidence) -> Finding | None:
    """μ comes from older weights than the sampler's, or than the updates explain."""
    value, error = evidence.tilt
    common: dict[str, Any] = {"samples_side_with_policy": value, "samples_side_error": error}
    noise, pairs, side = twin_noise(evidence)
    # A μ that differs between rows of the same prefix is not what the sampler says it is.
    noisy = pairs >= 5 and side == "behavior" and noise > declared(evidence)[1]
    if 0.25 < value < 0.95 and value > 5 * error and not noisy:
        return finding(
            min(0.95, 0.6 + 0.05 * value / error), len(evidence), value / (1 - value),
            pattern="tokens were sampled from a policy between μ and π", **common,
        )  # fmt: skip
    if len(evidence.rows) < FEWEST:
        return None
    ahead = _same_way(evidence)
    if np.median(evidence.drift) > 0.3 and not ahead > 0.4:
        return None  # so far, and not the way the updates go: another model
    lag = _lag(evidence)
    # Noise is far from μ too, and not because of any update.
    noisy = precision(evidence) is not None or _spread_of_rows(evidence) <= EVEN
    if lag["at_least"] > 3 and np.nanmedian(evidence.divergence) > 0.02 and not noisy:
        return finding(
            0.75, len(evidence), lag["updates_away_over_steps"],
            pattern="μ is further from π than the updates since the rollout can have gone",
            **common, along_the_update=ahead, **lag,
        )  # fmt: skip
    return None


@Cause(
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
        return finding(
            0.9, len(evidence), evidence.misplaced,
            pattern="the policy's rows belong to other tokens",
            scalars_that_are_another_entry=evidence.misplaced,
        )  # fmt: skip
    low, middle = np.quantile(evidence.drift, [0.1, 0.5])
    related = np.median(evidence.correlation)
    lag = _lag(evidence)
    lowest = lag["at_least"]
    mean = np.nanmean(evidence.divergence)
    # Unrelated even where they agree best; or further than updates go, or as far at the first
    # step as at the last.
    unrelated = low > UNRELATED and not lowest < 1.4
    flat = 0.65 < lag["first_drift_over_last"] < 1.5
    # One seed is one chain, which may go further than most; several tell how far chains go.
    sample = evidence.sample
    several = len(np.unique(sample["seed"])) > 1
    remote = lowest > 2.2 or (several and lowest > 1.45 and flat and low > 0.2)
    # Of tokens that are not stored D is small.
    everywhere = mean * sample.stored / sample.seen if sample.thinned else mean
    far = everywhere >= REMOTE and middle >= 0.3 and (unrelated or remote)
    if not far or _same_way(evidence) > 0.4:
        return None
    value, error = evidence.tilt
    usable = evidence.usable_token
    sampled = {
        f"mean_log_{name}_of_sampled": float(logs[usable].mean())
        for name, logs in (("mu", evidence.mu_token), ("pi", evidence.pi_token))
        if usable.any()
    }
    return finding(
        0.95 if (low > UNRELATED and remote) or lowest > 4 else 0.75,
        len(evidence.rows), related,
        median_correlation=related, mean_divergence_nats=mean, drift_of_best_tenth=low,
        median_drift=middle, **sampled, samples_side_with_policy=value, samples_side_error=error,
        **lag,
    )  # fmt: skip


def _same_way(evidence: Evidence) -> float:
    """Median correlation of the way from μ to π with the way of the recorded update.

    Updates of one chain go partly the same way; what another model differs by does not.
    """
    rows = evidence.rows
    mu, pi, post = evidence.mu[rows], evidence.pi[rows], evidence.post[rows]
    used = evidence.usable[rows] & np.isfinite(post)
    return float(np.median(correlation(pi - mu * evidence.slope[:, None], post - pi, used)))


def _lag(evidence: Evidence) -> dict[str, float]:
    """How many updates of the recorded size lie between μ and π, over those since the rollout.

    With the same less two standard errors, and the drift of the first steps over the last's; NaN
    where the rows are too few.

    Updates of one size that all go one way carry the policy s sizes away in s steps; those that
    do not, less. For each seed and step the median over rows of

        log √(D(μ^b, π) / D(π, π')) / 2 + log (ρ(μ, π) / ρ(π, π')) / 2 − log s

    with π' the policy after the step, s the step's number and b the slope at vanishing drift,
    which takes out a temperature. It is about 0 or below for a chain that begins at its rollout.
    """
    rows = evidence.rows
    lag = dict.fromkeys(("updates_away_over_steps", "at_least", "first_drift_over_last"), np.nan)
    if len(rows) < FEWEST:
        return lag
    step, seed = (evidence.sample[name][rows].astype(np.int64) for name in ("step", "seed"))
    slope = evidence.at_vanishing_drift(evidence.log_slope).value
    pi, post, used = evidence.pi[rows], evidence.post[rows], evidence.usable_post[rows]
    scaled = evidence.mu[rows] * (np.exp(slope) if np.isfinite(slope) else 1.0)
    far, near = _conditional(scaled, pi, used), _conditional(pi, post, used)
    drift = evidence.drift
    moved = drift_of(np.minimum(correlation(pi, post, used, constant=1.0), 1.0))
    usable = (far > 0) & (near > 1e-9) & (moved > 1e-6) & (drift > 0)
    if usable.sum() < FEWEST:
        return lag
    away = 0.25 * np.log(far / near) + 0.5 * np.log(drift / moved) - np.log(np.maximum(step, 1))
    block = (seed << 32) + step
    blocks = [usable & (block == each) for each in np.unique(block[usable])]
    medians = [np.median(away[mine]) for mine in blocks if mine.sum() >= 6]
    if len(medians) >= 2:
        value, error = np.mean(medians), np.std(medians, ddof=1) / np.sqrt(len(medians))
        lag["updates_away_over_steps"] = float(np.exp(value))
        lag["at_least"] = float(np.exp(value - 2 * error))
    low, high = np.quantile(step, [1 / 3, 2 / 3])
    if low < high:
        first, last = np.median(drift[step <= low]), np.median(drift[step >= high])
        lag["first_drift_over_last"] = float(first / max(last, 1e-9))
    return lag


def _conditional(log_p: Floats, log_q: Floats, used: Bools) -> Floats:
    """KL of two rows over the used slots alone, each normalised over them, nats."""
    p, q = (log_softmax(np.where(used, logs, -np.inf), axis=1) for logs in (log_p, log_q))
    return np.asarray(np.where(used, np.exp(p) * (p - q), 0.0).sum(axis=1))


@Cause(
    "precision", 10, size="noise in nats", needs="lists",
    advice="Compute logits and log-softmax in float32 on both sides, declare the engine's "
    "precision, and look for routing or cache differences where few or late tokens are far out.",
    explains=frozenset({"impossible-values", "topk-convention", "concentration"}),
)  # fmt: skip
def precision(evidence: Evidence) -> Finding | None:
    """Rounding noise beyond what the declared precision explains."""
    return _rounded(evidence) or _noise(evidence)


def declared(evidence: Evidence) -> tuple[str, float]:
    """The engine's or the readout's coarser precision, and the noise it explains (nats)."""
    behavior, readout = evidence.metadata.behavior, evidence.metadata.readout
    given = [said(behavior, name) for name in ("precision", "dtype", "quantization")]
    given += [said(readout, name) for name in ("hidden_dtype", "head_dtype")]
    given.append("bfloat16" if readout.get("logits_rounded") else None)
    names = [str(each).lower() for each in given if each]
    if not names:  # then the engine may be quantised as far as any is
        return UNDECLARED, EXPECTED["int4"]
    sizes = [("float32", EXPECTED["float32"])]
    sizes += [(name, size) for name in names for known, size in EXPECTED.items() if known in name]
    return max(sizes, key=lambda each: each[1])


def _rounded(evidence: Evidence) -> Finding | None:
    """Log-probs, or the logits before them, in a shorter type than declared."""
    name, expected = declared(evidence)
    known = name != UNDECLARED
    if known and expected >= EXPECTED["bfloat16"]:
        return None
    for column in ("topk_behavior_logprobs", "topk_pre_logprobs"):
        values = np.asarray(evidence.sample[column], dtype=np.float32)
        used = evidence.listed & evidence.sound[column] & (values < -1e-3)
        if used.sum() < 5 * FEWEST:
            continue
        rows = used.any(axis=1).sum()
        short = rounded_to(values[used])
        if short and not (known and short == "float16" and expected >= EXPECTED["float16"]):
            return finding(
                0.97 if known else 0.7, rows,
                pattern="log-probs rounded", column=column, fit_into=short, declared=name,
                largest_error_nats=float(np.abs(values[used]).max()) / HALVES[short],
            )  # fmt: skip
        share, step = _on_grid(values.astype(np.float64), used)
        if share > 0.3:
            return finding(
                0.95 if known else 0.7, rows,
                pattern="logits rounded before the log-softmax", column=column,
                differences_on_grid=share, grid_nats=step, declared=name,
            )  # fmt: skip
    return None


def _on_grid(values: Floats, used: Bools) -> tuple[float, float]:
    """Share of differences of the likeliest entries that are multiples of 1/64, and the step.

    log p_i − log p_j is the difference of two logits: of bfloat16 logits of 4 nats or more
    it is a multiple of 1/64 or more, which by chance is so for 1 in 200 at this tolerance.
    """
    rows = used[:, :4].all(axis=1) & (used.shape[1] >= 4)
    gaps = np.abs(np.diff(values[rows][:, :4], axis=1)).reshape(-1)
    gaps = gaps[gaps > 1e-3]
    if rows.sum() < FEWEST or len(gaps) < FEWEST:
        return 0.0, 0.0
    shares = {
        bits: float((np.abs(gaps * bits - np.round(gaps * bits)) / bits < 4e-5).mean())
        for bits in (8, 16, 32, 64)
    }
    return shares[64], 1 / next(bits for bits in shares if shares[bits] >= 0.9 * shares[64])


def _noise(evidence: Evidence) -> Finding | None:
    """Residuals that are one even noise over all rows, or that twins do not share."""
    name, expected = declared(evidence)
    sizes, count = evidence.residual, len(evidence)
    bulk = np.median(sizes) if len(sizes) else None
    twin, pairs, side = twin_noise(evidence)
    common: dict[str, Any] = {"declared": name, "explained_nats": expected}
    if pairs >= 5:
        common |= {"twins": pairs, "twin_noise_nats": twin, "twin_side": side}
        if expected < twin < LARGEST:
            return finding(
                0.95, count, twin,
                pattern="rows of the same prefix differ", **common, median_residual_nats=bulk,
            )  # fmt: skip
    spread = _spread_of_rows(evidence)
    if spread > EVEN or bulk is None or bulk > 0.5:
        return None
    common |= {"residual_nats": bulk, "spread_of_rows": spread}
    if bulk > expected:
        sign = np.sign((evidence.pi - evidence.mu)[evidence.usable]).mean()
        return finding(0.9, count, bulk, pattern="even noise", mean_sign=sign, **common)
    if name == UNDECLARED:  # a pattern tells more than a size
        expected = EXPECTED["bfloat16"]
    position = evidence.sample["position"][evidence.rows]
    logs = np.log(np.maximum(sizes, 1e-9))
    # How many times larger the residuals are at the end of responses than at their start
    low, high = np.quantile(position, [0.25, 0.75])
    growth = np.exp(_change(logs, position <= low, position >= max(high, low + 1)))
    late = np.quantile(sizes, 0.9)
    if growth > 3 and late > expected and len(np.unique(position)) > 2:
        return finding(
            0.85, count, late,
            pattern="noise grows along the response", growth=growth, **common,
        )  # fmt: skip
    far = sizes > OUTLIER * np.exp(_by_position(logs, position))
    if far.sum() >= 3 and 0.002 < far.mean() < 0.2 and np.median(sizes[far]) > expected:
        return finding(
            0.85, far.sum(), np.median(sizes[far]),
            pattern="few rows far out, the rest even", share=far.mean(), **common,
        )  # fmt: skip
    return None


def _spread_of_rows(evidence: Evidence) -> float:
    """Interquartile range of rows' log residuals, their position's median taken off; ∞ for drift.

    Up to `EVEN` it is one noise in all rows. Drift differs from row to row, or grows with steps.
    """
    sizes, rows = evidence.residual, evidence.rows
    if len(sizes) < FEWEST or np.median(sizes) < 1e-6:
        return np.inf
    logs = np.log(np.maximum(sizes, 1e-9))
    within = logs - _by_position(logs, evidence.sample["position"][rows])
    step = evidence.sample["step"][rows]
    low, high = np.quantile(step, [1 / 3, 2 / 3])
    # Drift grows from the first third of the steps to the last.
    if low != high and abs(_change(within, step <= low, step >= high)) > 0.2:
        return np.inf
    return float(np.subtract(*np.quantile(within, [0.75, 0.25])))


def twin_noise(evidence: Evidence) -> tuple[float, int, str]:
    """Median over pairs of twins of the noise of a log-prob (nats), pairs, and which side."""
    first = np.array([rows[0] for rows in evidence.twins for _ in rows[1:]], np.int64)
    others = np.array([row for rows in evidence.twins for row in rows[1:]], np.int64)
    best, pairs, side = 0.0, 0, ""
    for name, logs in (("behavior", evidence.mu), ("policy", evidence.pi)):
        theirs = evidence.looked_up(others, evidence.ids[first], logs)
        gap = np.where(evidence.usable[first], logs[first] - theirs, np.nan)
        gap = gap[np.isfinite(gap).sum(axis=1) >= 3]
        if len(gap):
            pairs, middle = len(gap), float(np.median(np.nanstd(gap, axis=1)) / np.sqrt(2))
            if middle >= best:
                best, side = middle, name
    return best, pairs, side


def _by_position(logs: Floats, position: Ints) -> Floats:
    """Median of the rows at each position, or of all rows where few share it."""
    found = np.full(len(logs), np.median(logs))
    for each in np.unique(position):
        mine = position == each
        if mine.sum() >= 12:
            found[mine] = np.median(logs[mine])
    return found


def _change(logs: Floats, first: Bools, last: Bools) -> float:
    """Difference of two medians; 0 where either is of few rows."""
    if first.sum() < 10 or last.sum() < 10:
        return 0.0
    return float(np.median(logs[last]) - np.median(logs[first]))
