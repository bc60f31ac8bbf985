"""One of two ranks: compares its shard with the whole vocabulary and reports as JSON."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from deltad.losses import TopKLogprobs, policy_logprobs, trust_region_loss, vocab_parallel_logprobs

ROWS, COLUMNS, VOCAB, TOP_K = 2, 5, 23, 4


def main() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(1)
    columns = VOCAB + 5  # the last five pad the vocabulary
    logits = 2 * torch.randn(ROWS, COLUMNS, columns, generator=generator, dtype=torch.float64)
    sampled = torch.randint(0, VOCAB, (ROWS, COLUMNS), generator=generator)
    mu = torch.randn(ROWS, COLUMNS, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
    listed, ids = mu.topk(TOP_K, dim=-1)
    ids[0, 0, -1] = -1
    log_mu = mu.gather(-1, sampled[..., None])[..., 0]
    advantage = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    mask = torch.ones(ROWS, COLUMNS)
    worst = 0.0
    # Where rank 1 begins, how many columns there are, and what is told of them.
    cases = [
        (VOCAB // 2, VOCAB, {}),
        (3, VOCAB, {}),
        (14, columns, {"vocab_size": VOCAB}),
        (25, columns, {"vocab_size": VOCAB}),  # rank 1 holds padding alone
        (14, columns, {"vocab_size": VOCAB, "start": 14 * rank}),
    ]
    for cut, width, told in cases:
        whole = logits[..., :VOCAB].clone().requires_grad_()
        mine = slice(0, cut) if rank == 0 else slice(cut, width)
        shard = logits[..., mine].clone().requires_grad_()
        options = {"temperature": 0.8, "collision": True, "entropy": True}
        expected = policy_logprobs(whole, sampled, ids, **options)
        found = vocab_parallel_logprobs(shard, sampled, ids, group=group, **told, **options)
        for read in (expected, found):
            assert read.topk is not None
            trust_region_loss(
                read.logprob,
                log_mu,
                advantage,
                mask,
                criterion="predictive-kl-exact",
                topk=TopKLogprobs(sampled, ids, listed, read.topk, VOCAB, read.collision),
            ).loss.backward()
        for ours, theirs in zip(found, expected, strict=True):
            worst = max(worst, float((ours - theirs).nan_to_num().abs().max()))
            assert torch.equal(ours.isnan(), theirs.isnan())
        assert whole.grad is not None
        assert shard.grad is not None
        assert whole.grad.abs().max() > 1e-3
        reference = torch.zeros_like(logits)
        reference[..., :VOCAB] = whole.grad
        worst = max(worst, float((shard.grad - reference[..., mine]).abs().max()))
    half = slice(0, 9) if rank == 0 else slice(9, VOCAB)
    narrow = vocab_parallel_logprobs(logits[..., half].float(), sampled, ids, group=group)
    truth = policy_logprobs(logits[..., :VOCAB], sampled, ids)
    float32 = float((narrow.logprob - truth.logprob).abs().max())
    try:
        vocab_parallel_logprobs(logits[..., half], sampled, group=group, vocab_size=77)
    except ValueError as error:
        refused = str(error)
    report = {"rank": rank, "cases": len(cases), "worst": worst, "float32": float32}
    print(json.dumps(report | {"refused": refused}), flush=True)
    dist.destroy_process_group()


main()
