"""Fills: values that an engine, a parser or a trainer puts where a log-prob is missing.

A float32 log-prob is a continuous number: that one and the same value comes up in different
contexts, or that it is a whole number, does not happen by chance. 0.0 is different, since a
sure token has it; it is a fill where other ids of the row hold mass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .sample import Sample

COLUMNS: Final = (
    "behavior_logprob",
    "topk_behavior_logprobs",
    "pre_logprob",
    "topk_pre_logprobs",
    "post_logprob",
    "topk_post_logprobs",
)

IMPOSSIBLE: Final = -500.0
"""No log-prob of a float32 softmax lies below: logits differ by tens."""

SUSPICIOUS: Final = -50.0
"""Below, a value that repeats is a fill; real log-probs at listed ids seldom get there."""

OTHER_MASS: Final = 0.05
"""Mass of a row's other ids that a probability of 1 cannot stand beside."""


@dataclass(frozen=True)
class Fills:
    """The fills of one column.

    Attributes
    ----------
    cells : array of bool
        Where, in the column's shape.
    values : mapping of str to int
        Each value by its name with its count, most frequent first.
    """

    cells: NDArray[np.bool_]
    values: dict[str, int]

    @property
    def rows(self) -> NDArray[np.bool_]:
        """Rows that hold one."""
        return self.cells if self.cells.ndim == 1 else np.asarray(self.cells.any(axis=1))


def find_fills(sample: Sample) -> dict[str, Fills]:
    """Find the fills of every column of log-probs; columns without any are left out."""
    ids = np.asarray(sample["topk_ids"])
    context = _contexts(ids)
    found = {}
    for name in (each for each in COLUMNS if each not in sample.unread):
        values = np.asarray(sample[name], dtype=np.float32)
        there = ids != -1 if values.ndim == 2 else np.ones(len(values), np.bool_)
        cells = _not_finite(name, values, there, ids, sample)
        at = ids if values.ndim == 2 else np.asarray(sample["token_id"])
        cells |= _constants(values, there, context, at)
        cells |= _zeros(name, values, there, sample, cells)
        if cells.any():
            found[name] = Fills(cells, _counted(values[cells]))
    return found


def rounded_to(values: NDArray[np.float32]) -> str | None:
    """The short float type that all of some float32 values fit into, None where none does.

    Examples
    --------
    >>> rounded_to(np.float32([-0.5, -1.25, -3.0]))
    'bfloat16'
    >>> rounded_to(np.float32([-0.1])) is None
    True
    """
    finite = values[np.isfinite(values) & (values != 0)]
    if not len(finite):
        return None
    bits = np.ascontiguousarray(finite, dtype=np.float32).view(np.uint32)
    for name, spare in (("bfloat16", 16), ("float16", 13)):
        if ((bits & ((1 << spare) - 1)) == 0).mean() > 0.99:
            return name
    return None


