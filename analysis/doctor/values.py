"""What single values, the layout of the lists, advantages and masks give away."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from deltad.masks import DEFAULT_THRESHOLD

from .evidence import FEWEST, IMPOSSIBLE, SIDES, Bools, Evidence, Floats, rounded_to, said
from .findings import Cause, Finding, finding

LOG_ODDS: Final = 4.6  # natural log of the odds at which a convention counts as seen: 100 to 1
FEW_IDS: Final = 5  # ids that count as "the same few"


@Cause(
    "sentinel", 1, size="share of tokens",
    advice="Treat this value as missing where the engine's answer is parsed: drop the entry (id "
    "−1) or the row, and let no trainer exponentiate it.",
    explains=frozenset({"impossible-values"}),
)  # fmt: skip
def sentinel(evidence: Evidence) -> Finding | None:
    """A number stands where a log-prob is missing."""
    hit = np.zeros(len(evidence), np.bool_)
    columns: dict[str, Any] = {}
    for name, cells in evidence.fills.items():
        if cells.any():
            rows = cells.reshape(len(cells), -1).any(axis=1)
            hit |= rows
            values = _counted(evidence.sample[name][cells])
            columns[name] = {"values": values, "cells": int(cells.sum()), "rows": int(rows.sum())}
    if not columns:
        return None
    named = {float(value) for each in columns.values() for value in each["values"]}
    # A log-prob of no token, wherever it stands
    telling = any(
        not math.isfinite(value) or value <= IMPOSSIBLE or (value and value == round(value))
        for value in named
    )
    if evidence.misplaced > 0.2 and not telling:
        return None  # real log-probs that lie in other tokens' rows
    worst = max(columns, key=lambda name: int(columns[name]["rows"]))
    value, times = next(iter(columns[worst]["values"].items()))
    count = hit.sum()
    return finding(
        0.99 if count > 2 else 0.9, count, count / len(evidence),
        value=value, column=worst, cells=times, columns=columns,
    )  # fmt: skip


def _counted(values: Any) -> dict[str, int]:
    """Values by name with their counts, most frequent first; at most six."""
    found, counts = np.unique(values.astype(np.float32), return_counts=True)
    names = {"nan": "NaN", "inf": "+inf"}
    order = np.argsort(-counts, kind="stable")[:6]
    written = [f"{found[at]:.7g}" for at in order]
    return {names.get(name, name): int(counts[at]) for name, at in zip(written, order, strict=True)}


@Cause(
    "topk-convention", 6, size="share of tokens",
    advice="Read the lists by id, not by place: drop duplicates, sort by log-prob, keep the "
    "sampled token's own entry, and set behavior.support in the metadata to what the engine does.",
    explains=frozenset({"impossible-values", "truncation"}),
)  # fmt: skip
def topk_convention(evidence: Evidence) -> Finding | None:
    """The lists are not the ranked top-K with the sampled token's own entry."""
    replaced, odds = _replaced_last(evidence)
    gaps = np.asarray((evidence.listed[:, 1:] & ~evidence.listed[:, :-1]).any(axis=1))
    unordered = _unordered(evidence)
    patterns: dict[str, Bools] = {
        "duplicate ids": evidence.has_duplicates,
        "padding before the end": gaps,
        "ranks out of order": unordered,
        "sampled token missing": _missing(evidence),
        "entry against scalar, behavior": _entries(evidence, "behavior"),
        "entry against scalar, policy": _entries(evidence, "pre"),
        "sampled token replaces the last": replaced,
    }
    patterns = {name: rows for name, rows in patterns.items() if rows.any()}
    if not patterns:
        return None
    more: dict[str, Any] = {name: int(rows.sum()) for name, rows in patterns.items()}
    if replaced.any():
        more["log_odds_replaced"] = odds
    if unordered.any():
        more["sampled_first_among_these"] = float(evidence.sampled_slot[unordered, 0].mean())
    sure = 0.97 if any(not name.startswith("entry") for name in patterns) else 0.9
    if patterns.keys() == {"sampled token replaces the last"}:
        sure = 0.7
    rows = np.logical_or.reduce(list(patterns.values()))
    support = str(said(evidence.metadata.behavior, "support", "union"))
    return finding(sure, rows.sum(), rows.mean(), patterns=more, support=support)


def _unordered(evidence: Evidence) -> Bools:
    """Rows in which a later entry is likelier than an earlier one, fills aside."""
    skip = ~evidence.listed | evidence.fills["topk_behavior_logprobs"] | np.isnan(evidence.mu)
    lowest = np.minimum.accumulate(np.where(skip, np.inf, evidence.mu), axis=1)
    later = evidence.mu[:, 1:] > lowest[:, :-1] + evidence.metadata.logprob_tolerance
    return np.asarray((~skip[:, 1:] & later).any(axis=1))


