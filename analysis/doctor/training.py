"""What the trainer makes of the tokens: advantages and masks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.masks import DEFAULT_THRESHOLD

from .evidence import FEWEST, Evidence, said
from .findings import Finding, cause

FEW_IDS: Final = 5
"""Ids that count as "the same few"."""


@cause(
    "advantage", 11, size="value",
    advice="Follow the reward from the verifier to the batch: its spread within a prompt, the "
    "baseline, the division by a spread of 0, the mask's threshold.",
)  # fmt: skip
def advantage(evidence: Evidence) -> Finding | None:
    """The advantages teach nothing, or nothing is left in the loss."""
    values = np.asarray(evidence.sample["advantage"], dtype=np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        return Finding(
            "advantage", 0.99, int(bad.sum()), float(bad.mean()),
            {"pattern": "not finite", "rows": int(bad.sum())},
        )  # fmt: skip
    if len(values) < FEWEST:
        return None
    masked = _all_masked(evidence)
    if masked is not None:
        return masked
    groups, responses = len(np.unique(evidence.cluster)), len(np.unique(evidence.response))
    common: dict[str, Any] = {"groups": groups, "responses": responses}
    if values.min() == values.max():
        zero = values[0] == 0
        return Finding(
            "advantage", 0.98 if groups > 1 and responses > 3 else 0.6, len(values),
            float(values[0]),
            {"pattern": "zero everywhere" if zero else "constant", "value": float(values[0]),
             **common},
        )  # fmt: skip
    same, several = _within_groups(evidence, values)
    if several >= 5 and same == several:
        return Finding(
            "advantage", 0.9, len(values), 1.0,
            {"pattern": "the same for all responses of a prompt", "prompts_judged": several,
             **common},
        )  # fmt: skip
    positive, negative = int((values > 0).sum()), int((values < 0).sum())
    if groups >= 3 and responses >= 20 and min(positive, negative) == 0:
        return Finding(
            "advantage", 0.95, len(values), float(values.mean()),
            {"pattern": f"none is {'negative' if negative == 0 else 'positive'}: "
             "no baseline was taken off, or the sign was lost",
             "positive": positive, "negative": negative, "mean": float(values.mean()), **common},
        )  # fmt: skip
    return None


@cause(
    "concentration", 12, size="share of the masked", needs="tokens",
    advice="Look at these tokens in the report: a mask that always drops the deciding tokens stops "
    "learning where it matters; raise the threshold or see why their policies part.",
)  # fmt: skip
def concentration(evidence: Evidence) -> Finding | None:
    """The mask hits the same few tokens again and again."""
    masked = masks(evidence).items()
    found = [each for arm, rows in masked if (each := _concentrated(evidence, arm, rows))]
    return max(found, key=lambda each: each.confidence, default=None)


def masks(evidence: Evidence) -> dict[str, NDArray[np.bool_]]:
    """Tokens dropped: in every masked arm; by the ratio rule where there is no such arm."""
    sample = evidence.sample
    found = {
        arm: ~in_loss
        for arm, in_loss in sample.in_loss.items()
        if arm in sample.masks and not in_loss.all()
    }
    if found:
        return found
    with np.errstate(invalid="ignore"):
        outside = evidence.divergence > DEFAULT_THRESHOLD
        away = np.asarray(sample["advantage"]) * (evidence.pi_token - evidence.mu_token) > 0
    return {"ratio rule, recomputed": outside & away & evidence.usable_token}


def _all_masked(evidence: Evidence) -> Finding | None:
    """An arm whose mask drops every token."""
    for arm, in_loss in evidence.sample.in_loss.items():
        if len(in_loss) and not in_loss.any():
            update = said(evidence.sample.masks.get(arm, {}), "mask", "none")
            return Finding(
                "advantage", 0.7 if evidence.sample.thinned else 0.9, len(in_loss), 0.0,
                {"pattern": "no token is in the loss", "arm": arm, "mask": str(update)},
            )  # fmt: skip
    return None


def _within_groups(evidence: Evidence, values: NDArray[np.float64]) -> tuple[int, int]:
    """Prompts whose responses all share one advantage that is not 0; prompts that can tell."""
    order = np.lexsort((evidence.response, evidence.cluster))
    cluster, response, values = evidence.cluster[order], evidence.response[order], values[order]
    starts = np.flatnonzero(np.r_[True, cluster[1:] != cluster[:-1]])
    low = np.minimum.reduceat(values, starts)
    high = np.maximum.reduceat(values, starts)
    fresh = np.r_[True, response[1:] != response[:-1]]
    several = np.add.reduceat(fresh.astype(np.int64), starts) >= 3
    judged = several & ~((low == 0) & (high == 0))
    return int((judged & (low == high)).sum()), int(judged.sum())


def _concentrated(evidence: Evidence, arm: str, masked: NDArray[np.bool_]) -> Finding | None:
    """The commonest ids among the masked tokens, against all tokens."""
    token, total = evidence.token, int(masked.sum())
    if len(token) < FEWEST or total < 10 or total == len(token):
        return None
    ids, counts = np.unique(token[masked], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:FEW_IDS]
    chosen = ids[order]
    few = np.isin(token, chosen)
    share, base = float(few[masked].mean()), float(few.mean())
    # Excess in standard errors over prompts: tokens of one prompt are masked together.
    excess = np.where(masked, few - base, 0.0)
    sums = np.bincount(evidence.cluster, weights=excess)
    error = float(np.sqrt((sums**2).sum()))
    score = float(excess.sum()) / error if error > 0 else np.inf
    spread = 1 / float(((counts / total) ** 2).sum())
    if share < 0.8 or share < 2 * base or base > 0.4 or score < 2.5:
        return None
    return Finding(
        "concentration", 0.9 if share > 0.95 else 0.75, int((few & masked).sum()), share,
        {"arm": arm, "ids": [int(each) for each in chosen], "masked": total,
         "share_of_masked": share, "share_of_all": base, "effective_ids": spread,
         "standard_errors": score},
    )  # fmt: skip
