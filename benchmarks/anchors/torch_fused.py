"""torch's own `linear_cross_entropy`: chunks of tokens, one id a token."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from .anchor import Anchor, rounded_dots


@torch.no_grad()
def linear_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Log-probs from the loss; the ids after the first from its log-sum-exp."""
    one = -functional.linear_cross_entropy(hidden, weight, ids[:, 0], reduction="none")[
        :, None
    ].float()
    if ids.shape[1] == 1:
        return one
    dots = rounded_dots(hidden, weight, ids)
    return dots - dots[:, :1] + one


LINEAR_CROSS_ENTROPY: Final = Anchor(
    "F.linear_cross_entropy", "chunks of tokens", linear_cross_entropy, "torch"
)
