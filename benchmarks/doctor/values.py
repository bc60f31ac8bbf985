"""Faults of single values and conventions: fills, lists laid out otherwise, advantages, masks.

And changes that leave a dump sound: what differs between healthy runs and must raise no alarm.
A strength is a share of rows, unless said otherwise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from deltad.dumps import OPTIONAL, Metadata

from .fault import Change, divergence, fault
from .rows import BEHAVIOR, ENTRIES, POLICIES, Bools, NothingToBreakError, Rows, needs

_SHARES: Final = (0.005, 0.05, 0.5, 1.0)

_TELLING: Final = 0.01
"""A fill nearer than this to the true value would change nothing."""


def _fill(value: float, *sides: str, lists: bool) -> Change:
    """Make a fault: the sampled token's log-prob, and with `lists` its row's, is a placeholder."""

    def change(rows: Rows, strength: float) -> None:
        gap = np.abs(rows[f"{sides[0]}_logprob"] - value)
        filled = rows.some(~(gap < _TELLING), strength)
        for side in sides:
            scalar, name = f"{side}_logprob", f"topk_{side}_logprobs"
            rows[scalar] = np.where(filled, np.float32(value), rows[scalar])
            if lists:
                wanted = filled[:, None] & (rows["topk_ids"] >= 0)
                rows[name] = np.where(wanted, np.float32(value), rows[name])

    return change


def _fill_rest(value: float) -> Change:
    """Make a fault: the engine gave fewer log-probs than K, and the rest of the list is filled."""

    def change(rows: Rows, strength: float) -> None:
        ids = rows["topk_ids"]
        short = rows.some((ids >= 0).sum(axis=1) > 2, strength)
        top_k = ids.shape[1]
        given = rows.rng.integers(top_k // 2, top_k, len(ids))
        rest = short[:, None] & (np.arange(top_k)[None, :] >= given[:, None]) & (ids >= 0)
        rest &= ids != rows["token_id"][:, None]
        logs = rows["topk_behavior_logprobs"]
        rows["topk_behavior_logprobs"] = np.where(rest, np.float32(value), logs)

    return change


for _name, _change in {
    "zero-scalar": _fill(0.0, BEHAVIOR, lists=False),
    "zero-row": _fill(0.0, BEHAVIOR, lists=True),
    "one-scalar": _fill(1.0, BEHAVIOR, lists=False),
    "zero-policy": _fill(0.0, *POLICIES, lists=False),
    "minus-100-scalar": _fill(-100.0, BEHAVIOR, lists=False),
    "minus-9999-row": _fill(-9999.0, BEHAVIOR, lists=True),
    "minus-9999-rest": _fill_rest(-9999.0),
    "zero-rest": _fill_rest(0.0),
    "minus-1e30-scalar": _fill(-1e30, BEHAVIOR, lists=False),
    "nan-row": _fill(np.nan, BEHAVIOR, lists=True),
    "minus-inf-row": _fill(-np.inf, BEHAVIOR, lists=True),
    "zero-policy-row": _fill(0.0, *POLICIES, lists=True),
    "minus-inf-policy": _fill(-np.inf, *POLICIES, lists=True),
}.items():
    fault(_name, "sentinel", *_SHARES)(_change)


@fault("minus-9999-unlikely", "sentinel", 0.05, 0.3, 0.6)
def fill_unlikely(rows: Rows, strength: float) -> None:
    """A share of the entries, the least likely, is −9999, as servers write −∞ in JSON."""
    logs = rows["topk_behavior_logprobs"]
    unlikely = (rows["topk_ids"] >= 0) & ~rows.hit & np.isfinite(logs)
    if unlikely.any():
        unlikely &= logs < np.quantile(logs[unlikely], strength)
    needs(unlikely, "an entry other than the sampled token's")
    rows["topk_behavior_logprobs"] = np.where(unlikely, np.float32(-9999), logs)


@fault("padded-vocabulary", "vocabulary", 0.01, 0.1, 0.5)
def padded_vocabulary(rows: Rows, strength: float) -> None:
    """Rows of the head beyond the tokenizer's ids have mass: ids ≥ n are listed, and sampled."""
    ids, token = rows["topk_ids"], rows["token_id"]
    listed = (ids >= 0).sum(axis=1)
    chosen = rows.some(listed > 1, strength)
    slot = rows.rng.integers(min(1, ids.shape[1] - 1), ids.shape[1], len(ids))
    slot = np.minimum(slot, np.maximum(listed - 1, 0))
    beyond = rows.metadata.vocab_size + rows.rng.integers(0, 64, len(ids))
    hit = (np.arange(ids.shape[1])[None, :] == slot[:, None]) & chosen[:, None]
    was_sampled = (hit & (ids == token[:, None])).any(axis=1)
    rows["topk_ids"] = np.where(hit, beyond[:, None], ids).astype(np.int32)
    rows["token_id"] = np.where(was_sampled, beyond, token).astype(np.int32)


