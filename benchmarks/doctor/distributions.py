"""Faults of whole distributions: temperature, truncation, misaligned rows, other models, noise.

Ids outside the stored lists are modelled as `rows` says.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.dumps import Metadata

from .fault import fault
from .rows import (
    BEHAVIOR,
    POLICIES,
    SIDES,
    Bools,
    Floats,
    NothingToBreakError,
    Rows,
    Slots,
    Tail,
    needs,
)

_LONGEST_STRETCH: Final = 4.0
"""Nats by which an extrapolated log-prob moves at most."""

# Temperature and truncation: a strength is the policy's τ relative to μ, or where the cut lies.


@fault(
    "temperature-behavior", "temperature", 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0,
    estimate=True,
)  # fmt: skip
def behavior_temperature(rows: Rows, strength: float) -> None:
    """The engine reports log-probs before its temperature: μ ∝ p^τ, so that π ∝ μ^(1/τ)."""
    slots = Slots(rows)
    tempered = slots.tempered(slots.logs(BEHAVIOR), strength, slots.spread(BEHAVIOR))
    slots.store(BEHAVIOR, tempered)


@fault(
    "temperature-policy", "temperature", 0.36, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0,
    estimate=True,
)  # fmt: skip
def policy_temperature(rows: Rows, strength: float) -> None:
    """The trainer divides its logits by τ once too often, or forgets to: π ∝ p^(1/τ)."""
    slots = Slots(rows)
    for side in POLICIES:
        spread = slots.spread(side)
        slots.store(side, slots.tempered(slots.logs(side), 1 / strength, spread))
        # A power of a log-normal tail is log-normal, its spread times the power squared.
        slots.refresh(side, spread / strength**2)


@fault("divided-logprobs", "temperature", 0.5, 0.7, 1.5, estimate=True)
def divided_logprobs(rows: Rows, strength: float) -> None:
    """The trainer divides log-probs by τ where it should have divided logits."""
    for side in POLICIES:
        for name in (f"{side}_logprob", f"topk_{side}_logprobs"):
            rows[name] = (rows[name] / strength).astype(np.float32)


@fault("top-p", "truncation", 0.7, 0.8, 0.9, 0.95, 0.99)
def top_p(rows: Rows, strength: float) -> None:
    """The engine samples from the nucleus and reports it renormalised, the rest as −∞."""
    _truncate(rows, *_nucleus(rows, strength))


@fault("top-p-absent", "truncation", 0.8, 0.9, 0.95)
def top_p_absent(rows: Rows, strength: float) -> None:
    """As `top_p`, with the ids that were cut left out of the lists."""
    top_p(rows, strength)
    rows.unlist(np.isneginf(rows["topk_behavior_logprobs"]) & (rows["topk_ids"] >= 0))
    rows.rerank()


@fault("top-p-raw", "truncation", 0.7, 0.8, 0.9)
def top_p_raw(rows: Rows, strength: float) -> None:
    """The engine samples from the nucleus and reports log-probs from before it was cut."""
    _resample(rows, _nucleus(rows, strength)[0])


@fault("top-k", "truncation", 2.0, 3.0, 5.0, 10.0, 20.0)
def top_k(rows: Rows, strength: float) -> None:
    """The engine samples from the k likeliest ids and reports them renormalised."""
    slots = Slots(rows)
    if strength > rows["topk_ids"].shape[1]:
        raise NothingToBreakError(f"lists must hold {strength:g} ids or more")
    survives = slots.used & (_rank(slots, slots.logs(BEHAVIOR)) < strength)
    survives[:, -1] = False  # not listed, so not among the first
    _truncate(rows, survives, np.zeros(len(rows)))


@fault("min-p", "truncation", 0.02, 0.05, 0.1, 0.2)
def min_p(rows: Rows, strength: float) -> None:
    """The engine cuts ids less likely than a share of the likeliest one, and renormalises."""
    slots = Slots(rows)
    logs = slots.logs(BEHAVIOR)
    survives = slots.used & (logs >= (np.log(strength) + logs.max(axis=1))[:, None])
    full = (survives | ~slots.used)[:, :-1].all(axis=1)
    _truncate(rows, survives, np.where(full, slots.tail(logs), 0.0))


@fault("policy-on-support", "truncation")
def policy_on_support(rows: Rows, strength: float) -> None:
    """The trainer gathers logits at the listed ids and normalises over these alone."""
    slots = Slots(rows)
    for side in POLICIES:
        slots.store(side, slots.normalised(slots.logs(side), 0.0))


def _rank(slots: Slots, logs: Floats) -> NDArray[np.intp]:
    """Rank of each slot by log-prob, from 0."""
    order = np.argsort(-np.where(slots.used, logs, -np.inf), axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable")


def _nucleus(rows: Rows, p: float) -> tuple[Bools, Floats]:
    """Slots of the smallest set of mass p or more, and what of the tail belongs to it."""
    slots = Slots(rows)
    logs = slots.logs(BEHAVIOR)
    probs = np.exp(np.minimum(logs, 0))
    rank = _rank(slots, logs)
    total = np.cumsum(np.take_along_axis(probs, np.argsort(rank, axis=1), axis=1), axis=1)
    before = np.concatenate([np.zeros((len(total), 1)), total[:, :-1]], axis=1)
    survives = slots.used & (np.take_along_axis(before, rank, axis=1) < p)
    # The sampled token, where it is not listed, lies somewhere in the tail.
    listed = probs[:, :-1].sum(axis=1)
    survives[:, -1] &= listed < p
    return survives, np.where(listed < p, np.maximum(p - probs.sum(axis=1), 0), 0.0)


def _truncate(rows: Rows, survives: Bools, rest: Floats) -> None:
    """Sample from the survivors alone, and renormalise μ over them and `rest` of the tail."""
    logs = rows["topk_behavior_logprobs"]
    cut = ~survives[:, :-1] & (rows["topk_ids"] >= 0)
    rows["topk_behavior_logprobs"] = np.where(cut, np.float32(-np.inf), logs)
    _resample(rows, survives)
    slots = Slots(rows)
    logs = slots.logs(BEHAVIOR)
    slots.store(BEHAVIOR, np.where(rows.stored[:, None], slots.normalised(logs, rest), logs))


def _resample(rows: Rows, survives: Bools) -> None:
    """Give rows whose sampled token was cut another one, from the survivors by their μ."""
    slots = Slots(rows)
    uniform = rows.rng.random(len(rows))
    lost = ~(survives & slots.sampled).any(axis=1) & rows.stored
    weight = np.where((survives & slots.used)[:, :-1], np.exp(slots.logs(BEHAVIOR)[:, :-1]), 0.0)
    total = np.cumsum(weight, axis=1)
    slot = (total < uniform[:, None] * total[:, -1:]).sum(axis=1)
    at = np.arange(len(slot)), np.minimum(slot, weight.shape[1] - 1)
    token = np.where(lost, rows["topk_ids"][at], rows["token_id"])
    if "token" in rows.columns:
        texts = dict(zip(rows["token_id"].tolist(), rows["token"].tolist(), strict=True))
        rows["token"] = np.asarray([texts.get(each, "") for each in token.tolist()], object)
    rows["token_id"] = token.astype(np.int32)
    for side in SIDES:
        listed = rows[f"topk_{side}_logprobs"][at]
        rows[f"{side}_logprob"] = np.where(lost, listed, rows[f"{side}_logprob"])


# Misaligned rows: a strength is the number of positions d.


@fault("shift", "shift", 1.0, -1.0, 2.0, -2.0, estimate=True)
def shift(rows: Rows, strength: float) -> None:
    """The policy's row at t holds the distribution of t − d within its sequence.

    Rows at the edge get the distribution of a row from elsewhere. What a thinned dump stores of
    a sequence is taken for all of it, and its positions are counted anew.
    """
    index, first = np.arange(len(rows)), rows.first
    rows["position"] = (index - first).astype(np.int32)
    wanted = index - int(strength)
    inside = (wanted >= 0) & (wanted < len(index))
    inside &= first[np.clip(wanted, 0, len(index) - 1)] == first
    needs(inside, f"a neighbor at distance {int(strength)}")
    _policies_from(rows, np.where(inside, wanted, rows.rng.permutation(len(index))))


@fault("rolled", "shift", 1.0, -1.0, 2.0, estimate=True)
def rolled(rows: Rows, strength: float) -> None:
    """The policy's values are gathered in place and then stored d rows late in their sequence."""
    index, first = np.arange(len(rows)), rows.first
    length = np.bincount(first, minlength=len(index))[first]
    rows["position"] = (index - first).astype(np.int32)
    source = first + (index - first - int(strength)) % length
    needs(source == index - int(strength), f"a neighbor at distance {int(strength)}")
    _take_policies(rows, source)


