"""Random batches as a trainer would hand them to a loss, with all of both policies kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltad.divergence import DIVERGENCES
from deltad.losses import PolicyLoss, TopKLogprobs, trust_region_loss
from deltad.support import full_support

VOCAB, TOP_K = 17, 4


@dataclass
class Batch:
    """One micro-batch of float64, log-probs of shape (batch, token)."""

    mu: Tensor  # log-probs (batch, token, vocab)
    pi: Tensor  # log-probs (batch, token, vocab)
    token_ids: Tensor
    advantage: Tensor
    mask: Tensor

    @property
    def log_mu(self) -> Tensor:
        return self.mu.gather(-1, self.token_ids[..., None])[..., 0]

    @property
    def log_pi(self) -> Tensor:
        return self.pi.gather(-1, self.token_ids[..., None])[..., 0]

    def topk(self, k: int = TOP_K, **how: Any) -> TopKLogprobs:
        listed, ids = self.mu.topk(k, dim=-1)
        return TopKLogprobs(
            self.token_ids,
            ids,
            listed,
            self.pi.gather(-1, ids),
            vocab_size=self.mu.shape[-1],
            collision=self.pi.exp().square().sum(dim=-1),
            **how,
        )

    def full(self) -> dict[str, tuple[Tensor, Tensor]]:
        support = full_support(
            self.mu.flatten(0, 1), self.pi.flatten(0, 1), self.token_ids.reshape(-1)
        )
        shape = self.mask.shape
        return {
            name: (
                DIVERGENCES[name].value(support).reshape(shape),
                DIVERGENCES[name].direction(support).total.reshape(shape),
            )
            for name in DIVERGENCES
        }

    def rows(self, rows: slice | Tensor) -> Batch:
        return Batch(
            *(t[rows] for t in (self.mu, self.pi, self.token_ids, self.advantage, self.mask))
        )


def draw(
    seed: int = 0, rows: int = 5, columns: int = 7, *, shift: float = 0.8, vocab: int = VOCAB
) -> Batch:
    """Two policies `shift` apart in their logits; rows of unequal length, the last one empty."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * normal(rows, columns, vocab)
    mu = logits.log_softmax(dim=-1)
    pi = (logits + shift * normal(rows, columns, vocab)).log_softmax(dim=-1)
    ids = torch.multinomial(mu.exp().flatten(0, 1), 1, generator=generator).reshape(rows, columns)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    lengths[0], lengths[-1] = columns, 0
    mask = torch.arange(columns)[None, :] < lengths[:, None]
    return Batch(mu, pi, ids, normal(rows, columns), mask)


def run(batch: Batch, log_pi: Tensor | None = None, **options: Any) -> PolicyLoss:
    """The loss of a batch with all that its rule may ask for."""
    whole: dict[str, Any] = (
        {"full": batch.full()} if "full" in str(options.get("criterion")) else {}
    )
    asked: dict[str, Any] = {"topk": batch.topk(), "threshold": 0.05} | whole | options
    return trust_region_loss(
        batch.log_pi if log_pi is None else log_pi,
        batch.log_mu,
        batch.advantage,
        batch.mask,
        **asked,
    )


def gradient(batch: Batch, **options: Any) -> Tensor:
    """d loss / d log π_k, shape (batch, token)."""
    leaf = batch.log_pi.clone().requires_grad_()
    run(batch, leaf, **options).loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad
