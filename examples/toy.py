"""What the examples train and on what: a tiny model, an engine that samples, a reward.

Nothing of deltad is in here; in your training a trainer and an engine stand in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, PROMPT, RESPONSE, TOP_K, GROUP = 96, 4, 8, 8, 8


def model() -> Any:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2,
        )
    )  # fmt: skip


@torch.no_grad()
def rollout(policy: Any, *, groups: int = 2, rank: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample responses from an engine that is a little off, here by noise on the logits.

    Returns the ids, shape (sequence, length), and what `ResponseTokens` asks for: entry (b, j) is
    about the token ids[b, j]. Sequences and groups are numbered through all ranks.
    """
    generator = torch.Generator().manual_seed(rank)
    rows = groups * GROUP
    ids = torch.randint(VOCAB, (groups, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
    length = PROMPT + RESPONSE
    logprobs, topk_ids = torch.zeros(rows, length), torch.full((rows, length, TOP_K), -1)
    topk_logprobs = torch.zeros(rows, length, TOP_K)
    for j in range(PROMPT, length):
        logits = policy(input_ids=ids).logits[:, -1].float()
        noise = torch.randn(logits.shape, generator=generator)
        mu = torch.log_softmax(logits + 0.5 * noise, -1)
        token = torch.multinomial(mu.exp(), 1, generator=generator)
        logprobs[:, j] = mu.gather(1, token)[:, 0]
        topk_logprobs[:, j], topk_ids[:, j] = mu.topk(TOP_K)
        ids = torch.cat([ids, token], 1)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, PROMPT:] = True
    sequence = rank * rows + torch.arange(rows)
    return ids, {
        "response_mask": mask,
        "advantages": advantages(ids),
        "behavior_logprobs": logprobs,
        "topk_ids": topk_ids,
        "topk_logprobs": topk_logprobs,
        "sequence": sequence,
        "group": sequence // GROUP,
    }


def advantages(ids: Tensor) -> Tensor:
    """Reward: the share of even ids in a response; its advantage within the group."""
    reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1).view(-1, GROUP)
    return ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1)


def loss(logits: Tensor, ids: Tensor, behavior: dict[str, Tensor]) -> Tensor:
    """Policy-gradient loss, the mean over the response tokens."""
    logprob = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None])[..., 0]
    ratio = (logprob - behavior["behavior_logprobs"][:, 1:]).exp()
    mask = behavior["response_mask"][:, 1:]
    return -(ratio * behavior["advantages"][:, None] * mask).sum() / mask.sum()
