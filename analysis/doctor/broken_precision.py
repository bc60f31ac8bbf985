"""Faults of precision: noise of engine and trainer, rounding, outliers.

Each function changes columns, whose rows are in the order of step, sequence and position, by
replacing arrays, never by writing into them, and returns the metadata. Ids outside the support
are modelled as `slots` says.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.dumps import Metadata

from .slots import (
    BEHAVIOR,
    POLICIES,
    Columns,
    Floats,
    Slots,
    normalised,
    refresh,
    relist,
    some_rows,
)


def engine_noise(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Engine and trainer hold the same weights, at a precision that moves logits by σ nats."""
    return _same_weights(columns, metadata, np.full(len(columns["token_id"]), strength), rng)


def behavior_noise(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The engine's precision moves its logits by σ nats, beside a policy that has moved on."""
    slots = Slots.of(columns, metadata)
    logs = slots.logs(columns, BEHAVIOR)
    noise = strength * rng.normal(size=logs.shape)
    slots.store(columns, BEHAVIOR, normalised(slots, logs + noise, slots.tail(logs)))
    relist(columns)
    return metadata


def outliers(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A share of tokens takes another route through experts: 1.5 nats there, bf16 elsewhere."""
    flipped = some_rows(rng, np.ones(len(columns["token_id"]), bool), strength)
    metadata = declared(metadata, "bfloat16")
    return _same_weights(columns, metadata, np.where(flipped, 1.5, 0.03), rng)


def drift_by_position(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """An error that a cache gathers: σ grows from bf16's to `strength` along the response."""
    position = columns["position"] / max(1, int(columns["position"].max(initial=0)))
    metadata = declared(metadata, "bfloat16")
    return _same_weights(columns, metadata, 0.03 + strength * position, rng)


def rounded_logits(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The engine rounds logits as large as `strength` to bfloat16 before its log-softmax."""
    slots = Slots.of(columns, metadata)
    logs = slots.logs(columns, BEHAVIOR)
    top = strength * rng.uniform(0.8, 1.2, len(logs)) - logs.max(axis=1)
    logits = to_bfloat16(logs + top[:, None])
    tail = slots.tail(logs) * np.exp(top)
    slots.store(columns, BEHAVIOR, normalised(slots, logits, tail))
    relist(columns)
    return metadata


def rounded_logprobs(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The engine's log-probs travel in half precision: bfloat16, or float16 at strength 2."""
    for name in ("behavior_logprob", "topk_behavior_logprobs"):
        values = columns[name]
        rounded = values.astype(np.float16) if strength == 2 else to_bfloat16(values)
        columns[name] = rounded.astype(np.float32)
    return metadata


def to_bfloat16(values: NDArray[np.floating]) -> Floats:
    """Round to bfloat16, ties to even."""
    single = np.asarray(values, np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isfinite(single), rounded.view(np.float32), single).astype(np.float64)


def declared(metadata: Metadata, precision: str) -> Metadata:
    """Metadata of an engine that says it runs at this precision."""
    return dataclasses.replace(metadata, behavior={**metadata.behavior, "precision": precision})


def _same_weights(columns: Columns, metadata: Metadata, sigma: Floats, rng: Generator) -> Metadata:
    """The policy is μ with noise on its logits; what the step did to it is kept."""
    slots = Slots.of(columns, metadata)
    mu, pre, post = (slots.logs(columns, side) for side in (BEHAVIOR, *POLICIES))
    finite = slots.used & np.isfinite(mu)
    noise = rng.normal(size=mu.shape) * sigma[:, None]
    drift = np.where(slots.used, np.where(slots.used, post, 0) - np.where(slots.used, pre, 0), 0)
    tail = slots.tail(mu) * np.exp(0.5 * sigma * rng.normal(size=len(mu)))
    agreed = normalised(slots, np.where(finite, mu, np.minimum(pre, -20.0)) + noise, tail)
    for side, logits in (("pre", agreed), ("post", agreed + drift)):
        spread = slots.spread(columns, side)
        rest = np.maximum(1 - np.exp(np.minimum(agreed, 0)).sum(axis=1), 0)
        stored = agreed if side == "pre" else normalised(slots, logits, rest)
        slots.store(columns, side, np.where(drift.any(axis=1, keepdims=True), stored, agreed))
        refresh(columns, slots, side, spread)
    return metadata
