"""The whole matrix of logits, then log-softmax, then gather: what all else is compared with."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .anchor import Anchor


def log_softmax(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Logits in the model's dtype, cast to float32, log-softmax, gather."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, ids)


def log_softmax_in_dtype(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The same without the cast, as TRL's `selective_log_softmax` has it for bf16 logits."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, ids).float()


def float64_head(hidden: Tensor, weight: Tensor, ids: Tensor, *, rows: int = 256) -> Tensor:
    """Log-probs in float64 throughout, of the very numbers in `hidden` and `weight`.

    Parameters
    ----------
    hidden, weight, ids
        As an anchor takes them.
    rows : int
        Tokens at a time.

    Returns
    -------
    Tensor of float64, shape (token, id)
        What every head is measured against.
    """
    wide = weight.double()
    found = torch.empty(ids.shape, dtype=torch.float64, device=hidden.device)
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        found[part] = (hidden[part].double() @ wide.T).log_softmax(-1).gather(1, ids[part])
    return found


LOG_SOFTMAX: Final = Anchor(
    "float log_softmax", "logits.float().log_softmax().gather", log_softmax, "torch"
)
BF16_LOG_SOFTMAX: Final = Anchor(
    "bf16 log_softmax", "log_softmax of logits in their own dtype", log_softmax_in_dtype, "torch"
)
