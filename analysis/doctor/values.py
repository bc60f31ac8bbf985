"""What single values and the layout of the lists give away."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from .evidence import IMPOSSIBLE, LOGPROBS, SIDES, Evidence, rounded_to, said
from .findings import Finding, cause

_LOG_ODDS: Final = 4.6
"""Natural log of the odds at which a convention counts as seen: 100 to 1."""


@cause(
    "sentinel", 1, size="share of tokens",
    advice="Treat this value as missing where the engine's answer is parsed: drop the entry (id "
    "−1) or the row, and let no trainer exponentiate it.",
    explains=frozenset({"impossible-values"}),
)  # fmt: skip
def sentinel(evidence: Evidence) -> Finding | None:
    """A number stands where a log-prob is missing."""
    if not evidence.fills:
        return None
    values = [name for each in evidence.fills.values() for name in each.values]
    if evidence.misplaced > 0.2 and not any(_is_telling(float(name)) for name in values):
        return None  # real log-probs that lie in other tokens' rows
    rows = np.zeros(len(evidence), np.bool_)
    columns: dict[str, Any] = {}
    for name in LOGPROBS:
        found = evidence.fills.get(name)
        if found is None:
            continue
        hit = found.cells.reshape(len(evidence), -1).any(axis=1)
        rows |= hit
        cells = int(found.cells.sum())
        columns[name] = {"values": found.values, "cells": cells, "rows": int(hit.sum())}
    worst = max(columns, key=lambda name: int(columns[name]["rows"]))
    value, cells = next(iter(columns[worst]["values"].items()))
    count = int(rows.sum())
    return Finding(
        "sentinel", 0.99 if count > 2 else 0.9, count, count / len(evidence),
        {"value": value, "column": worst, "cells": cells, "columns": columns},
    )  # fmt: skip


def _is_telling(value: float) -> bool:
    """Whether a value is no log-prob of any token, wherever it stands."""
    return not math.isfinite(value) or value <= IMPOSSIBLE or (value != 0 and value == round(value))


@cause(
    "topk-convention", 6, size="share of tokens",
    advice="Read the lists by id, not by place: drop duplicates, sort by log-prob, keep the "
    "sampled token's own entry, and set behavior.support in the metadata to what the engine does.",
    explains=frozenset({"impossible-values", "truncation"}),
)  # fmt: skip
def topk_convention(evidence: Evidence) -> Finding | None:
    """The lists are not the ranked top-K with the sampled token's own entry."""
    patterns = {
        name: rows
        for name, rows in (
            ("duplicate ids", evidence.has_duplicates),
            ("padding before the end", _gaps(evidence)),
            ("ranks out of order", _unordered(evidence)),
            ("sampled token missing", _missing(evidence)),
            ("entry against scalar, behavior", _entries(evidence, "behavior")),
            ("entry against scalar, policy", _entries(evidence, "pre")),
        )
        if rows.any() and not ("policy" in name and evidence.misplaced > 0.2)
    }
    replaced, odds = _replaced_last(evidence)
    if replaced.any():
        patterns["sampled token replaces the last"] = replaced
    if not patterns:
        return None
    rows = np.logical_or.reduce(list(patterns.values()))
    sound = {name for name in patterns if name.startswith("entry")} < set(patterns)
    found: dict[str, Any] = {name: int(each.sum()) for name, each in patterns.items()}
    if replaced.any():
        found["log_odds_replaced"] = odds
    first = evidence.sampled_slot[:, 0] if evidence.ids.shape[1] else np.zeros(0, np.bool_)
    if "ranks out of order" in patterns:
        found["sampled_first_among_these"] = float(first[patterns["ranks out of order"]].mean())
    sure = 0.7 if set(patterns) == {"sampled token replaces the last"} else 0.97 if sound else 0.9
    support = str(said(evidence.metadata.behavior, "support", "union"))
    return Finding(
        "topk-convention", sure, int(rows.sum()), float(rows.mean()),
        {"patterns": found, "support": support},
    )  # fmt: skip


