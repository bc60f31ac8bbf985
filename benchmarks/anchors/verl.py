"""verl's fused head in torch: chunks of tokens, three passes over the logits."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .anchor import Anchor

_TOKENS = 512  # in a chunk


@torch.no_grad()
def verl_fused(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Log-probs by the method of verl's `FusedLinearForPPO` without flash-attn.

    A chunk's logits are a product in the model's dtype, divided by the temperature and cast to
    float32; softmax and log-sum-exp give the entropy, and log-softmax, once more over all ids, the
    log-probs. (verl itself needs a Python environment of its own.)
    """
    found = torch.empty(ids.shape, dtype=torch.float32)
    entropy = torch.empty(hidden.shape[0], dtype=hidden.dtype)
    for start in range(0, hidden.shape[0], _TOKENS):
        part = slice(start, start + _TOKENS)
        logits = ((hidden[part] @ weight.T) / 1.0).float()
        probs = logits.softmax(-1)
        entropy[part] = (logits.logsumexp(-1) - (probs * logits).sum(-1)).to(entropy.dtype)
        found[part] = logits.log_softmax(-1).gather(1, ids[part])
    return found


VERL: Final = Anchor("verl", f"chunks of {_TOKENS} tokens, three passes, with entropy", verl_fused)