@fault("duplicated", "topk-convention", 0.05, 1.0)
def duplicated(rows: Rows, strength: float) -> None:
    """The sampled token stands before the list, which holds it already."""
    _put_first(rows, rows.some(rows.hit[:, :-1].any(axis=1), strength), drop=False)


@fault("sampled-first", "topk-convention")
def sampled_first(rows: Rows, strength: float) -> None:
    """The sampled token stands first, whatever its rank."""
    later = ~rows.hit[:, 0] & rows.stored
    needs(later, "a sampled token that is not the likeliest")
    _put_first(rows, rows.some(later, strength), drop=True)


@fault("replaced-last", "topk-convention", least=10)
def replaced_last(rows: Rows, strength: float) -> None:
    """The sampled token takes the K-th's place, and the metadata says union."""
    alone = ~rows.hit.any(axis=1) & rows.stored
    needs(alone, "a sampled token outside the top-K")
    top_k = rows["topk_ids"].shape[1]
    last = (np.arange(top_k) == top_k - 1)[None, :] & alone[:, None]
    for name, scalar in ENTRIES:
        rows[name] = np.where(last, rows[scalar][:, None], rows[name])


@fault("appended", "topk-convention")
def appended(rows: Rows, strength: float) -> None:
    """The sampled token is appended as a (K+1)-th, whether or not it is listed."""
    stored = rows.stored[:, None]
    for name, scalar in ENTRIES:
        absent = np.asarray(-1 if name == "topk_ids" else np.nan, rows[name].dtype)
        last = np.where(stored, rows[scalar][:, None], absent)
        rows[name] = np.concatenate([rows[name], last], axis=1).astype(rows[name].dtype)
    rows.describe(top_k=rows.metadata.top_k + 1)


@fault("left-out", "topk-convention")
def left_out(rows: Rows, strength: float) -> None:
    """The list holds the alternatives alone, so the sampled token is never in it."""
    needs(rows.hit, "a listed sampled token")
    rows.unlist(rows.hit)
    rows.rerank()


@fault("out-of-order", "topk-convention", 0.05, 1.0)
def out_of_order(rows: Rows, strength: float) -> None:
    """Lists come in no order, as top-k without sorting gives them."""
    used = rows["topk_ids"] >= 0
    chosen = rows.some(used.sum(axis=1) > 2, strength)
    order = np.argsort(np.where(used, rows.rng.random(used.shape), 2.0), axis=1)
    rows.reorder(np.where(chosen[:, None], order, np.arange(used.shape[1])[None, :]))


@fault("ascending", "topk-convention")
def ascending(rows: Rows, strength: float) -> None:
    """Lists come from the least likely to the likeliest, as an ascending sort gives them."""
    used = rows["topk_ids"] >= 0
    needs(used.sum(axis=1) > 1, "a list")
    place = np.arange(used.shape[1])[None, :]
    rows.reorder(np.argsort(np.where(used, -place, place + used.shape[1]), axis=1))


def _put_first(rows: Rows, chosen: Bools, *, drop: bool) -> None:
    """Put the sampled token first; with `drop` its old entry makes room, else the K-th does."""
    hit = rows.hit
    if hit.shape[1] < 2:
        raise NothingToBreakError("lists must hold 2 ids or more")
    place = np.arange(hit.shape[1])[None, :]
    out = np.where(hit.any(axis=1, keepdims=True) & drop, hit, place == hit.shape[1] - 1)
    order = np.argsort(np.where(out, -1, place), axis=1, kind="stable")  # the free slot first
    for name, scalar in ENTRIES:
        moved = np.take_along_axis(rows[name], order, axis=1)
        moved[:, 0] = rows[scalar]
        rows[name] = np.where(chosen[:, None], moved, rows[name])


# Advantages and masks: a strength is an advantage, a reward, or a share of groups.


@fault("zero-advantage", "advantage", 0.0)
@fault("constant-advantage", "advantage", 1.0, -0.5)
def constant_advantage(rows: Rows, strength: float) -> None:
    """Every token has the same advantage."""
    rows["advantage"] = np.full(len(rows), strength, np.float32)


@fault("raw-rewards", "advantage", 1.0, 10.0)
def raw_rewards(rows: Rows, strength: float) -> None:
    """Rewards without a baseline: 0 or the strength, so that no advantage is negative."""
    positive = rows["advantage"] > 0
    needs(positive, "a positive advantage")
    rows["advantage"] = (strength * positive).astype(np.float32)


@fault("unsigned-advantage", "advantage")
def unsigned_advantage(rows: Rows, strength: float) -> None:
    """Advantages have lost their sign."""
    needs(rows["advantage"] < 0, "a negative advantage")
    rows["advantage"] = np.abs(rows["advantage"])


