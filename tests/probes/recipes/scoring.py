"""What transformers gives to tokens that an engine sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltad.probes.engines import EngineResponse


@dataclass(frozen=True)
class Mismatch:
    """Differences between an engine's log-probs and transformers', in nats.

    `largest` is over sampled and listed ids; `kl_*` are D(μ‖π) on the listed ids and the tail.
    """

    tokens: int
    largest: float
    sampled_mean: float
    kl_mean: float
    kl_p99: float
    kl_max: float


def scored(model: Any, response: EngineResponse, *, temperature: float) -> Any:
    """Log-probs of the whole vocabulary at each response token, float64, one sequence alone."""
    assert response.prompt_ids is not None
    prompt, ids = response.prompt_ids.tolist(), response.token_ids.tolist()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1).numpy()


def mismatch(model: Any, responses: Sequence[EngineResponse], *, temperature: float) -> Mismatch:
    sampled, listed, divergences = [], [], []
    for response in responses:
        policy = scored(model, response, temperature=temperature)
        own = np.take_along_axis(policy, response.token_ids[:, None], 1)[:, 0]
        theirs = np.take_along_axis(policy, response.topk_ids, 1)
        sampled.append(np.abs(response.logprobs - own))
        listed.append(np.abs(response.topk_logprobs - theirs).max(axis=1))
        mu, pi = np.exp(response.topk_logprobs), np.exp(theirs)
        mu_tail, pi_tail = 1 - mu.sum(axis=1), np.maximum(1 - pi.sum(axis=1), 1e-12)
        tail = np.where(mu_tail > 0, mu_tail * np.log(np.maximum(mu_tail, 1e-300) / pi_tail), 0)
        inside = (mu * (response.topk_logprobs - theirs)).sum(axis=1)
        divergences.append(inside + tail)
    gaps, kl = np.concatenate(sampled), np.concatenate(divergences)
    return Mismatch(
        tokens=len(gaps),
        largest=float(max(gaps.max(), np.concatenate(listed).max())),
        sampled_mean=float(gaps.mean()),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
    )