def _missing(evidence: Evidence) -> Bools:
    """Rows that list an id less likely than the sampled token, and not the token."""
    used = evidence.listed & evidence.sound["topk_behavior_logprobs"]
    least = np.where(used, evidence.mu, np.inf).min(axis=1, initial=np.inf)
    scalar = np.where(evidence.fills["behavior_logprob"], np.nan, evidence.mu_token)
    room = 0.01 + evidence.metadata.logprob_tolerance
    rows = ~evidence.is_listed & np.isfinite(least) & (scalar > least + room)
    # An engine that leaves it out does so as a rule; a row or two may be anything.
    return np.asarray(rows & (rows.sum() >= max(3, 0.01 * len(evidence))))


def _entries(evidence: Evidence, side: str) -> Bools:
    """Rows whose sampled token has another log-prob in the list than by itself."""
    names = f"topk_{side}_logprobs", f"{side}_logprob"
    entry, known = evidence.entry(side)
    scalar = evidence.scalars[side]
    if side == "pre" and evidence.misplaced > 0.2:  # of another row, which `shift` tells
        return np.zeros(len(evidence), np.bool_)
    room = np.full(len(evidence), evidence.metadata.logprob_tolerance)
    # One of the two may have been rounded on its way: 8 bits of a bfloat16, 11 of a float16.
    if any(rounded_to(np.asarray(evidence.sample[name], np.float32).ravel()) for name in names):
        room = np.maximum(room, np.abs(np.where(np.isfinite(scalar), scalar, 0)) / 128)
    return known & evidence.sound[names[1]] & (np.abs(entry - scalar) > room)


def _replaced_last(evidence: Evidence) -> tuple[Bools, float]:
    """Rows in which the sampled token replaced the K-th, where the metadata says otherwise.

    Under a union the K-th is sampled with probability μ_K and an unlisted id with the tail's
    mass t; replacing, the last slot is sampled with probability μ_K + t and no other id is.
    """
    none = np.zeros(len(evidence), np.bool_)
    unlisted = evidence.has_list & ~evidence.is_listed
    if evidence.metadata.behavior.get("support") == "replaced-last":
        return unlisted, np.inf
    full = evidence.listed.all(axis=1) & np.isfinite(evidence.mu).all(axis=1)
    full &= ~evidence.fills["topk_behavior_logprobs"].any(axis=1)
    if evidence.ids.shape[1] < 2 or not full.any() or (unlisted & full).any():
        return none, 0.0
    last = np.exp(evidence.mu[:, -1])
    tail = np.maximum(1 - evidence.mass("behavior"), 0.0)
    hit = full & evidence.sampled_slot[:, -1]
    # Rows sampled elsewhere are as likely under both. Were the lists a union, odds this high
    # would come up by chance in at most one dump in 1 / odds (Markov's inequality).
    odds = float(np.log1p(tail[hit] / last[hit]).sum())
    # So many would have to be sampled from the tail; else μ is not what was sampled from.
    expected = float((tail + last)[full].sum())
    if hit.sum() < 2 or odds < LOG_ODDS or hit.sum() > 3 * expected + 1:
        return none, odds
    return hit, odds


@Cause(
    "impossible-values", 13, size="share of tokens",
    advice="Take log-probs from one log-softmax over the whole vocabulary; these are none.",
)  # fmt: skip
def impossible(evidence: Evidence) -> Finding | None:
    """Log-probs above 0, or lists whose mass exceeds 1."""
    room = evidence.metadata.logprob_tolerance
    rows = np.zeros(len(evidence), np.bool_)
    largest_log, largest_mass = 0.0, 0.0
    for side in SIDES:
        name, scalar = f"topk_{side}_logprobs", f"{side}_logprob"
        scalars, lists = evidence.sample[scalar], evidence.sample[name]
        used, alone = evidence.listed & evidence.sound[name], evidence.sound[scalar]
        if rounded_to(lists[used]) is not None or rounded_to(scalars) is not None:
            room = max(room, 0.05)
        above = np.where(used, lists, -np.inf).max(axis=1, initial=-np.inf) > room
        mass = evidence.mass(side)
        rows |= above | (alone & (scalars > room)) | (mass > 1 + room)
        largest_log = max(largest_log, float(np.where(alone, scalars, 0).max(initial=0)))
        largest_mass = max(largest_mass, float(mass.max(initial=0)))
    if not rows.any():
        return None
    return finding(
        0.6, rows.sum(), rows.mean(),
        largest_logprob=largest_log, largest_mass=largest_mass, tolerance=room,
    )  # fmt: skip