@fault("shift-start", "shift", -1.0, 1.0, -2.0)
def shift_start(rows: Rows, strength: float) -> None:
    """A template or BOS/EOS token too many: the first |d| rows of a response are misaligned."""
    index, first = np.arange(len(rows)), rows.first
    at_start = rows["position"] < abs(int(strength))
    needs(at_start, "a beginning of a response")
    wanted = np.clip(index - int(strength), 0, len(index) - 1)
    moved = np.where(first[wanted] == first, wanted, rows.rng.permutation(len(index)))
    _policies_from(rows, np.where(at_start, moved, index))


# Other weights, models and tokenizers.


@fault("recomputed", "recomputed", thin=False)
def recomputed(rows: Rows, strength: float) -> None:
    """The trainer's own log-probs are taken for the engine's, lists and all."""
    recomputed_scalar(rows, strength)
    rows["topk_behavior_logprobs"] = rows["topk_pre_logprobs"]
    rows.relist()


@fault("recomputed-scalar", "recomputed")
def recomputed_scalar(rows: Rows, strength: float) -> None:
    """The sampled token's log μ is the trainer's own, next to lists that are the engine's."""
    rows["behavior_logprob"] = rows["pre_logprob"]


@fault("stale", "stale", 2.0, 4.0, 8.0)
def stale(rows: Rows, strength: float) -> None:
    """μ is of older weights: log μ + c (log μ − log π), c up to the strength at the last step."""
    slots = Slots(rows)
    mu, pi = slots.logs(BEHAVIOR), slots.logs("pre")
    step = np.unique(rows["step"], return_inverse=True)[1].reshape(-1)
    growth = strength * (step + 1) / (step.max(initial=0) + 1)
    finite = slots.used & np.isfinite(mu)
    move = np.where(finite, mu - pi, 0)
    needs(np.abs(move).max(axis=1) > 1e-3, "a difference of μ and π")
    mu_tail, pi_tail = slots.tail(mu), slots.tail(pi)
    tail_move = np.where((mu_tail > 0) & (pi_tail > 0), np.log(mu_tail / pi_tail), 0.0)
    tail = mu_tail * np.exp(_limited(growth * tail_move))
    slots.store(BEHAVIOR, slots.normalised(mu + _limited(growth[:, None] * move), tail))
    rows.relist()


