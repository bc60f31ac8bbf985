"""Faults of whose distribution a row holds: misaligned rows, old weights, other models and ids.

Each function changes columns, whose rows are in the order of step, sequence and position, by
replacing arrays, never by writing into them, and returns the metadata. Ids outside the support
are modelled as `slots` says.
"""

from __future__ import annotations

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
    needs,
    normalised,
    read_at,
    refresh,
    relist,
)

_LONGEST_STRETCH: Final = 4.0
"""Nats by which an extrapolated log-prob moves at most."""


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


def rolled(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The policy's values are gathered in place and then stored d rows late in their sequence."""
    d = int(strength)
    begins = _begins(columns)
    index = np.arange(len(begins))
    first = np.maximum.accumulate(np.where(begins, index, 0))
    length = np.bincount(first, minlength=len(index))[first]
    columns["position"] = (index - first).astype(np.int32)
    source = first + (index - first - d) % length
    needs(int((source == index - d).sum()), f"a neighbor at distance {d}")
    _take_policies(columns, source)
    return metadata


def shuffled(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The policy's rows have come back in another order than the engine's."""
    _take_policies(columns, rng.permutation(len(columns["step"])))
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
    relist(columns)
    return metadata


def recomputed(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The trainer's own log-probs are taken for the engine's, lists and all."""
    columns["behavior_logprob"] = columns["pre_logprob"]
    columns["topk_behavior_logprobs"] = columns["topk_pre_logprobs"]
    relist(columns)
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
    habit = habit + rng.normal(0, 0.3, habit.shape) - 0.3  # it knows a little of the context
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
    _policies_at(columns, metadata, np.roll(np.arange(metadata.vocab_size), int(strength)), rng)
    return metadata


def concentrated(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The policies part at two ids alone, so that a mask hits these again and again."""
    slots = Slots.of(columns, metadata)
    # A token that is all but certain is no decision.
    undecided = (columns["behavior_logprob"] < -0.2) & (columns["advantage"] != 0)
    ids, counts = np.unique(columns["token_id"][undecided], return_counts=True)
    common = ids[np.argsort(-counts, kind="stable")][:2]
    chosen = (
        undecided & np.isin(columns["token_id"], common) & (rng.random(len(undecided)) < strength)
    )
    needs(int(chosen.sum()), "a sampled token that was undecided")
    mu, pre = slots.logs(columns, BEHAVIOR), slots.logs(columns, "pre")
    finite = slots.used & np.isfinite(mu)
    back = np.where(finite, 0.9 * (np.where(finite, mu, 0) - np.where(finite, pre, 0)), 0)
    push = 2.5 * np.sign(columns["advantage"]).astype(np.float64) * chosen
    _move_policies(columns, slots, back + np.where(slots.sampled, push[:, None], 0))
    return metadata


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


def _move_policies(columns: Columns, slots: Slots, move: Floats) -> None:
    """Move the policy's logits on S before and after the step alike, the tail with their mean."""
    for side in POLICIES:
        spread = slots.spread(columns, side)
        logs = slots.logs(columns, side)
        slots.store(columns, side, normalised(slots, logs + move, slots.tail(logs)))
        refresh(columns, slots, side, spread)


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


def _take_policies(columns: Columns, source: NDArray[np.intp]) -> None:
    """Each row's policies are its source's, slot by slot, where both have ids."""
    known = np.asarray((columns["topk_ids"] >= 0).all(axis=1))
    source = np.where(known & known[source], source, np.arange(len(source)))
    for side in POLICIES:
        for name in (
            f"{side}_logprob",
            f"topk_{side}_logprobs",
            f"{side}_collision",
            f"{side}_entropy",
        ):
            if name in columns:
                columns[name] = columns[name][source]


def _policies_at(
    columns: Columns, metadata: Metadata, meaning: NDArray[np.intp], rng: Generator
) -> None:
    """The policies' log-prob at id j is that of what j means to the trainer."""
    slots = Slots.of(columns, metadata)
    high = metadata.vocab_size - 1
    asked = np.where(slots.used, meaning[np.clip(slots.ids, 0, high)], -1)
    same = np.asarray((asked == slots.ids).all(axis=1))
    needs(int((~same).sum()), "an id that means another token")
    normal = rng.normal(size=slots.ids.shape)
    rows = np.arange(len(same))
    for side in POLICIES:
        logs = slots.logs(columns, side)
        drawn = Tail.of(slots, logs, slots.spread(columns, side)).draw(normal)
        found = read_at(slots, logs, rows, asked, drawn)
        slots.store(columns, side, np.where(same[:, None], logs, found))