@Cause(
    "advantage", 11, size="value", needs="rows",
    advice="Follow the reward from the verifier to the batch: its spread within a prompt, the "
    "baseline, the division by a spread of 0, the mask's threshold.",
)  # fmt: skip
def advantage(evidence: Evidence) -> Finding | None:
    """The advantages teach nothing, or nothing is left in the loss."""
    sample, count = evidence.sample, len(evidence)
    values = sample["advantage"].astype(np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        return finding(0.99, bad.sum(), bad.mean(), pattern="not finite", rows=bad.sum())
    if count < FEWEST:
        return None
    for arm, in_loss in sample.in_loss.items():
        if not in_loss.any():
            mask = str(said(sample.masks.get(arm, {}), "mask", "none"))
            return finding(
                0.7 if sample.thinned else 0.9, count, 0.0,
                pattern="no token is in the loss", arm=arm, mask=mask,
            )  # fmt: skip
    groups, responses = len(np.unique(evidence.cluster)), len(np.unique(evidence.response))
    common = {"groups": groups, "responses": responses}
    if values.min() == values.max():
        return finding(
            0.98 if groups > 1 and responses > 3 else 0.6, count, values[0],
            pattern="constant" if values[0] else "zero everywhere", value=values[0], **common,
        )  # fmt: skip
    same, several = _within_groups(evidence, values)
    if several >= 5 and same == several:
        return finding(
            0.9, count, 1.0,
            pattern="the same for all responses of a prompt", prompts_judged=several, **common,
        )  # fmt: skip
    positive, negative = int((values > 0).sum()), int((values < 0).sum())
    if groups >= 3 and responses >= 20 and min(positive, negative) == 0:
        pattern = f"none is {'positive' if negative else 'negative'}: no baseline was taken off, "
        pattern += "or the sign was lost"
        return finding(
            0.95, count, values.mean(),
            pattern=pattern, positive=positive, negative=negative, mean=values.mean(), **common,
        )  # fmt: skip
    return None


def _within_groups(evidence: Evidence, values: Floats) -> tuple[int, int]:
    """Prompts whose responses all share one advantage that is not 0; prompts that can tell."""
    order = np.lexsort((evidence.response, evidence.cluster))
    cluster, response, values = evidence.cluster[order], evidence.response[order], values[order]
    starts = np.flatnonzero(np.r_[True, cluster[1:] != cluster[:-1]])
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    fresh = np.r_[True, response[1:] != response[:-1]]
    several = np.add.reduceat(fresh.astype(np.int64), starts) >= 3
    judged = several & ~((low == 0) & (high == 0))
    return int((judged & (low == high)).sum()), int(judged.sum())


@Cause(
    "concentration", 12, size="share of the masked", needs="tokens",
    advice="Look at these tokens in the report: a mask that always drops the deciding tokens stops "
    "learning where it matters; raise the threshold or see why their policies part.",
)  # fmt: skip
def concentration(evidence: Evidence) -> Finding | None:
    """The mask hits the same few tokens again and again."""
    sample = evidence.sample
    masks = {
        arm: ~in_loss
        for arm, in_loss in sample.in_loss.items()
        if arm in sample.masks and not in_loss.all()
    }
    if not masks:  # no masked arm: what the ratio rule would drop
        outside = evidence.divergence > DEFAULT_THRESHOLD
        away = sample["advantage"] * (evidence.pi_token - evidence.mu_token) > 0
        masks = {"ratio rule, recomputed": outside & away & evidence.usable_token}
    found = [each for arm, rows in masks.items() if (each := _concentrated(evidence, arm, rows))]
    return max(found, key=lambda each: each.confidence, default=None)


def _concentrated(evidence: Evidence, arm: str, masked: Bools) -> Finding | None:
    """The commonest ids among the masked tokens, against all tokens."""
    token, total = evidence.token, int(masked.sum())
    if len(token) < FEWEST or total < 10 or total == len(token):
        return None
    ids, counts = np.unique(token[masked], return_counts=True)
    chosen = ids[np.argsort(-counts, kind="stable")[:FEW_IDS]]
    few = np.isin(token, chosen)
    share, base = few[masked].mean(), few.mean()
    # Excess in standard errors over prompts: tokens of one prompt are masked together.
    excess = np.where(masked, few - base, 0.0)
    error = np.sqrt((np.bincount(evidence.cluster, weights=excess) ** 2).sum())
    score = excess.sum() / error if error > 0 else np.inf
    if share < 0.8 or share < 2 * base or base > 0.4 or score < 2.5:
        return None
    return finding(
        0.9 if share > 0.95 else 0.75, (few & masked).sum(), share,
        arm=arm, ids=chosen, masked=total, share_of_masked=share, share_of_all=base,
        effective_ids=1 / ((counts / total) ** 2).sum(), standard_errors=score,
    )  # fmt: skip
