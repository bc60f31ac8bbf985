"""Faults of what the engine samples from and reports: temperature and truncation.

Each function changes columns, whose rows are in the order of step, sequence and position, by
replacing arrays, never by writing into them, and returns the metadata. Ids outside the support
are modelled as `slots` says.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.dumps import Metadata

from .slots import (
    BEHAVIOR,
    POLICIES,
    Columns,
    Floats,
    NothingToBreakError,
    Slots,
    normalised,
    refresh,
    rerank,
    tempered,
)


def behavior_temperature(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The engine reports log-probs before its temperature: μ ∝ p^τ, so that π ∝ μ^(1/τ)."""
    slots = Slots.of(columns, metadata)
    spread = slots.spread(columns, BEHAVIOR)
    logs = slots.logs(columns, BEHAVIOR)
    slots.store(columns, BEHAVIOR, tempered(slots, logs, strength, spread))
    return metadata


def policy_temperature(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The trainer divides its logits by τ once too often, or forgets to: π ∝ p^(1/τ)."""
    slots = Slots.of(columns, metadata)
    for side in POLICIES:
        spread = slots.spread(columns, side)
        logs = slots.logs(columns, side)
        slots.store(columns, side, tempered(slots, logs, 1 / strength, spread))
        # A power of a log-normal tail is log-normal, its spread times the power squared.
        refresh(columns, slots, side, spread / strength**2)
    return metadata


def divided_logprobs(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The trainer divides log-probs by τ where it should have divided logits."""
    for side in POLICIES:
        for name in (f"{side}_logprob", f"topk_{side}_logprobs"):
            columns[name] = (columns[name] / strength).astype(np.float32)
    return metadata


def top_p(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The engine samples from the nucleus and reports it renormalised, the rest as −∞."""
    _truncate(columns, metadata, *_nucleus(columns, metadata, strength), rng)
    return metadata


def top_p_absent(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """As `top_p`, with the ids that were cut left out of the lists."""
    _truncate(columns, metadata, *_nucleus(columns, metadata, strength), rng)
    cut = np.isneginf(columns["topk_behavior_logprobs"]) & (columns["topk_ids"] >= 0)
    columns["topk_ids"] = np.where(cut, -1, columns["topk_ids"]).astype(np.int32)
    for side in (BEHAVIOR, *POLICIES):
        name = f"topk_{side}_logprobs"
        columns[name] = np.where(cut, np.float32(np.nan), columns[name])
    rerank(columns)
    return metadata


def top_p_raw(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The engine samples from the nucleus and reports log-probs from before it was cut."""
    survives, _ = _nucleus(columns, metadata, strength)
    _resample(columns, metadata, survives, rng)
    return metadata


def top_k(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The engine samples from the k likeliest ids and reports them renormalised."""
    slots = Slots.of(columns, metadata)
    rank = _rank(slots, slots.logs(columns, BEHAVIOR))
    if strength > columns["topk_ids"].shape[1]:
        raise NothingToBreakError(f"lists must hold {strength:g} ids or more")
    survives = slots.used & (rank < strength)
    survives[:, -1] = False  # not listed, so not among the first
    _truncate(columns, metadata, survives, np.zeros(len(rank)), rng)
    return metadata


def min_p(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The engine cuts ids less likely than a share of the likeliest one, and renormalises."""
    slots = Slots.of(columns, metadata)
    logs = slots.logs(columns, BEHAVIOR)
    limit = np.log(strength) + logs.max(axis=1)
    survives = slots.used & (logs >= limit[:, None])
    full = np.where(slots.used[:, :-1], survives[:, :-1], True).all(axis=1)
    _truncate(columns, metadata, survives, np.where(full, slots.tail(logs), 0.0), rng)
    return metadata


def policy_on_support(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The trainer gathers logits at the listed ids and normalises over these alone."""
    slots = Slots.of(columns, metadata)
    zero = np.zeros(len(slots.size))
    for side in POLICIES:
        slots.store(columns, side, normalised(slots, slots.logs(columns, side), zero))
    return metadata


def _rank(slots: Slots, logs: Floats) -> NDArray[np.intp]:
    """Rank of each slot by log-prob, from 0."""
    order = np.argsort(-np.where(slots.used, logs, -np.inf), axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable")


def _nucleus(columns: Columns, metadata: Metadata, p: float) -> tuple[NDArray[np.bool_], Floats]:
    """Slots of the smallest set of mass p or more, and what of the tail belongs to it."""
    slots = Slots.of(columns, metadata)
    logs = slots.logs(columns, BEHAVIOR)
    probs = np.exp(np.minimum(logs, 0))
    rank = _rank(slots, logs)
    order = np.argsort(rank, axis=1)
    total = np.cumsum(np.take_along_axis(probs, order, axis=1), axis=1)
    before = np.concatenate([np.zeros((len(total), 1)), total[:, :-1]], axis=1)
    survives = slots.used & (np.take_along_axis(before, rank, axis=1) < p)
    # The sampled token, where it is not listed, lies somewhere in the tail.
    listed = probs[:, :-1].sum(axis=1)
    survives[:, -1] &= listed < p
    rest = np.where(listed < p, np.maximum(p - probs.sum(axis=1), 0), 0.0)
    return survives, rest


def _truncate(
    columns: Columns,
    metadata: Metadata,
    survives: NDArray[np.bool_],
    rest: Floats,
    rng: Generator,
) -> None:
    """Sample from the survivors alone, and renormalise μ over them and `rest` of the tail."""
    columns["topk_behavior_logprobs"] = np.where(
        survives[:, :-1] | (columns["topk_ids"] < 0),
        columns["topk_behavior_logprobs"],
        np.float32(-np.inf),
    )
    _resample(columns, metadata, survives, rng)
    slots = Slots.of(columns, metadata)
    kept = normalised(slots, slots.logs(columns, BEHAVIOR), rest)
    known = _known(columns)[:, None]
    slots.store(columns, BEHAVIOR, np.where(known, kept, slots.logs(columns, BEHAVIOR)))


def _known(columns: Columns) -> NDArray[np.bool_]:
    """Rows whose vectors are stored."""
    return np.asarray((columns["topk_ids"] >= 0).any(axis=1))


def _resample(
    columns: Columns, metadata: Metadata, survives: NDArray[np.bool_], rng: Generator
) -> None:
    """Give rows whose sampled token was cut another one, from the survivors by their μ."""
    slots = Slots.of(columns, metadata)
    logs = slots.logs(columns, BEHAVIOR)
    uniform = rng.random(len(logs))
    lost = ~(survives & slots.sampled).any(axis=1) & _known(columns)
    weight = np.where(survives[:, :-1] & slots.used[:, :-1], np.exp(logs[:, :-1]), 0.0)
    total = np.cumsum(weight, axis=1)
    slot = (total < uniform[:, None] * total[:, -1:]).sum(axis=1)
    slot = np.minimum(slot, weight.shape[1] - 1)
    rows = np.arange(len(slot))
    token = np.where(lost, columns["topk_ids"][rows, slot], columns["token_id"])
    if "token" in columns:
        texts = dict(zip(columns["token_id"].tolist(), columns["token"].tolist(), strict=True))
        columns["token"] = np.asarray([texts.get(each, "") for each in token.tolist()], object)
    columns["token_id"] = token.astype(np.int32)
    for side in (BEHAVIOR, *POLICIES):
        listed = columns[f"topk_{side}_logprobs"][rows, slot]
        name = f"{side}_logprob"
        columns[name] = np.where(lost, listed, columns[name]).astype(np.float32)
