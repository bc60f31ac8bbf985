"""Liger's selective log-prob: tiles in tokens and ids, online log-sum-exp, one id a token."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import torch
from torch import Tensor

from .anchor import Anchor, rounded_dots

_TOKENS, _IDS = 2048, 4096  # sides of a tile


@torch.no_grad()
def liger_package(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Liger's own `_selective_logprob_forward`, which is plain torch and runs anywhere."""
    from liger_kernel.chunked_loss import fused_linear_ppo

    forward: Any = fused_linear_ppo._selective_logprob_forward
    logprobs, normalizer = forward(hidden, weight, ids[:, 0])
    found: Tensor = logprobs[:, None]
    if ids.shape[1] > 1:
        found = rounded_dots(hidden, weight, ids) - normalizer[:, None]
    return found


@torch.no_grad()
def liger_method(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The same method, for where the package is not installed.

    Every tile of logits is a fresh product in the model's dtype, cast to float32; maximum and sum
    are carried from tile to tile; the wanted logits are picked by clamped index and masked.
    """
    tokens, vocab = hidden.shape[0], weight.shape[0]
    found = torch.empty(ids.shape, dtype=torch.float32)
    for start in range(0, tokens, _TOKENS):
        part = slice(start, min(start + _TOKENS, tokens))
        wanted = ids[part]
        top = torch.full((len(wanted),), -torch.inf)
        total = torch.zeros(len(wanted))
        picked = torch.zeros(wanted.shape)
        for first in range(0, vocab, _IDS):
            rows = weight[first : first + _IDS]
            tile = (hidden[part] @ rows.T).float()
            higher = torch.maximum(top, tile.amax(-1))
            total = total * torch.exp(top - higher) + torch.exp(tile - higher[:, None]).sum(-1)
            top = higher
            local = wanted - first
            inside = (local >= 0) & (local < len(rows))
            picked += tile.gather(1, local.clamp(0, len(rows) - 1)) * inside
        found[part] = picked - (top + total.log())[:, None]
    return found


_METHOD = f"tiles of {_TOKENS} tokens × {_IDS} ids, online"
LIGER: Final = (
    Anchor("Liger", _METHOD, liger_package, "liger-kernel")
    if importlib.util.find_spec("liger_kernel")
    else Anchor("Liger", _METHOD, liger_method)
)
