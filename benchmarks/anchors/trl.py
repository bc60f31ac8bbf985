"""TRL's chunked head: vocabulary tiles, online log-sum-exp, one id a token."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .anchor import Anchor, rounded_dots

_CHUNK: Final = 32768
"""Ids in a tile, as `patch_chunked_lm_head` of TRL 1.16 takes them."""


def trl_chunked(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """TRL's own `ChunkedLogProbFunction`, without the extra fields that it can compute."""
    from trl.kernels import ChunkedLogProbFunction

    function: Any = ChunkedLogProbFunction
    if ids.shape[1] == 1:
        with torch.no_grad():
            one: Tensor = _apply(function, hidden, weight, ids)[0]
        return one[:, None]
    # It keeps its log-sum-exp for the backward pass.
    with torch.enable_grad():
        of_graph: Any = _apply(function, hidden.detach().requires_grad_(), weight, ids)[0]
    normalizer: Tensor = of_graph.grad_fn.saved_tensors[4]
    return rounded_dots(hidden, weight, ids) - normalizer[:, None]


def _apply(function: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
    """Temperature 1, no softcap, scale 1."""
    return function.apply(hidden, weight, None, ids[:, 0], 1.0, _CHUNK, None, 1.0, ())


TRL: Final = Anchor("TRL", "tiles of 4096 tokens × 32768 ids, online", trl_chunked, "trl")