@cause(
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
        scalars, lists = np.asarray(evidence.sample[scalar]), np.asarray(evidence.sample[name])
        used, alone = evidence.listed & evidence.sound(name), evidence.sound(scalar)
        if rounded_to(lists[used]) is not None or rounded_to(scalars) is not None:
            room = max(room, 0.05)
        above = np.where(used, lists, -np.inf).max(axis=1, initial=-np.inf) > room
        mass = evidence.mass(side)
        rows |= above | (alone & (scalars > room)) | (mass > 1 + room)
        largest_log = max(largest_log, float(np.where(alone, scalars, 0).max(initial=0)))
        largest_mass = max(largest_mass, float(mass.max(initial=0)))
    if not rows.any():
        return None
    return Finding(
        "impossible-values", 0.6, int(rows.sum()), float(rows.mean()),
        {"largest_logprob": largest_log, "largest_mass": largest_mass, "tolerance": room},
    )  # fmt: skip


def _gaps(evidence: Evidence) -> Any:
    """Rows with an id behind padding."""
    return (evidence.listed[:, 1:] & ~evidence.listed[:, :-1]).any(axis=1)


def _unordered(evidence: Evidence) -> Any:
    """Rows in which a later entry is likelier than an earlier one, fills aside."""
    skip = ~evidence.listed | evidence.filled("topk_behavior_logprobs") | np.isnan(evidence.mu)
    lowest = np.minimum.accumulate(np.where(skip, np.inf, evidence.mu), axis=1)
    room = evidence.metadata.logprob_tolerance
    with np.errstate(invalid="ignore"):
        return (~skip[:, 1:] & (evidence.mu[:, 1:] > lowest[:, :-1] + room)).any(axis=1)


def _missing(evidence: Evidence) -> Any:
    """Rows that list an id less likely than the sampled token, and not the token."""
    used = evidence.listed & evidence.sound("topk_behavior_logprobs")
    least = np.where(used, evidence.mu, np.inf).min(axis=1, initial=np.inf)
    scalar = np.where(evidence.filled("behavior_logprob"), np.nan, evidence.mu_token)
    room = 0.01 + evidence.metadata.logprob_tolerance
    with np.errstate(invalid="ignore"):
        rows = ~evidence.is_listed & np.isfinite(least) & (scalar > least + room)
    # An engine that leaves it out does so as a rule; a row or two may be anything.
    return rows & (rows.sum() >= max(3, 0.01 * len(evidence)))


def _entries(evidence: Evidence, side: str) -> Any:
    """Rows whose sampled token has another log-prob in the list than by itself."""
    names = f"topk_{side}_logprobs", f"{side}_logprob"
    entry, known = evidence.entry(side)
    scalar = evidence.logs(side)[1]
    room = np.full(len(evidence), evidence.metadata.logprob_tolerance)
    # One of the two may have been rounded on its way: 8 bits of a bfloat16, 11 of a float16.
    if any(rounded_to(np.asarray(evidence.sample[name], np.float32).ravel()) for name in names):
        room = np.maximum(room, np.abs(np.where(np.isfinite(scalar), scalar, 0)) / 128)
    with np.errstate(invalid="ignore"):
        return known & evidence.sound(names[1]) & (np.abs(entry - scalar) > room)


def _replaced_last(evidence: Evidence) -> tuple[Any, float]:
    """Rows in which the sampled token replaced the K-th, where the metadata says otherwise.

    Under a union the K-th is sampled with probability μ_K and an unlisted id with the tail's
    mass t; replacing, the last slot is sampled with probability μ_K + t and no other id is.
    """
    none = np.zeros(len(evidence), np.bool_)
    unlisted = evidence.has_list & ~evidence.is_listed
    if evidence.metadata.behavior.get("support") == "replaced-last":
        return unlisted, np.inf
    full = evidence.listed.all(axis=1) & np.isfinite(evidence.mu).all(axis=1)
    full &= ~evidence.filled("topk_behavior_logprobs").any(axis=1)
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
    if hit.sum() < 2 or odds < _LOG_ODDS or hit.sum() > 3 * expected + 1:
        return none, odds
    return hit, odds
