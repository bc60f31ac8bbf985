"""Noise: rounding, outliers, and errors that grow along the response."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .evidence import FEWEST, Bools, Evidence, Floats, Ints, rounded_to, said
from .findings import Finding, cause

EXPECTED: Final = {
    "float64": 1e-5, "float32": 2e-3, "tf32": 0.01, "float16": 0.02, "bfloat16": 0.08,
    "int8": 0.35, "fp8": 0.35, "float8": 0.35, "int4": 1.0, "fp4": 1.0,
}  # fmt: skip
"""Standard deviation of a log-prob (nats) that a precision explains, generously: SmolLM2's
engines moved log-probs by 4e-2 in bfloat16 and by 0.2 in int8 on average."""

UNDECLARED: Final = "not declared"

_HALVES: Final = {"bfloat16": 512, "float16": 4096}
"""A value over this is the most by which rounding moves it."""

LARGEST: Final = 0.7
"""Noise (nats) beyond which no precision of a working model is to blame."""

OUTLIER: Final = 6.0
"""Times the bulk's standard deviation from which a row is an outlier."""

EVEN: Final = 0.45
"""Interquartile range of the log of rows' residuals below which they are one noise: a row of 20
independent residuals alone gives 0.22, a real update's drift 1 and more."""


@cause(
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
    best = ("float32", EXPECTED["float32"])
    for name in names:
        for known, size in EXPECTED.items():
            aliases = {known, known.replace("bfloat16", "bf16").replace("float", "fp")}
            if any(alias in name for alias in aliases) and size > best[1]:
                best = (name, size)
    return best


def _rounded(evidence: Evidence) -> Finding | None:
    """Log-probs, or the logits before them, in a shorter type than declared."""
    name, expected = declared(evidence)
    if expected >= EXPECTED["bfloat16"] and name != UNDECLARED:
        return None
    for column in ("topk_behavior_logprobs", "topk_pre_logprobs"):
        values = np.asarray(evidence.sample[column], dtype=np.float32)
        used = evidence.listed & evidence.sound(column) & (values < -1e-3)
        if used.sum() < 5 * FEWEST:
            continue
        short = rounded_to(values[used])
        if short is not None and not (
            short == "float16" and expected >= EXPECTED["float16"] and name != UNDECLARED
        ):
            return Finding(
                "precision", 0.97 if name != UNDECLARED else 0.7,
                int(used.any(axis=1).sum()), None,
                {"pattern": "log-probs rounded", "column": column, "fit_into": short,
                 "declared": name,
                 "largest_error_nats": float(np.abs(values[used]).max()) / _HALVES[short]},
            )  # fmt: skip
        share, step = _on_grid(values.astype(np.float64), used)
        if share > 0.3:
            return Finding(
                "precision", 0.95 if name != UNDECLARED else 0.7,
                int(used.any(axis=1).sum()), None,
                {"pattern": "logits rounded before the log-softmax", "column": column,
                 "differences_on_grid": share, "grid_nats": step, "declared": name},
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
    sizes, rows = residuals(evidence)
    twin, pairs, side = twin_noise(evidence)
    common: dict[str, Any] = {"declared": name, "explained_nats": expected}
    if pairs >= 5:
        common |= {"twins": pairs, "twin_noise_nats": twin, "twin_side": side}
    if pairs >= 5 and expected < twin < LARGEST:
        common |= {"median_residual_nats": float(np.median(sizes)) if len(sizes) else None}
        return Finding(
            "precision", 0.95, len(evidence), twin,
            {"pattern": "rows of the same prefix differ", **common},
        )  # fmt: skip
    spread = spread_of_rows(evidence)
    if spread > EVEN:
        return None
    position = np.asarray(evidence.sample["position"])[rows]
    bulk = float(np.median(sizes))
    logs = np.log(np.maximum(sizes, 1e-9))
    if bulk > 0.5:
        return None
    common |= {"residual_nats": bulk, "spread_of_rows": spread}
    if bulk > expected:
        symmetric = float(np.mean(np.sign((evidence.pi - evidence.mu)[evidence.usable])))
        return Finding(
            "precision", 0.9, len(evidence), bulk,
            {"pattern": "even noise", "mean_sign": symmetric, **common},
        )  # fmt: skip
    if name == UNDECLARED:  # a pattern tells more than a size
        expected = EXPECTED["bfloat16"]
    growth = _growth(logs, position)
    far = sizes > OUTLIER * np.exp(_by_position(logs, position))
    if growth > 3 and float(np.quantile(sizes, 0.9)) > expected:
        return Finding(
            "precision", 0.85, len(evidence), float(np.quantile(sizes, 0.9)),
            {"pattern": "noise grows along the response", "growth": growth, **common},
        )  # fmt: skip
    share = float(far.mean())
    if far.sum() >= 3 and 0.002 < share < 0.2 and float(np.median(sizes[far])) > expected:
        return Finding(
            "precision", 0.85, int(far.sum()), float(np.median(sizes[far])),
            {"pattern": "few rows far out, the rest even", "share": share, **common},
        )  # fmt: skip
    return None


def spread_of_rows(evidence: Evidence) -> float:
    """Interquartile range of rows' log residuals, their position's median taken off; ∞ for drift.

    Up to `EVEN` it is one noise in all rows. Drift differs from row to row, or grows with steps.
    """
    sizes, rows = residuals(evidence)
    if len(sizes) < FEWEST or float(np.median(sizes)) < 1e-6:
        return float("inf")
    logs = np.log(np.maximum(sizes, 1e-9))
    within = logs - _by_position(logs, np.asarray(evidence.sample["position"])[rows])
    if abs(_over_steps(evidence, within, rows)) > 0.2:
        return float("inf")
    return float(np.subtract(*np.quantile(within, [0.75, 0.25])))


def residuals(evidence: Evidence) -> tuple[Floats, Ints]:
    """Standard deviation of log π − log μ over a row's usable slots (nats), and the rows."""
    rows = evidence.rows
    gap = np.where(evidence.usable[rows], evidence.pi[rows] - evidence.mu[rows], np.nan)
    if not len(rows):
        return np.zeros(0), rows
    return np.nanstd(gap, axis=1), rows


def twin_noise(evidence: Evidence) -> tuple[float, int, str]:
    """Median over pairs of twins of the noise of a log-prob (nats), pairs, and which side."""
    best, pairs, side = 0.0, 0, ""
    for name, logs in (("behavior", evidence.mu), ("policy", evidence.pi)):
        found = []
        for rows in evidence.twins:
            first = rows[0]
            for other in rows[1:]:
                theirs = evidence.looked_up(np.array([other]), evidence.ids[[first]], logs)[0]
                same = evidence.usable[first] & np.isfinite(theirs)
                if same.sum() >= 3:
                    found.append(float(np.std(logs[first][same] - theirs[same])) / np.sqrt(2))
        if found:
            middle = float(np.median(found))
            pairs = len(found)
            if middle >= best:
                best, side = middle, name
    return best, pairs, side


def _by_position(logs: Floats, position: NDArray[np.int32]) -> Floats:
    """Median of the rows at each position, or of all rows where few share it."""
    found = np.full(len(logs), np.median(logs))
    for each in np.unique(position):
        mine = position == each
        if mine.sum() >= 12:
            found[mine] = np.median(logs[mine])
    return found


def _over_steps(evidence: Evidence, logs: Floats, rows: Ints) -> float:
    """Change of log residuals from the first third of the steps to the last; drift grows."""
    step = np.asarray(evidence.sample["step"])[rows]
    low, high = np.quantile(step, [1 / 3, 2 / 3])
    return _change(logs, step <= low, step >= high) if low != high else 0.0


def _growth(logs: Floats, position: NDArray[np.int32]) -> float:
    """How many times larger the residuals are at the end of responses than at their start."""
    low, high = np.quantile(position, [0.25, 0.75])
    few = len(np.unique(position)) < 3
    change = _change(logs, position <= low, position >= max(high, low + 1))
    return 1.0 if few else float(np.exp(change))


def _change(logs: Floats, first: Bools, last: Bools) -> float:
    """Difference of two medians; 0 where either is of few rows."""
    if first.sum() < 10 or last.sum() < 10:
        return 0.0
    return float(np.median(logs[last]) - np.median(logs[first]))
