"""What each of two ranks does: compare its shard with the whole vocabulary and report."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltad.losses import (
    PolicyLogprobs,
    TopKLogprobs,
    policy_logprobs,
    trust_region_loss,
    vocab_parallel_logprobs,
)

ROWS, COLUMNS, VOCAB, TOP_K = 2, 5, 23, 4
PADDED = VOCAB + 5

CASES: tuple[tuple[int, int, bool, bool], ...] = (
    # Where rank 1 begins, how many columns there are, whether `vocab_size` and `start` are told.
    (VOCAB // 2, VOCAB, False, False),
    (3, VOCAB, False, False),
    (14, PADDED, True, False),
    (25, PADDED, True, False),  # rank 1 holds padding alone
    (14, PADDED, True, True),
)


def compare() -> dict[str, Any]:
    """Largest differences between this rank's shard and the whole, over `CASES`."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * normal(ROWS, COLUMNS, PADDED)
    sampled = torch.randint(0, VOCAB, (ROWS, COLUMNS), generator=generator)
    mu = normal(ROWS, COLUMNS, VOCAB).log_softmax(-1)
    listed, ids = mu.topk(TOP_K, dim=-1)
    ids[0, 0, -1] = -1
    log_mu = mu.gather(-1, sampled[..., None])[..., 0]
    advantage = normal(ROWS, COLUMNS)

    def differentiate(read: PolicyLogprobs) -> None:
        assert read.topk is not None
        topk = TopKLogprobs(sampled, ids, listed, read.topk, VOCAB, read.collision)
        trust_region_loss(
            read.logprob,
            log_mu,
            advantage,
            torch.ones(ROWS, COLUMNS),
            criterion="predictive-kl-exact",
            topk=topk,
        ).loss.backward()  # type: ignore[no-untyped-call]

    worst, moved = 0.0, 0.0
    options: dict[str, Any] = {"temperature": 0.8, "collision": True, "entropy": True}
    for cut, width, with_size, with_start in CASES:
        mine = slice(0, cut) if rank == 0 else slice(cut, width)
        whole = logits[..., :VOCAB].clone().requires_grad_()
        shard = logits[..., mine].clone().requires_grad_()
        told: dict[str, Any] = {"vocab_size": VOCAB} if with_size else {}
        if with_start:
            told["start"] = cut * rank
        expected = policy_logprobs(whole, sampled, ids, **options)
        found = vocab_parallel_logprobs(shard, sampled, ids, group=group, **told, **options)
        differentiate(expected)
        differentiate(found)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours.isnan(), theirs.isnan())
            worst = max(worst, float((ours - theirs).detach().nan_to_num().abs().max()))
        assert whole.grad is not None
        assert shard.grad is not None
        reference = torch.zeros_like(logits)
        reference[..., :VOCAB] = whole.grad
        moved = max(moved, float(whole.grad.abs().max()))
        worst = max(worst, float((shard.grad - reference[..., mine]).abs().max()))
    half = logits[..., slice(0, 9) if rank == 0 else slice(9, VOCAB)]
    narrow = vocab_parallel_logprobs(half.float(), sampled, ids, group=group).logprob
    truth = policy_logprobs(logits[..., :VOCAB], sampled, ids).logprob
    refused = ""
    try:
        vocab_parallel_logprobs(half, sampled, group=group, vocab_size=77)
    except ValueError as error:
        refused = str(error)
    return {
        "rank": rank,
        "cases": len(CASES),
        "worst": worst,
        "moved": moved,
        "float32": float((narrow - truth).detach().abs().max()),
        "refused": refused,
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(json.dumps(compare()), flush=True)
    dist.destroy_process_group()
