"""Faults of the distributions: what one side says of all ids is not what the other meant.

Each function changes columns, whose rows are in the order of step, sequence and position, by
replacing arrays, never by writing into them, and returns the metadata. It imitates how the
numbers come about in an engine or a trainer; ids outside the support are modelled as `slots`
says.
"""

from __future__ import annotations

import dataclasses
from typing import Final

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
    Tail,
    normalised,
    read_at,
    refresh,
    rerank,
    tempered,
)

_FEWEST_ROWS: Final = 3
"""Rows that a fault must reach to be one."""

_LONGEST_STRETCH: Final = 4.0
"""Nats by which an extrapolated log-prob moves at most."""


class NothingToBreakError(ValueError):
    """The rows do not hold what the fault would change."""


def needs(rows: int, what: str) -> None:
    """Refuse to call unchanged rows broken."""
    if rows < _FEWEST_ROWS:
        raise NothingToBreakError(f"{what} in at least {_FEWEST_ROWS} rows, found {rows}")


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


def shift(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The policy's row at t holds the distribution of t − d within its sequence.

    Rows at the edge get the distribution of a row from elsewhere. What a thinned dump stores of
    a sequence is taken for all of it, and its positions are counted anew.
    """
    d = int(strength)
    begins = _begins(columns)
    index = np.arange(len(begins))
    first = np.maximum.accumulate(np.where(begins, index, 0))
    columns["position"] = (index - first).astype(np.int32)
    wanted = index - d
    inside = (wanted >= 0) & (wanted < len(index))
    inside &= first[np.clip(wanted, 0, len(index) - 1)] == first
    needs(int(inside.sum()), f"a neighbor at distance {d}")
    source = np.where(inside, wanted, rng.permutation(len(index)))
    _policies_from(columns, metadata, source, rng)
    return metadata


def shift_start(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A template or BOS/EOS token too many: the first |d| rows of a response are misaligned."""
    d = int(strength)
    begins = _begins(columns)
    index = np.arange(len(begins))
    first = np.maximum.accumulate(np.where(begins, index, 0))
    at_start = columns["position"] < abs(d)
    needs(int(at_start.sum()), "a beginning of a response")
    wanted = np.clip(index - d, 0, len(index) - 1)
    elsewhere = rng.permutation(len(index))
    moved = np.where(first[wanted] == first, wanted, elsewhere)
    source = np.where(at_start, moved, index)
    _policies_from(columns, metadata, source, rng)
    return metadata


def stale(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """μ is of weights further back, the more so the later the step: log μ + c (log μ − log π)."""
    slots = Slots.of(columns, metadata)
    mu, pi = slots.logs(columns, BEHAVIOR), slots.logs(columns, "pre")
    step = np.unique(columns["step"], return_inverse=True)[1].reshape(-1)
    growth = strength * (step + 1) / (step.max(initial=0) + 1)
    finite = slots.used & np.isfinite(mu)
    move = np.where(finite, np.where(finite, mu, 0) - np.where(finite, pi, 0), 0)
    needs(int((np.abs(move).max(axis=1) > 1e-3).sum()), "a difference of μ and π")
    mu_tail, pi_tail = slots.tail(mu), slots.tail(pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail_move = np.where((mu_tail > 0) & (pi_tail > 0), np.log(mu_tail / pi_tail), 0.0)
    tail = mu_tail * np.exp(_limited(growth * tail_move))
    slots.store(columns, BEHAVIOR, normalised(slots, mu + _limited(growth[:, None] * move), tail))
    rerank(columns)
    return metadata


def recomputed(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The trainer's own log-probs are taken for the engine's, lists and all."""
    columns["behavior_logprob"] = columns["pre_logprob"]
    columns["topk_behavior_logprobs"] = columns["topk_pre_logprobs"]
    rerank(columns)
    return metadata


def recomputed_scalar(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The sampled token's log μ is the trainer's own, beside lists that are the engine's."""
    columns["behavior_logprob"] = columns["pre_logprob"]
    return metadata


def other_model(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The trainer holds another model: its logits differ by a habit an id and by the context."""
    slots = Slots.of(columns, metadata)
    habit = _rng_of(metadata).normal(size=metadata.vocab_size)
    ids = np.clip(slots.ids, 0, metadata.vocab_size - 1)
    noise = (habit[ids] + rng.normal(size=slots.ids.shape)) * strength / np.sqrt(2)
    _move_policies(columns, slots, noise)
    return metadata


def other_context(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The trainer reads another prompt: its rows are those of another group's responses."""
    groups = np.stack([columns["position"], columns["group"]], axis=1)
    order = np.lexsort((rng.random(len(groups)), groups[:, 0]))
    source = np.arange(len(order))
    # Within the rows of a position, each takes that of one half a turn away.
    place = columns["position"][order]
    for position in np.unique(place):
        mine = order[place == position]
        source[mine] = np.roll(mine, len(mine) // 2)
    affected = columns["group"][source] != columns["group"]
    needs(int(affected.sum()), "another group's response of the same length")
    _policies_from(columns, metadata, source, rng)
    return metadata


def weaker_model(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The trainer holds a model that knows less: π mixed with how often ids are sampled."""
    slots = Slots.of(columns, metadata)
    counts = np.bincount(columns["token_id"], minlength=metadata.vocab_size) + 0.02
    habit = np.log(counts / counts.sum())[np.clip(slots.ids, 0, metadata.vocab_size - 1)]
    for side in POLICIES:
        logs = slots.logs(columns, side)
        mixed = np.logaddexp(np.log1p(-strength) + logs, np.log(strength) + habit)
        slots.store(columns, side, np.where(slots.used, np.minimum(mixed, 0), -np.inf))
        refresh(columns, slots, side, slots.spread(columns, side))
    return metadata


def permuted_ids(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Another tokenizer on the trainer's side: a share of the ids mean other tokens there."""
    n = metadata.vocab_size
    fixed = _rng_of(metadata)
    moved = np.flatnonzero(fixed.random(n) < strength)
    meaning = np.arange(n)
    meaning[moved] = fixed.permutation(moved)
    _policies_at(columns, metadata, meaning, rng)
    return metadata


def offset_ids(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A token added on one side only: the trainer's ids are one further from some id on."""
    meaning = np.arange(metadata.vocab_size)
    _policies_at(columns, metadata, np.maximum(meaning - int(strength), 0), rng)
    return metadata


def engine_noise(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Engine and trainer hold the same weights, at a precision that moves logits by σ nats."""
    return _same_weights(columns, metadata, np.full(len(columns["token_id"]), strength), rng)


def outliers(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """A share of tokens takes another route through experts: 1.5 nats there, bf16 elsewhere."""
    rows = len(columns["token_id"])
    flipped = rng.random(rows) < strength
    needs(int(flipped.sum()), "a token routed otherwise")
    metadata = _declared(metadata, "bfloat16")
    return _same_weights(columns, metadata, np.where(flipped, 1.5, 0.03), rng)


def drift_by_position(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """An error that a cache gathers: σ grows from bf16's to `strength` along the response."""
    position = columns["position"] / max(1, int(columns["position"].max(initial=0)))
    metadata = _declared(metadata, "bfloat16")
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
    rerank(columns)
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


def concentrated(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The policies part at two ids alone, so that a mask hits these again and again."""
    slots = Slots.of(columns, metadata)
    ids, counts = np.unique(columns["token_id"], return_counts=True)
    common = ids[np.argsort(-counts, kind="stable")][1:3]
    chosen = np.isin(columns["token_id"], common) & (rng.random(len(slots.size)) < strength)
    needs(int(chosen.sum()), "a sampled token among the commonest")
    mu, pre = slots.logs(columns, BEHAVIOR), slots.logs(columns, "pre")
    finite = slots.used & np.isfinite(mu)
    back = np.where(finite, 0.9 * (np.where(finite, mu, 0) - np.where(finite, pre, 0)), 0)
    push = 2.5 * np.sign(columns["advantage"]).astype(np.float64) * chosen
    _move_policies(columns, slots, back + np.where(slots.sampled, push[:, None], 0))
    return metadata


def to_bfloat16(values: NDArray[np.floating]) -> Floats:
    """Round to bfloat16, ties to even."""
    single = np.asarray(values, np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isfinite(single), rounded.view(np.float32), single).astype(np.float64)


def _declared(metadata: Metadata, precision: str) -> Metadata:
    """Metadata of an engine that says it runs at this precision."""
    return dataclasses.replace(metadata, behavior={**metadata.behavior, "precision": precision})


def _rng_of(metadata: Metadata) -> Generator:
    """Random numbers that are the same in every file of a dump: a tokenizer has no seed."""
    return np.random.default_rng(metadata.vocab_size)


def _begins(columns: Columns) -> NDArray[np.bool_]:
    """Rows that begin a sequence."""
    step, sequence = columns["step"], columns["sequence"]
    begins = np.ones(len(step), bool)
    begins[1:] = (step[1:] != step[:-1]) | (sequence[1:] != sequence[:-1])
    return begins


def _limited(move: Floats) -> Floats:
    """Moves in nats, the largest bent back."""
    return np.asarray(_LONGEST_STRETCH * np.tanh(move / _LONGEST_STRETCH))


def _rank(slots: Slots, logs: Floats) -> NDArray[np.intp]:
    """Rank of each slot by log-prob, from 0."""
    order = np.argsort(-np.where(slots.used, logs, -np.inf), axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable")


def _nucleus(
    columns: Columns, metadata: Metadata, p: float
) -> tuple[NDArray[np.bool_], Floats]:
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


def _move_policies(columns: Columns, slots: Slots, move: Floats) -> None:
    """Move the policy's logits on S before and after the step alike, the tail with their mean."""
    for side in POLICIES:
        spread = slots.spread(columns, side)
        logs = slots.logs(columns, side)
        slots.store(columns, side, normalised(slots, logs + move, slots.tail(logs)))
        refresh(columns, slots, side, spread)


def _same_weights(
    columns: Columns, metadata: Metadata, sigma: Floats, rng: Generator
) -> Metadata:
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
        slots.store(columns, side, np.where(drift.any(axis=1)[:, None], stored, agreed))
        refresh(columns, slots, side, spread)
    return metadata


def _policies_from(
    columns: Columns, metadata: Metadata, source: NDArray[np.intp], rng: Generator
) -> None:
    """Each row's policies are those of its source, read at the row's own ids."""
    slots = Slots.of(columns, metadata)
    normal = rng.normal(size=slots.ids.shape)
    changed = source != np.arange(len(source))
    for side in POLICIES:
        logs = slots.logs(columns, side)
        drawn = Tail.of(slots, logs, slots.spread(columns, side)).draw(np.zeros((1, 1)))
        sigma = np.sqrt(slots.spread(columns, side))[source, None]
        found = read_at(slots, logs, source, slots.ids, drawn[source] + sigma * normal)
        slots.store(columns, side, np.where(changed[:, None], found, logs))
        for moment in ("collision", "entropy"):
            name = f"{side}_{moment}"
            if name in columns:
                columns[name] = columns[name][source]


def _policies_at(
    columns: Columns, metadata: Metadata, meaning: NDArray[np.intp], rng: Generator
) -> None:
    """The policies' log-prob at id j is that of what j means to the trainer."""
    slots = Slots.of(columns, metadata)
    high = metadata.vocab_size - 1
    asked = np.where(slots.used, meaning[np.clip(slots.ids, 0, high)], -1)
    same = (asked == slots.ids).all(axis=1)
    needs(int((~same).sum()), "an id that means another token")
    normal = rng.normal(size=slots.ids.shape)
    rows = np.arange(len(same))
    for side in POLICIES:
        logs = slots.logs(columns, side)
        drawn = Tail.of(slots, logs, slots.spread(columns, side)).draw(normal)
        found = read_at(slots, logs, rows, asked, drawn)
        slots.store(columns, side, np.where(same[:, None], logs, found))
