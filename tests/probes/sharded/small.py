"""A causal model that needs torch alone: importing transformers takes longer than the tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.probes.tiny import VOCAB


class Output(NamedTuple):
    """What the model returns."""

    logits: Tensor


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class Body(nn.Module):
    """From ids to hidden states."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.places = nn.Embedding(64, hidden)
        self.layers = nn.ModuleList(Block(hidden, 4) for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        x: Tensor = self.embed_tokens(input_ids) + self.places.weight[:length]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None, None] > 0)
        allowed = allowed | torch.eye(length, dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, allowed)
        return x


class Small(nn.Module):
    """With the names that transformers gives its parts."""

    def __init__(self, vocab: int = VOCAB, *, tied: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab)
        self.model = Body(vocab, 32, 2)
        self.lm_head = nn.Linear(32, vocab, bias=not tied)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        return Output(self.lm_head(self.model(input_ids, attention_mask)))


def small(vocab: int = VOCAB, *, tied: bool = False, dtype: Any = torch.float64) -> Any:
    """The same weights each time; in float64, where the order of a sum is not seen."""
    torch.manual_seed(0)
    model = Small(vocab, tied=tied)
    for each in model.parameters():
        if each.ndim > 1:
            nn.init.normal_(each, std=0.3)
    return model.to(dtype)
