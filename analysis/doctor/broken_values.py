"""Faults of single values and of conventions: fills, lists laid out otherwise, advantages.

As in `broken_sampling`, arrays are replaced and never written into; the rows are in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.dumps import Metadata

from .slots import BEHAVIOR, POLICIES, Columns, NothingToBreakError, needs, rerank, some_rows

Change = Callable[[Columns, Metadata, float, Generator], Metadata]

_SIDES: Final = (BEHAVIOR, *POLICIES)

_ENTRIES: Final = (
    ("topk_ids", "token_id"),
    *((f"topk_{side}_logprobs", f"{side}_logprob") for side in _SIDES),
)
"""Each list and the column that holds the sampled token's value."""

_TELLING: Final = 0.01
"""A fill nearer than this to the true value would change nothing."""


def fill_scalar(value: float, *sides: str) -> Change:
    """Make a fault: the sampled token's log-prob is a placeholder in a share of rows."""

    def fault(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
        rows = _telling(columns, sides[0], value, strength, rng)
        for side in sides:
            name = f"{side}_logprob"
            columns[name] = np.where(rows, np.float32(value), columns[name])
        return metadata

    fault.__doc__ = f"The sampled token's log-prob is {value:g} in a share of rows."
    return fault


def fill_row(value: float, *sides: str) -> Change:
    """Make a fault: a row's list and scalar are placeholders in a share of rows."""

    def fault(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
        rows = _telling(columns, sides[0], value, strength, rng)
        for side in sides:
            scalar, listed = f"{side}_logprob", f"topk_{side}_logprobs"
            columns[scalar] = np.where(rows, np.float32(value), columns[scalar])
            wanted = rows[:, None] & (columns["topk_ids"] >= 0)
            columns[listed] = np.where(wanted, np.float32(value), columns[listed])
        return metadata

    fault.__doc__ = f"All log-probs of a row, the list and the scalar, are {value:g}."
    return fault


def fill_rest(value: float) -> Change:
    """Make a fault: the engine gave fewer log-probs than K, and the rest of the list is filled."""

    def fault(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
        ids = columns["topk_ids"]
        rows = some_rows(rng, (ids >= 0).sum(axis=1) > 2, strength)
        top_k = ids.shape[1]
        given = rng.integers(top_k // 2, top_k, len(ids))
        rest = rows[:, None] & (np.arange(top_k)[None, :] >= given[:, None]) & (ids >= 0)
        rest &= ids != columns["token_id"][:, None]
        columns["topk_behavior_logprobs"] = np.where(
            rest, np.float32(value), columns["topk_behavior_logprobs"]
        )
        return metadata

    fault.__doc__ = f"The engine gave fewer log-probs than K, and the rest of a list is {value:g}."
    return fault


def fill_unlikely(value: float) -> Change:
    """Make a fault: the least likely entries are placeholders, as servers write −∞ in JSON."""

    def fault(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
        logs = columns["topk_behavior_logprobs"]
        unlikely = (columns["topk_ids"] >= 0) & ~_listed(columns) & np.isfinite(logs)
        if unlikely.any():
            unlikely &= logs < np.quantile(logs[unlikely], strength)
        needs(int(unlikely.any(axis=1).sum()), "an entry beside the sampled token's")
        columns["topk_behavior_logprobs"] = np.where(unlikely, np.float32(value), logs)
        return metadata

    fault.__doc__ = f"The least likely entries are {value:g}, as servers write −∞ in JSON."
    return fault


def padded_vocabulary(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """Rows of the head beyond the tokenizer's ids have mass: ids ≥ n are listed, and sampled."""
    ids, token = columns["topk_ids"], columns["token_id"]
    rows = some_rows(rng, (ids >= 0).sum(axis=1) > 1, strength)
    last = np.maximum((ids >= 0).sum(axis=1) - 1, 0)
    slot = np.minimum(rng.integers(min(1, ids.shape[1] - 1), ids.shape[1], len(ids)), last)
    beyond = metadata.vocab_size + rng.integers(0, 64, len(ids))
    hit = (np.arange(ids.shape[1])[None, :] == slot[:, None]) & rows[:, None]
    was_sampled = (hit & (ids == token[:, None])).any(axis=1)
    columns["topk_ids"] = np.where(hit, beyond[:, None], ids).astype(np.int32)
    columns["token_id"] = np.where(was_sampled, beyond, token).astype(np.int32)
    return metadata


def duplicated(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The sampled token stands before the list, which holds it already."""
    _lay_out(columns, some_rows(rng, _listed(columns)[:, :-1].any(axis=1), strength), drop=False)
    return metadata


def sampled_first(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The sampled token stands first, whatever its rank."""
    later = ~_listed(columns)[:, 0] & (columns["topk_ids"] >= 0).any(axis=1)
    needs(int(later.sum()), "a sampled token that is not the likeliest")
    _lay_out(columns, some_rows(rng, later, strength), drop=True)
    return metadata


def replaced_last(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The sampled token takes the K-th's place, and the metadata says union."""
    ids = columns["topk_ids"]
    alone = np.asarray(~_listed(columns).any(axis=1) & (ids >= 0).any(axis=1))
    needs(int(alone.sum()), "a sampled token outside the top-K")
    last = (np.arange(ids.shape[1]) == ids.shape[1] - 1)[None, :] & alone[:, None]
    for name, scalar in _ENTRIES:
        columns[name] = np.where(last, columns[scalar][:, None], columns[name])
    return metadata


def appended(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The sampled token is appended as a (K+1)-th, whether or not it is listed."""
    known = (columns["topk_ids"] >= 0).any(axis=1, keepdims=True)
    for name, scalar in _ENTRIES:
        absent = np.asarray(-1 if name == "topk_ids" else np.nan, columns[name].dtype)
        last = np.where(known, columns[scalar][:, None], absent)
        columns[name] = np.concatenate([columns[name], last], axis=1).astype(columns[name].dtype)
    return dataclasses.replace(metadata, top_k=metadata.top_k + 1)


def left_out(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """The list holds the alternatives alone, so the sampled token is never in it."""
    hit = _listed(columns)
    needs(int(hit.any(axis=1).sum()), "a listed sampled token")
    columns["topk_ids"] = np.where(hit, -1, columns["topk_ids"]).astype(np.int32)
    for side in _SIDES:
        name = f"topk_{side}_logprobs"
        columns[name] = np.where(hit, np.float32(np.nan), columns[name])
    rerank(columns)
    return metadata


def out_of_order(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Lists come in no order, as top-k without sorting gives them, in a share of rows."""
    ids = columns["topk_ids"]
    used = ids >= 0
    rows = some_rows(rng, used.sum(axis=1) > 2, strength)
    keys = np.where(used, rng.random(ids.shape), 2.0)
    order = np.where(rows[:, None], np.argsort(keys, axis=1), np.arange(ids.shape[1])[None, :])
    _reorder(columns, order)
    return metadata


def ascending(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Lists come from the least likely to the likeliest, as an ascending sort gives them."""
    used = columns["topk_ids"] >= 0
    needs(int((used.sum(axis=1) > 1).sum()), "a list")
    place = np.arange(used.shape[1])[None, :]
    keys = np.where(used, -place, place + used.shape[1])
    _reorder(columns, np.argsort(keys, axis=1))
    return metadata


def constant_advantage(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """Every token has the same advantage."""
    return _with_advantage(columns, metadata, np.full(len(columns["advantage"]), strength))


def raw_rewards(columns: Columns, metadata: Metadata, strength: float, rng: Generator) -> Metadata:
    """Rewards without a baseline: 0 or `strength`, so that no advantage is negative."""
    needs(int((columns["advantage"] > 0).sum()), "a positive advantage")
    return _with_advantage(columns, metadata, strength * (columns["advantage"] > 0))


def unsigned_advantage(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """Advantages have lost their sign."""
    needs(int((columns["advantage"] < 0).sum()), "a negative advantage")
    return _with_advantage(columns, metadata, np.abs(columns["advantage"]))


def nan_advantage(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """A group of equal rewards is divided by its spread of 0: NaN in a share of groups."""
    groups = np.unique(columns["group"])
    bad = groups[rng.permutation(len(groups))[: max(1, round(strength * len(groups)))]]
    hit = np.isin(columns["group"], bad)
    return _with_advantage(columns, metadata, np.where(hit, np.nan, columns["advantage"]))


def everything_masked(
    columns: Columns, metadata: Metadata, strength: float, rng: Generator
) -> Metadata:
    """The mask drops every token."""
    columns["in_loss"] = np.zeros(len(columns["in_loss"]), bool)
    return metadata


def _with_advantage(columns: Columns, metadata: Metadata, values: NDArray[Any]) -> Metadata:
    """Put advantages into the columns."""
    columns["advantage"] = np.asarray(values, np.float32)
    return metadata


def _telling(
    columns: Columns, side: str, value: float, share: float, rng: Generator
) -> NDArray[np.bool_]:
    """A share of the rows, of those whose log-prob is not that value already."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(columns[f"{side}_logprob"] - value)
    return some_rows(rng, ~(gap < _TELLING), share)


def _listed(columns: Columns) -> NDArray[np.bool_]:
    """Entries of the sampled token, shape (token, topk)."""
    ids = columns["topk_ids"]
    return np.asarray((ids == columns["token_id"][:, None]) & (ids >= 0))


def _reorder(columns: Columns, order: NDArray[np.intp]) -> None:
    """Put the lists into another order."""
    for name, _ in _ENTRIES:
        columns[name] = np.take_along_axis(columns[name], order, axis=1)


def _lay_out(columns: Columns, rows: NDArray[np.bool_], *, drop: bool) -> None:
    """Put the sampled token first; with `drop` its old entry makes room, else the K-th does."""
    ids = columns["topk_ids"]
    if ids.shape[1] < 2:
        raise NothingToBreakError("lists must hold 2 ids or more")
    hit = _listed(columns)
    place = np.arange(ids.shape[1])[None, :]
    out = np.where(hit.any(axis=1, keepdims=True) & drop, hit, place == ids.shape[1] - 1)
    order = np.argsort(np.where(out, -1, place), axis=1, kind="stable")  # the free slot first
    for name, scalar in _ENTRIES:
        moved = np.take_along_axis(columns[name], order, axis=1)
        moved[:, 0] = columns[scalar]
        columns[name] = np.where(rows[:, None], moved, columns[name])
