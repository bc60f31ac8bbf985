"""Columns of the dump, made of what one micro-batch holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .behavior import ResponseTokens
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
    """
    b, j = tokens.where()
    topk_ids = to_numpy(tokens.topk_ids[b, j], np.int32)
    sequence = _per_token(tokens.sequence, b, j)
    return {
        "step": np.full(len(b), step, np.int32),
        "group": to_numpy(_per_token(tokens.group, b, j), np.int32),
        "sequence": to_numpy(sequence, np.int32),
        "position": _positions(to_numpy(b, np.int64), to_numpy(sequence, np.int64)),
        "token_id": to_numpy(token_id, np.int32),
        "advantage": to_numpy(_per_token(tokens.advantages, b, j), np.float32),
        "behavior_logprob": to_numpy(tokens.behavior_logprobs[b, j], np.float32),
        "topk_ids": topk_ids,
        "topk_behavior_logprobs": np.where(
            topk_ids >= 0, to_numpy(tokens.topk_logprobs[b, j], np.float32), np.float32(np.nan)
        ),
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
    return {
        f"{when}_logprob": logprobs[:, -1].copy(),
        f"topk_{when}_logprobs": logprobs[:, :-1].copy(),
        f"{when}_collision": read.collision.cpu().numpy().astype(np.float32),
        f"{when}_entropy": read.entropy.cpu().numpy().astype(np.float32),
    }


def _per_token(values: Tensor, b: Tensor, j: Tensor) -> Tensor:
    """Values a sequence or a token, at the rows."""
    return values[b] if values.ndim == 1 else values[b, j]


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
