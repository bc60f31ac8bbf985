"""Columns of the dump, made of what one micro-batch holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .behavior import ResponseTokens
from .errors import ProbeError
from .readout import Readout

Rows = dict[str, np.ndarray[Any, Any]]
"""Columns of the dump by name, a row a response token; vectors have shape (row, K)."""


def behavior_columns(tokens: ResponseTokens, token_id: Tensor, step: int) -> Rows:
    """Everything that is known without the policy.

    Parameters
    ----------
    tokens : ResponseTokens
        As the behavior policy gave them.
    token_id : Tensor of int, shape (row,)
        The sampled tokens.
    step : int
        Optimizer step.

    Returns
    -------
    Rows
        In the stored types, as the engine gave them; padding is NaN.

    Raises
    ------
    ProbeError
        A number of a sequence or group that 32 bits cannot hold.
    """
    b, j = tokens.where()
    topk_ids = to_numpy(at_rows(tokens.topk_ids, b, j), np.int32)
    sequence = _numbers(tokens.sequence, b, j, "sequence")
    topk_logprobs = to_numpy(at_rows(tokens.topk_logprobs, b, j), np.float32)
    positions = (
        _positions(to_numpy(b, np.int64), sequence)
        if tokens.positions is None
        else _numbers(tokens.positions, b, j, "positions")
    )
    return {
        "step": np.full(len(b), step, np.int32),
        "group": _numbers(tokens.group, b, j, "group"),
        "sequence": sequence,
        "position": positions,
        "token_id": to_numpy(token_id, np.int32),
        "advantage": to_numpy(at_rows(tokens.advantages, b, j), np.float32),
        "behavior_logprob": to_numpy(at_rows(tokens.behavior_logprobs, b, j), np.float32),
        "topk_ids": topk_ids,
        "topk_behavior_logprobs": np.where(topk_ids >= 0, topk_logprobs, np.float32(np.nan)),
    }


def entry_or_scalar(rows: Rows) -> np.ndarray[Any, Any]:
    """Log μ_k as the top-K has it where it holds k, else as the scalar has it, shape (row,)."""
    hit = (rows["topk_ids"] >= 0) & (rows["topk_ids"] == rows["token_id"][:, None])
    at = hit.argmax(1)[:, None]
    entry = np.take_along_axis(rows["topk_behavior_logprobs"], at, 1)[:, 0]
    found: np.ndarray[Any, Any] = np.where(hit.any(1), entry, rows["behavior_logprob"])
    return found


def policy_columns(read: Readout, when: str) -> Rows:
    """Columns of the policy before or after the step."""
    logprobs = read.logprobs.cpu().numpy().astype(np.float32)
    full = {}
    for family, (divergence, direction) in read.full.items():
        full[f"full_{family}_{when}"] = to_numpy(divergence, np.float64)
        if when == "pre":
            full[f"full_{family}_direction"] = to_numpy(direction, np.float64)
    columns: Rows = {
        f"{when}_logprob": logprobs[:, -1].copy(),
        f"topk_{when}_logprobs": logprobs[:, :-1].copy(),
    }
    for name, values in (("collision", read.collision), ("entropy", read.entropy)):
        if values is not None:
            columns[f"{when}_{name}"] = to_numpy(values, np.float32)
    return {**columns, **full}


def at_rows(values: Tensor, b: Tensor, j: Tensor) -> Tensor:
    """Values of shape (B,) or (B, L, …) at rows b and positions j, on the values' device."""
    b, j = b.to(values.device), j.to(values.device)
    return values[b] if values.ndim == 1 else values[b, j]


def _numbers(values: Tensor, b: Tensor, j: Tensor, name: str) -> np.ndarray[Any, Any]:
    """Numbers of sequences or groups."""
    numbers = to_numpy(at_rows(values, b, j), np.int64)
    stored: np.ndarray[Any, Any] = numbers.astype(np.int32)
    if (stored != numbers).any():
        raise ProbeError(
            f"`{name}` must fit into 32 bits, got {numbers[stored != numbers][0]}: number them "
            "from 0"
        )
    return stored


def _positions(b: np.ndarray[Any, Any], sequence: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Count the response tokens of each sequence from 0; rows come in order of (b, j)."""
    fresh = np.ones(len(b), np.bool_)
    fresh[1:] = (b[1:] != b[:-1]) | (sequence[1:] != sequence[:-1])
    starts = np.flatnonzero(fresh)
    counted: np.ndarray[Any, Any] = np.arange(len(b)) - starts[np.cumsum(fresh) - 1]
    return counted.astype(np.int32)


def to_numpy(values: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    """To NumPy; through float32 where NumPy has no such type."""
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        values = values.float()
    found: np.ndarray[Any, Any] = values.numpy().astype(dtype)
    return found
