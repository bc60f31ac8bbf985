"""Random pairs of policies as an engine and a trainer would show them, for every test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from deltad.support import Support, full_support, topk_support


@dataclass(frozen=True)
class Pair:
    """μ and π over the whole vocabulary, what an engine lists, and what was sampled."""

    mu: np.ndarray  # (token, vocab)
    pi: np.ndarray  # (token, vocab)
    topk_ids: np.ndarray  # (token, topk)
    token_id: np.ndarray  # (token,)
    advantage: np.ndarray  # (token,)

    @property
    def vocab_size(self) -> int:
        return int(self.mu.shape[1])

    def support(self, **how: Any) -> Support:
        """The top-K support of the pair."""
        topk_mu, topk_pi, mu_k, pi_k = self.logprobs()
        return topk_support(
            *(as_array(a, **how) for a in (self.topk_ids, topk_mu, topk_pi)),
            *(as_array(a, **how) for a in (self.token_id, mu_k, pi_k)),
            vocab_size=self.vocab_size,
        )

    def full(self, **how: Any) -> Support:
        """The support of the whole vocabulary."""
        with np.errstate(divide="ignore"):
            logs = np.log(self.mu), np.log(self.pi)
        return full_support(*(as_array(a, **how) for a in (*logs, self.token_id)))

    def logprobs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """log μ and log π at the listed ids (NaN where padded) and at the sampled one."""
        rows = np.arange(len(self.mu))
        used = self.topk_ids >= 0
        ids = np.where(used, self.topk_ids, 0)
        with np.errstate(divide="ignore"):
            listed = [
                np.where(used, np.log(p[rows[:, None], ids]), np.nan) for p in (self.mu, self.pi)
            ]
            sampled = [np.log(p[rows, self.token_id]) for p in (self.mu, self.pi)]
        return listed[0], listed[1], sampled[0], sampled[1]


def as_array(values: np.ndarray, *, backend: str = "numpy", dtype: str = "float64") -> Any:
    """The values as the backend's array, floats in `dtype`."""
    if values.dtype.kind == "f":
        values = values.astype(dtype)
    return torch.from_numpy(values.copy()) if backend == "torch" else values


def as_numpy(values: Any) -> np.ndarray:
    return values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def draw_pair(
    rng: np.random.Generator,
    *,
    tokens: int = 8,
    vocab_size: int = 12,
    top_k: int = 4,
    scale: float = 1.5,
    drift: float = 0.5,
    padded: int = 0,
) -> Pair:
    """Softmax policies with logits of the given scale; π drifted from μ by `drift`."""
    logits = rng.normal(scale=scale, size=(tokens, vocab_size))
    mu = _softmax(logits)
    pi = _softmax(logits + rng.normal(scale=drift, size=logits.shape))
    token_id = np.array([rng.choice(vocab_size, p=p) for p in mu], dtype=np.int64)
    order = np.argsort(-mu, axis=1)
    topk_ids = np.full((tokens, top_k), -1, dtype=np.int64)
    listed = min(top_k - padded, vocab_size)
    topk_ids[:, :listed] = order[:, :listed]
    advantage = rng.choice([-1.5, -0.25, 0.0, 0.5, 2.0], size=tokens)
    return Pair(mu, pi, topk_ids, token_id, advantage)


@st.composite
def pairs(draw: st.DrawFn, *, max_vocab: int = 16) -> Pair:
    """Pairs of every kind: sharp and flat, near and far, K from 1 to beyond n, padded lists."""
    vocab_size = draw(st.integers(2, max_vocab))
    top_k = draw(st.integers(1, vocab_size + 2))
    padded = draw(st.integers(0, top_k - 1))
    return draw_pair(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        tokens=4,
        vocab_size=vocab_size,
        top_k=top_k,
        scale=draw(st.sampled_from([0.0, 0.5, 2.0, 8.0])),
        drift=draw(st.sampled_from([0.0, 1e-6, 0.3, 3.0])),
        padded=padded,
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    normal: np.ndarray = weights / weights.sum(axis=1, keepdims=True)
    return normal