def _contexts(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """A number for each distinct list of ids: rows of the same context share it."""
    if not ids.size:
        return np.zeros(len(ids), np.int64)
    weights = np.random.default_rng(0).integers(1, 2**40, ids.shape[1], dtype=np.int64)
    # A hash of the list; it wraps round, which does no harm.
    with np.errstate(over="ignore"):
        return np.asarray((ids.astype(np.int64) * weights).sum(axis=1))


def _not_finite(
    name: str,
    values: NDArray[np.float32],
    there: NDArray[np.bool_],
    ids: NDArray[np.int32],
    sample: Sample,
) -> NDArray[np.bool_]:
    """NaN and ∞ anywhere; −∞ but where a truncated policy has it: in a part of a list."""
    cells = (np.isnan(values) | np.isposinf(values)) & there
    minus = np.isneginf(values) & there
    if not minus.any():
        return cells
    if values.ndim == 2:
        # Part of a row is what truncated sampling leaves; a whole row is no distribution.
        some = np.isfinite(np.where(there, values, np.nan)).any(axis=1, keepdims=True)
        return np.asarray(cells | (minus & ~some))
    if name == "behavior_logprob":  # such a token cannot have been sampled
        return np.asarray(cells | minus)
    lists = np.asarray(sample[f"topk_{name}s"])
    cut = np.isneginf(lists) & (ids != -1)
    partly = cut.any(axis=1) & (np.isfinite(lists) & (ids != -1)).any(axis=1)
    truncated = partly.sum() >= max(3, 0.01 * len(values))
    return np.asarray(cells | (minus & ~(partly | truncated)))


def _constants(
    values: NDArray[np.float32],
    there: NDArray[np.bool_],
    context: NDArray[np.int64],
    ids: NDArray[np.int32],
) -> NDArray[np.bool_]:
    """Values too low or too positive, and those that come up again in other contexts.

    One id in one context has one value, however often it is stored; a repeated value is a fill
    where it comes up at several ids.
    """
    finite = np.isfinite(values) & there
    cells: NDArray[np.bool_] = np.asarray(finite & (values <= IMPOSSIBLE), dtype=np.bool_)
    flat = values[finite]
    if not len(flat):
        return cells
    rows = np.nonzero(finite)[0]
    short = rounded_to(flat) is not None
    distinct, place, counts = np.unique(flat, return_inverse=True, return_counts=True)
    # Only values that are frequent enough for the mildest of the rules below.
    candidates = np.flatnonzero((counts >= 3) & (distinct > IMPOSSIBLE) & (np.abs(distinct) > 1e-3))
    at = np.isin(place, candidates)
    keys = context[rows[at]]
    if values.ndim == 1:
        keys = keys * 1_000_003 + ids[rows[at]]
    pairs = np.unique(np.stack([place[at], keys], axis=1), axis=0)
    contexts = np.bincount(pairs[:, 0], minlength=len(distinct))
    named = np.unique(np.stack([place[at], ids[finite][at]], axis=1), axis=0)
    several_ids = np.bincount(named[:, 0], minlength=len(distinct)) >= 4
    noise = len(flat) * 2e-5  # chance meetings: float32 log-probs lie about 1e-6 apart
    whole = distinct == np.round(distinct)
    repeated = (contexts >= 8 + noise) & several_ids
    integral = whole & (contexts >= 3 + noise / 4)
    low = (distinct <= SUSPICIOUS) & (whole | (contexts >= 3))
    if short:
        repeated = integral = np.zeros(len(distinct), np.bool_)
    positive = (distinct > 1e-3) & (contexts >= 3)
    fills = np.zeros(len(distinct), np.bool_)
    fills[candidates] = (repeated | integral | positive)[candidates]
    fills |= low & (counts >= 2 if short else counts >= 1) & (whole | (contexts >= 3))
    cells[finite] |= fills[place]
    return np.asarray(cells, dtype=np.bool_)


def _zeros(
    name: str,
    values: NDArray[np.float32],
    there: NDArray[np.bool_],
    sample: Sample,
    others: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """0.0 where the row's other ids hold mass."""
    zero: NDArray[np.bool_] = np.asarray((values == 0) & there, dtype=np.bool_)
    if not zero.any():
        return zero
    if values.ndim == 2:
        logs = np.where(there & np.isfinite(values) & ~others, values, -np.inf)
        probs = np.exp(np.minimum(logs.astype(np.float64), 0))
        rest = probs.sum(axis=1, keepdims=True) - probs
        return np.asarray(zero & (rest > OTHER_MASS))
    column = {
        "behavior_logprob": "topk_behavior_logprobs",
        "pre_logprob": "topk_pre_logprobs",
        "post_logprob": "topk_post_logprobs",
    }[name]
    logs = np.asarray(sample[column], dtype=np.float64)
    ids = np.asarray(sample["topk_ids"])
    used = (ids != -1) & np.isfinite(logs) & (logs < -1e-6) & (logs > IMPOSSIBLE)
    other = used & (ids != sample["token_id"][:, None])
    mass = np.exp(np.where(other, logs, -np.inf)).sum(axis=1)
    contradicted = mass > OTHER_MASS
    # Without a list the other policy must do: a sure token is sure for both.
    beside = "pre_logprob" if name == "behavior_logprob" else "behavior_logprob"
    alone = ~(ids != -1).any(axis=1) & (np.asarray(sample[beside]) < np.log1p(-OTHER_MASS))
    if alone.sum() < 3:
        alone = np.zeros(len(values), np.bool_)
    return np.asarray(zero & (contradicted | alone), dtype=np.bool_)


def _counted(values: NDArray[np.float32]) -> dict[str, int]:
    """Values by name with their counts, most frequent first; at most six."""
    names, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:6]
    return {_name(names[at]): int(counts[at]) for at in order}


def _name(value: np.float32) -> str:
    """How a value is written."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "-inf" if value < 0 else "+inf"
    return f"{float(value):.7g}"
