"""From rows of a dump to what the mathematics takes: float64 of the values stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.masks import Tokens
from deltad.support import Support, topk_support

from .batch import Batch
from .metadata import Metadata

RESPONSE: Final = (
    "step", "sequence", "position", "advantage", "behavior_logprob", "pre_logprob",
)  # fmt: skip
"""Columns of `response_tokens`, in addition to those that a rule needs."""


def token_columns(*, post: bool = False) -> tuple[str, ...]:
    """Columns that `batch_tokens` cannot do without.

    Parameters
    ----------
    post : bool
        After the step instead of before it.
    """
    time = "post" if post else "pre"
    return (
        "token_id",
        "advantage",
        "behavior_logprob",
        f"{time}_logprob",
        "topk_ids",
        "topk_behavior_logprobs",
        f"topk_{time}_logprobs",
    )


def batch_support(batch: Batch, metadata: Metadata, *, post: bool = False) -> Support:
    """Both policies on the top-K support, for the rows that have vectors.

    Parameters
    ----------
    batch : Batch
        Checked rows with `token_columns(post=post)`.
    metadata : Metadata
        Of their file.
    post : bool
        Take the policy after the step instead of the one before.

    Returns
    -------
    Support
        In float64, a row for each True of `batch.vectors`.
    """
    time = "post" if post else "pre"
    rows = _rows(batch)
    return topk_support(
        batch["topk_ids"][rows],
        _float64(batch, "topk_behavior_logprobs", rows),
        _float64(batch, f"topk_{time}_logprobs", rows),
        batch["token_id"][rows],
        _float64(batch, "behavior_logprob", rows),
        _float64(batch, f"{time}_logprob", rows),
        vocab_size=metadata.vocab_size,
        tolerance=metadata.logprob_tolerance,
        check=False,  # `check_batch` has done it, and names the file
    )


def batch_tokens(batch: Batch, metadata: Metadata, *, post: bool = False) -> Tokens:
    """What criteria look at, for the rows that have vectors.

    Parameters
    ----------
    batch : Batch
        Checked rows with `token_columns(post=post)`; the collision and the whole vocabulary's
        divergences are taken where they were read.
    metadata : Metadata
        Of their file.
    post : bool
        Take the policy after the step instead of the one before. The whole vocabulary's Ḋ is
        recorded before the step alone, so its divergences are left out then.

    Returns
    -------
    Tokens
        In float64 of the stored values, a row for each True of `batch.vectors`.
    """
    time = "post" if post else "pre"
    rows = _rows(batch)
    return _tokens(batch, rows, time, batch_support(batch, metadata, post=post))


def scalar_tokens(batch: Batch, rows: NDArray[np.bool_] | slice | None = None) -> Tokens:
    """What criteria without top-K see before the step, for the rows that have no vectors.

    Parameters
    ----------
    batch : Batch
        Checked rows with `token_id`, `advantage`, `behavior_logprob` and `pre_logprob`.
    rows : array of bool or slice, optional
        Other rows than these.

    Returns
    -------
    Tokens
        In float64, a row for each False of `batch.vectors`, or for each of `rows`.
    """
    return _tokens(batch, ~batch.vectors if rows is None else rows, "pre", None)


def response_tokens(
    columns: Mapping[str, NDArray[Any]], needs: Iterable[str]
) -> tuple[Tokens, NDArray[np.int64]]:
    """What rules that judge whole responses see, before the step, and the order that it is in.

    Parameters
    ----------
    columns : mapping of str to array, shape (token,)
        Those of `RESPONSE` and `needs`, of whole responses, in any order.
    needs : iterable of str
        Columns that the rules look at.

    Returns
    -------
    tokens : Tokens
        In float64, by step, response and position.
    order : array of int, shape (token,)
        The row that each of them comes from.
    """
    step, sequence, position = (columns[name] for name in RESPONSE[:3])
    order = np.lexsort((position, sequence, step))
    begins = [np.diff(each[order], prepend=-1) != 0 for each in (step, sequence)]
    advantage, behavior, policy = (columns[name][order].astype(np.float64) for name in RESPONSE[3:])
    given = {name: columns[name][order].astype(np.float64) for name in needs}
    number = np.cumsum(begins[0] | begins[1])
    return Tokens(advantage, behavior, policy, sequence=number, columns=given), order


def _tokens(
    batch: Batch, rows: NDArray[np.bool_] | slice, time: str, support: Support | None
) -> Tokens:
    """Tokens of some rows."""
    collision = f"{time}_collision"
    full = {
        family: (
            _float64(batch, f"full_{family}_pre", rows),
            _float64(batch, f"full_{family}_direction", rows),
        )
        for family in DIVERGENCES
        if time == "pre"
        and {f"full_{family}_pre", f"full_{family}_direction"} <= batch.columns.keys()
    }
    return Tokens(
        _float64(batch, "advantage", rows),
        _float64(batch, "behavior_logprob", rows),
        _float64(batch, f"{time}_logprob", rows),
        support=support,
        collision=_float64(batch, collision, rows) if collision in batch.columns else None,
        full=full,
    )


def _rows(batch: Batch) -> NDArray[np.bool_] | slice:
    """Rows that have vectors; a slice, which copies nothing, where that is all."""
    return slice(None) if batch.vectors.all() else batch.vectors


def _float64(batch: Batch, name: str, rows: NDArray[np.bool_] | slice) -> NDArray[Any]:
    """One column of some rows in float64."""
    return batch[name][rows].astype(np.float64)
