"""prime-rl's chunked head: tiles in tokens and ids, online log-sum-exp and entropy."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .anchor import Anchor

_TOKENS, _IDS = 1024, 8192  # sides of a tile


@torch.no_grad()
def prime_rl(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Log-probs by the method of prime-rl's `FusedOutputLinear`; it has no package on PyPI.

    What the method is, step by step: a fresh product for every tile; cast to float32 and
    multiplied by the inverse temperature of each token; a running maximum, a running sum and a
    running sum weighted by the logits (entropy is always computed); a boolean mask of the tokens
    whose id lies in the tile, and those alone are picked.
    """
    tokens, vocab = hidden.shape[0], weight.shape[0]
    inverse_temperature = torch.ones(tokens)
    found = torch.empty(ids.shape, dtype=torch.float32)
    entropy = torch.empty(tokens)
    for start in range(0, tokens, _TOKENS):
        part = slice(start, min(start + _TOKENS, tokens))
        wanted, factor = ids[part], inverse_temperature[part, None]
        top = torch.full((len(wanted),), -torch.inf)
        total, weighted = torch.zeros(len(wanted)), torch.zeros(len(wanted))
        picked = torch.zeros(wanted.shape)
        for first in range(0, vocab, _IDS):
            last = min(first + _IDS, vocab)
            tile = (hidden[part] @ weight[first:last].T).to(torch.float32) * factor
            higher = torch.maximum(top, tile.amax(-1))
            rescale = torch.exp(top - higher)
            exponentials = torch.exp(tile - higher[:, None])
            total = total * rescale + exponentials.sum(-1)
            weighted = weighted * rescale + (exponentials * tile).sum(-1)
            top = higher
            inside = (wanted >= first) & (wanted < last)
            if bool(inside.any()):
                token, _ = inside.nonzero(as_tuple=True)
                picked[inside] = tile[token, wanted[inside] - first]
        normalizer = top + total.log()
        found[part] = picked - normalizer[:, None]
        entropy[part] = normalizer - weighted / total
    return found


PRIME_RL: Final = Anchor(
    "prime-rl", f"tiles of {_TOKENS} tokens × {_IDS} ids, online, with entropy", prime_rl
)