@fault("nan-advantage", "advantage", 0.05, 0.3, 1.0)
def nan_advantage(rows: Rows, strength: float) -> None:
    """A group of equal rewards is divided by its spread of 0: NaN in a share of groups."""
    hit = _some_of(rows, "group", strength)
    rows["advantage"] = np.where(hit, np.float32(np.nan), rows["advantage"])


@fault("everything-masked", "concentration", also=("advantage",), decides=False)
def everything_masked(rows: Rows, strength: float) -> None:
    """The mask drops every token."""
    rows["in_loss"] = np.zeros(len(rows), bool)


# Changes that leave a dump sound.


@fault("untouched", None, 0.0)
def untouched(rows: Rows, strength: float) -> None:
    """The dump as it is."""


@fault("some-groups", None, 0.5, 0.8)
def some_groups(rows: Rows, strength: float) -> None:
    """A share of the prompts with all their responses."""
    _keep(rows, _some_of(rows, "group", strength))


@fault("some-steps", None, 0.5)
def some_steps(rows: Rows, strength: float) -> None:
    """A share of the optimizer steps."""
    _keep(rows, _some_of(rows, "step", strength))


@fault("thinned", None, 0.02, 0.05, 0.15)
def thinned(rows: Rows, strength: float) -> None:
    """Only rows with D above the strength are stored, as long recordings do."""
    above, stored = np.zeros(len(rows), bool), rows.stored
    above[stored] = divergence(rows, "kl") > strength
    if rows.metadata.stored_above is not None:
        strength = max(strength, rows.metadata.stored_above[1])
    needs(above, f"D > {strength:g}")
    seen = max(rows.metadata.rows_seen, len(rows))
    rows.columns.update({name: values[above] for name, values in rows.columns.items()})
    rule = {"rule": "above", "divergence": "kl", "threshold": strength}
    rows.describe(stored=rule, rows_seen=seen)


@fault("without-vectors", None, 0.3, 0.8)
def without_vectors(rows: Rows, strength: float) -> None:
    """The top-K log-probs of a share of rows were not stored."""
    rows.unlist((rows.rng.random(len(rows)) < strength)[:, None])


@fault("without-optional", None, 0.0)
def without_optional(rows: Rows, strength: float) -> None:
    """No optional column was recorded."""
    for name in OPTIONAL:
        rows.columns.pop(name, None)


@fault("without-metadata", None, 0.0)
def without_metadata(rows: Rows, strength: float) -> None:
    """The metadata holds what it must and nothing else but the update."""
    needed = ("top_k", "vocab_size", "temperature", "stored", "rows_seen", "update")
    rows.metadata = Metadata(**{name: getattr(rows.metadata, name) for name in needed})


@fault("declared-replacing", None, 0.0)
def declared_replacing(rows: Rows, strength: float) -> None:
    """The sampled token takes the K-th's place, and the metadata says so."""
    replaced_last(rows, strength)
    rows.declare(support="replaced-last")


@fault("fewer-listed", None, 0.3)
def fewer_listed(rows: Rows, strength: float) -> None:
    """The engine returned fewer ids, and padded the lists with −1."""
    top_k = rows["topk_ids"].shape[1]
    short = rows.rng.random(len(rows)) < strength
    given = rows.rng.integers(max(1, top_k // 2), top_k + 1, len(rows))
    rows.unlist(short[:, None] & (np.arange(top_k)[None, :] >= given[:, None]))


@fault("some-zero-advantages", None, 0.2)
def some_zero(rows: Rows, strength: float) -> None:
    """Groups whose responses were all right or all wrong: Â is 0 there."""
    chance = rows.rng.random(int(rows["group"].max(initial=0)) + 1)
    zero = chance[rows["group"]] < strength
    rows["advantage"] = np.where(zero, np.float32(0), rows["advantage"])


@fault("other-advantages", None, 0.1, 5.0)
def scaled_advantages(rows: Rows, strength: float) -> None:
    """Advantages in another unit: times the strength."""
    rows["advantage"] = (strength * rows["advantage"]).astype(np.float32)


def _some_of(rows: Rows, by: str, share: float) -> Bools:
    """The rows of a share of the values of a column."""
    found = np.unique(rows[by])
    chosen = found[rows.rng.permutation(len(found))[: max(1, round(share * len(found)))]]
    return np.isin(rows[by], chosen)


def _keep(rows: Rows, kept: Bools) -> None:
    """Keep some rows, as if the others had not been recorded."""
    seen = round(rows.metadata.rows_seen * kept.sum() / max(1, len(kept)))
    rows.columns.update({name: values[kept] for name, values in rows.columns.items()})
    rows.describe(rows_seen=max(seen, int(kept.sum())))
