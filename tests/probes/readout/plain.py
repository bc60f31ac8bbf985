"""Inputs of a readout, and what it must give, in float64 from the equations."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS, HIDDEN, VOCAB = 37, 48, 101


def inputs(
    *,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.6,
    ids: int = 7,
    tokens: int = TOKENS,
    vocab: int = VOCAB,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(vocab, HIDDEN, generator=generator) * spread).to(dtype)
    return hidden, weight, torch.randint(0, vocab, (tokens, ids), generator=generator)


def likeliest(hidden: Tensor, weight: Tensor, count: int = 6) -> Tensor:
    """The best ids of each token and a random one, as a probe asks for."""
    best = (hidden.double() @ weight.double().T).topk(count, 1).indices
    generator = torch.Generator().manual_seed(1)
    return torch.cat([best, torch.randint(0, len(weight), (len(best), 1), generator=generator)], 1)


def oracle(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-softmax over the whole vocabulary in float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def worst(first: Tensor | None, second: Tensor) -> float:
    """Largest difference."""
    assert first is not None
    return float((first - second).abs().max())
