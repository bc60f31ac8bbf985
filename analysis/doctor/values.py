"""Causes that single values and the layout of the lists give away."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from .evidence import Evidence
from .fills import COLUMNS, IMPOSSIBLE, rounded_to
from .findings import Finding

_LOG_ODDS: Final = 4.6
"""Natural log of the odds at which a convention counts as seen: 100 to 1."""


def sentinel(evidence: Evidence) -> Finding | None:
    """Fills in the columns of log-probs: which value, where, how many."""
    if not evidence.fills:
        return None
    values = [name for each in evidence.fills.values() for name in each.values]
    if evidence.misplaced > 0.2 and not any(_is_telling(float(name)) for name in values):
        return None  # real log-probs that lie in other tokens' rows
    rows = np.zeros(len(evidence), np.bool_)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        found = evidence.fills.get(name)
        if found is None:
            continue
        rows |= found.rows
        columns[name] = {
            "values": found.values,
            "cells": int(found.cells.sum()),
            "rows": int(found.rows.sum()),
        }
    worst = max(columns, key=lambda name: int(columns[name]["rows"]))
    value, cells = next(iter(columns[worst]["values"].items()))
    count = int(rows.sum())
    return Finding(
        "sentinel",
        0.99 if count > 2 else 0.9,
        count,
        count / len(evidence),
        {"value": value, "column": worst, "cells": cells, "columns": columns},
    )


def _is_telling(value: float) -> bool:
    """Whether a value is no log-prob of any token, wherever it stands."""
    return not math.isfinite(value) or value <= IMPOSSIBLE or (value != 0 and value == round(value))


def ids_out_of_range(evidence: Evidence) -> Finding | None:
    """Ids that the vocabulary does not have, listed or sampled."""
    size = evidence.metadata.vocab_size
    listed = evidence.listed & ((evidence.ids >= size) | (evidence.ids < 0))
    sampled = (evidence.token >= size) | (evidence.token < 0)
    rows = listed.any(axis=1) | sampled
    if not rows.any():
        return None
    bad = np.concatenate([evidence.ids[listed], evidence.token[sampled]])
    mass = np.exp(np.where(listed, np.minimum(evidence.mu, 0), -np.inf)).sum(axis=1)
    return Finding(
        "vocabulary",
        0.97,
        int(rows.sum()),
        float(rows.mean()),
        {
            "pattern": "ids that the vocabulary does not have",
            "vocab_size": size,
            "largest_id": int(bad.max()),
            "smallest_id": int(bad.min()),
            "listed": int(listed.sum()),
            "sampled": int(sampled.sum()),
            "mean_mass_there": float(np.nanmean(mass[listed.any(axis=1)])) if listed.any() else 0.0,
        },
    )


def topk_convention(evidence: Evidence) -> Finding | None:
    """Lists that are not the ranked top-K ids with the sampled token's own entry."""
    patterns = {
        name: rows
        for name, rows in (
            ("duplicate ids", _duplicates(evidence)),
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
    return Finding(
        "topk-convention",
        0.7 if set(patterns) == {"sampled token replaces the last"} else 0.97 if sound else 0.9,
        int(rows.sum()),
        float(rows.mean()),
        {
            "patterns": found,
            "support": str(evidence.metadata.behavior.get("support", "union")),
        },
    )


def impossible(evidence: Evidence) -> Finding | None:
    """Log-probs above 0 and lists of mass above 1 that are neither fills nor rounding."""
    room = evidence.metadata.logprob_tolerance
    rows = np.zeros(len(evidence), np.bool_)
    largest_log, largest_mass = 0.0, 0.0
    for side, name, list_name in (
        ("mu", "behavior_logprob", "topk_behavior_logprobs"),
        ("pi", "pre_logprob", "topk_pre_logprobs"),
        ("post", "post_logprob", "topk_post_logprobs"),
    ):
        scalars = np.asarray(evidence.sample[name])
        lists = np.asarray(evidence.sample[list_name])
        used = evidence.listed & ~evidence.filled(list_name) & np.isfinite(lists)
        if rounded_to(lists[used]) is not None or rounded_to(scalars) is not None:
            room = max(room, 0.05)
        above = np.where(used, lists, -np.inf).max(axis=1, initial=-np.inf) > room
        alone = ~evidence.filled(name) & np.isfinite(scalars)
        above |= alone & (scalars > room)
        mass = evidence.mass(side)
        rows |= above | (mass > 1 + room)
        if len(evidence):
            largest_log = max(largest_log, float(np.where(alone, scalars, 0).max(initial=0)))
            largest_mass = max(largest_mass, float(mass.max(initial=0)))
    if not rows.any():
        return None
    return Finding(
        "impossible-values",
        0.6,
        int(rows.sum()),
        float(rows.mean()),
        {"largest_logprob": largest_log, "largest_mass": largest_mass, "tolerance": room},
    )


def _duplicates(evidence: Evidence) -> Any:
    """Rows that list an id twice."""
    ordered = np.sort(np.where(evidence.listed, evidence.ids, -1), axis=1)
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)


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
    skip = ~evidence.listed | evidence.filled("topk_behavior_logprobs") | ~np.isfinite(evidence.mu)
    least = np.where(skip, np.inf, evidence.mu).min(axis=1, initial=np.inf)
    scalar = np.where(evidence.filled("behavior_logprob"), np.nan, evidence.mu_token)
    room = 0.01 + evidence.metadata.logprob_tolerance
    with np.errstate(invalid="ignore"):
        rows = ~evidence.is_listed & np.isfinite(least) & (scalar > least + room)
    # An engine that leaves it out does so as a rule; a row or two may be anything.
    return rows & (rows.sum() >= max(3, 0.01 * len(evidence)))


def _entries(evidence: Evidence, side: str) -> Any:
    """Rows whose sampled token has another log-prob in the list than by itself."""
    name, scalar_name = f"topk_{side}_logprobs", f"{side}_logprob"
    lists = np.asarray(evidence.sample[name], dtype=np.float64)
    at = evidence.sampled_slot & ~evidence.filled(name) & np.isfinite(lists)
    entry = np.where(at, lists, -np.inf).max(axis=1, initial=-np.inf)
    scalar = np.asarray(evidence.sample[scalar_name], dtype=np.float64)
    room = evidence.metadata.logprob_tolerance * np.ones(len(evidence))
    # One of the two may have been rounded on its way: 8 bits of a bfloat16, 11 of a float16.
    kinds = {
        rounded_to(np.asarray(evidence.sample[each], dtype=np.float32).reshape(-1))
        for each in (name, scalar_name)
    }
    if kinds - {None}:
        room = np.maximum(room, np.abs(np.where(np.isfinite(scalar), scalar, 0)) / 128)
    usable = at.any(axis=1) & np.isfinite(scalar) & ~evidence.filled(scalar_name)
    with np.errstate(invalid="ignore"):
        return usable & (np.abs(entry - scalar) > room)


def _replaced_last(evidence: Evidence) -> tuple[Any, float]:
    """Rows in which the sampled token replaced the K-th, where the metadata says otherwise.

    Under a union the K-th is sampled with probability μ_K and an unlisted id with the tail's
    mass t; replacing, the last slot is sampled with probability μ_K + t and no other id is.
    """
    none = np.zeros(len(evidence), np.bool_)
    said = evidence.metadata.behavior.get("support", "union")
    unlisted = evidence.has_list & ~evidence.is_listed
    if said == "replaced-last":
        return unlisted, np.inf
    full = evidence.listed.all(axis=1) & np.isfinite(evidence.mu).all(axis=1)
    full &= ~evidence.filled("topk_behavior_logprobs").any(axis=1)
    if evidence.ids.shape[1] < 2 or not full.any() or (unlisted & full).any():
        return none, 0.0
    last = np.exp(evidence.mu[:, -1])
    tail = np.maximum(1 - evidence.mass_mu, 0.0)
    hit = full & evidence.sampled_slot[:, -1]
    # Rows sampled elsewhere are as likely under both. Were the lists a union, odds this high
    # would come up by chance in at most one dump in 1 / odds (Markov's inequality).
    odds = float(np.log1p(tail[hit] / last[hit]).sum())
    # So many would have to be sampled from the tail; else μ is not what was sampled from.
    expected = float((tail + last)[full].sum())
    if hit.sum() < 2 or odds < _LOG_ODDS or hit.sum() > 3 * expected + 1:
        return none, odds
    return hit, odds