@fault("other-model", "other-model", 1.5, 2.5)
def other_model(rows: Rows, strength: float) -> None:
    """The trainer's logits differ by σ nats, by a habit of each id and by the context."""
    slots, size = Slots(rows), rows.metadata.vocab_size
    habit = _fixed(rows.metadata).normal(size=size)[np.clip(slots.ids, 0, size - 1)]
    _move_policies(slots, (habit + rows.rng.normal(size=habit.shape)) * strength / np.sqrt(2))


@fault("other-context", "other-model")
def other_context(rows: Rows, strength: float) -> None:
    """The trainer reads another prompt: its rows are those of another group's responses."""
    position, group = rows["position"], rows["group"]
    order = np.lexsort((rows.rng.random(len(rows)), position))
    source = np.arange(len(order))
    # Within the rows of a position, each takes that of one half a turn away.
    for each in np.unique(position):
        mine = order[position[order] == each]
        source[mine] = np.roll(mine, len(mine) // 2)
    needs(group[source] != group, "another group's response of the same length")
    _policies_from(rows, source)


@fault("shuffled", "other-model")
def shuffled(rows: Rows, strength: float) -> None:
    """The policy's rows have come back in another order than the engine's."""
    _take_policies(rows, rows.rng.permutation(len(rows)))


@fault("weaker-model", "other-model", 0.5, 0.8)
def weaker_model(rows: Rows, strength: float) -> None:
    """The trainer holds a model that knows less: π mixed with how often ids are sampled."""
    slots, size = Slots(rows), rows.metadata.vocab_size
    counts = np.bincount(rows["token_id"], minlength=size) + 0.02
    habit = np.log(counts / counts.sum())[np.clip(slots.ids, 0, size - 1)]
    habit = habit + rows.rng.normal(0, 0.3, habit.shape) - 0.3  # it knows a little of the context
    for side in POLICIES:
        mixed = np.logaddexp(np.log1p(-strength) + slots.logs(side), np.log(strength) + habit)
        slots.store(side, np.where(slots.used, np.minimum(mixed, 0), -np.inf))
        slots.refresh(side, slots.spread(side))


@fault("permuted-ids", "vocabulary", 0.3, 0.6, 1.0)
def permuted_ids(rows: Rows, strength: float) -> None:
    """Another tokenizer on the trainer's side: a share of the ids mean other tokens there."""
    fixed, meaning = _fixed(rows.metadata), np.arange(rows.metadata.vocab_size)
    moved = np.flatnonzero(fixed.random(len(meaning)) < strength)
    meaning[moved] = fixed.permutation(moved)
    _policies_at(rows, meaning)


@fault("offset-ids", "vocabulary", 1.0, 2.0)
def offset_ids(rows: Rows, strength: float) -> None:
    """A token added on one side only: the trainer's ids are so many further."""
    _policies_at(rows, np.roll(np.arange(rows.metadata.vocab_size), int(strength)))


@fault("concentrated", "concentration", 0.8, 1.0, thin=False)
def concentrated(rows: Rows, strength: float) -> None:
    """The policies part at two ids alone, so that a mask hits these again and again."""
    slots, token = Slots(rows), rows["token_id"]
    # A token that is all but certain is no decision.
    undecided = (rows["behavior_logprob"] < -0.2) & (rows["advantage"] != 0)
    ids, counts = np.unique(token[undecided], return_counts=True)
    common = ids[np.argsort(-counts, kind="stable")][:2]
    chosen = undecided & np.isin(token, common) & (rows.rng.random(len(rows)) < strength)
    needs(chosen, "a sampled token that was undecided")
    mu, pre = slots.logs(BEHAVIOR), slots.logs("pre")
    back = np.where(slots.used & np.isfinite(mu), 0.9 * (mu - pre), 0)
    push = 2.5 * np.sign(rows["advantage"]).astype(np.float64) * chosen
    _move_policies(slots, back + np.where(slots.sampled, push[:, None], 0))


# Precision: a strength is σ in nats, unless said otherwise.


@fault("fp32-engine", None, 5e-6, 1e-4, thin=False)
@fault("engine-noise", "precision", 0.04, 0.1, 0.25, thin=False)
def engine_noise(rows: Rows, strength: float) -> None:
    """Engine and trainer hold the same weights, at a precision that moves logits by σ nats."""
    _same_weights(rows, np.full(len(rows), strength))


@fault("behavior-noise", "precision", 0.2, 0.5)
def behavior_noise(rows: Rows, strength: float) -> None:
    """The engine's precision moves its logits, next to a policy that has moved on."""
    slots = Slots(rows)
    logs = slots.logs(BEHAVIOR)
    noise = strength * rows.rng.normal(size=logs.shape)
    slots.store(BEHAVIOR, slots.normalised(logs + noise, slots.tail(logs)))
    rows.relist()


@fault("outliers", "precision", 0.02, 0.05, thin=False)
def outliers(rows: Rows, strength: float) -> None:
    """A share of tokens takes another route through experts: 1.5 nats there, bf16 elsewhere."""
    flipped = rows.some(np.ones(len(rows), bool), strength)
    rows.declare(precision="bfloat16")
    _same_weights(rows, np.where(flipped, 1.5, 0.03))


@fault("drift-by-position", "precision", 0.3, 0.6, thin=False)
def drift_by_position(rows: Rows, strength: float) -> None:
    """A cache gathers errors: σ grows from bf16's to the strength along the response."""
    rows.declare(precision="bfloat16")
    position = rows["position"] / max(1, int(rows["position"].max(initial=0)))
    _same_weights(rows, 0.03 + strength * position)


@fault("rounded-logits", "precision", 15.0, 30.0)
def rounded_logits(rows: Rows, strength: float) -> None:
    """The engine rounds logits as large as the strength to bfloat16 before its log-softmax."""
    slots = Slots(rows)
    logs = slots.logs(BEHAVIOR)
    top = strength * rows.rng.uniform(0.8, 1.2, len(logs)) - logs.max(axis=1)
    logits = to_bfloat16(logs + top[:, None])
    slots.store(BEHAVIOR, slots.normalised(logits, slots.tail(logs) * np.exp(top)))
    rows.relist()


@fault("rounded-logprobs", "precision", 1.0, 2.0)
def rounded_logprobs(rows: Rows, strength: float) -> None:
    """The engine's log-probs travel in half precision: bfloat16 at strength 1, float16 at 2."""
    for name in ("behavior_logprob", "topk_behavior_logprobs"):
        values = rows[name]
        rounded = values.astype(np.float16) if strength == 2 else to_bfloat16(values)
        rows[name] = rounded.astype(np.float32)


@fault("bf16-engine", None, 0.02, 0.03, thin=False)
def bf16_engine(rows: Rows, strength: float) -> None:
    """A bfloat16 engine next to a float32 trainer of the same weights, and it says so."""
    rows.declare(precision="bfloat16")
    engine_noise(rows, strength)


@fault("declared-rounding", None, 20.0)
def declared_rounding(rows: Rows, strength: float) -> None:
    """The engine rounds its logits to bfloat16, and the metadata says bfloat16."""
    rows.declare(precision="bfloat16")
    rounded_logits(rows, strength)


def to_bfloat16(values: NDArray[np.floating]) -> Floats:
    """Round to bfloat16, ties to even."""
    single = np.asarray(values, np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isfinite(single), rounded.view(np.float32), single).astype(np.float64)


def _same_weights(rows: Rows, sigma: Floats) -> None:
    """The policy is μ with noise on its logits; what the step did to it is kept."""
    slots = Slots(rows)
    mu, pre, post = (slots.logs(side) for side in SIDES)
    noise = rows.rng.normal(size=mu.shape) * sigma[:, None]
    drift = np.where(slots.used, post - pre, 0)
    tail = slots.tail(mu) * np.exp(0.5 * sigma * rows.rng.normal(size=len(mu)))
    finite = slots.used & np.isfinite(mu)
    agreed = slots.normalised(np.where(finite, mu, np.minimum(pre, -20.0)) + noise, tail)
    rest = np.maximum(1 - np.exp(np.minimum(agreed, 0)).sum(axis=1), 0)
    moved = slots.normalised(agreed + drift, rest)
    still = ~drift.any(axis=1, keepdims=True)
    for side, stored in (("pre", agreed), ("post", np.where(still, agreed, moved))):
        spread = slots.spread(side)
        slots.store(side, stored)
        slots.refresh(side, spread)


def _fixed(metadata: Metadata) -> Generator:
    """Random numbers that are the same in every file of a dump: a tokenizer has no seed."""
    return np.random.default_rng(metadata.vocab_size)


def _limited(move: Floats) -> Floats:
    """Moves in nats, the largest bent back."""
    return np.asarray(_LONGEST_STRETCH * np.tanh(move / _LONGEST_STRETCH))


def _move_policies(slots: Slots, move: Floats) -> None:
    """Move the policy's logits on S before and after the step alike, the tail with their mean."""
    for side in POLICIES:
        spread, logs = slots.spread(side), slots.logs(side)
        slots.store(side, slots.normalised(logs + move, slots.tail(logs)))
        slots.refresh(side, spread)


def _policies_from(rows: Rows, source: NDArray[np.intp]) -> None:
    """Each row's policies are those of its source, read at the row's own ids."""
    slots = Slots(rows)
    normal = rows.rng.normal(size=slots.ids.shape)
    still = (source == np.arange(len(source)))[:, None]
    for side in POLICIES:
        logs, spread = slots.logs(side), slots.spread(side)
        drawn = Tail(slots, logs, spread).draw(np.zeros((1, 1)))[source]
        drawn = drawn + np.sqrt(spread)[source, None] * normal
        slots.store(side, np.where(still, logs, slots.read(logs, source, slots.ids, drawn)))
        for name in (f"{side}_collision", f"{side}_entropy"):
            if name in rows.columns:
                rows[name] = rows[name][source]


def _take_policies(rows: Rows, source: NDArray[np.intp]) -> None:
    """Each row's policies are its source's, slot by slot, where both lists are full."""
    full = np.asarray((rows["topk_ids"] >= 0).all(axis=1))
    source = np.where(full & full[source], source, np.arange(len(source)))
    for name in rows.columns:
        if name.removeprefix("topk_").startswith(("pre_", "post_")):
            rows[name] = rows[name][source]


def _policies_at(rows: Rows, meaning: NDArray[np.intp]) -> None:
    """The policies' log-prob at id j is that of what j means to the trainer."""
    slots = Slots(rows)
    asked = np.where(slots.used, meaning[np.clip(slots.ids, 0, len(meaning) - 1)], -1)
    same = (asked == slots.ids).all(axis=1, keepdims=True)
    needs(~same, "an id that means another token")
    normal = rows.rng.normal(size=slots.ids.shape)
    for side in POLICIES:
        logs = slots.logs(side)
        drawn = Tail(slots, logs, slots.spread(side)).draw(normal)
        found = slots.read(logs, np.arange(len(rows)), asked, drawn)
        slots.store(side, np.where(same, logs, found))
