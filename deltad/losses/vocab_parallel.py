"""Log-probs where each rank holds a part of the vocabulary, as tensor-parallel heads give them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .readout import PolicyLogprobs, read


def vocab_parallel_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    topk_ids: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    vocab_size: int | None = None,
    start: int | None = None,
    temperature: float = 1.0,
    collision: bool = False,
    entropy: bool = False,
) -> PolicyLogprobs:
    """Read log-probs of the policy off a shard of its logits.

    Every rank of the group calls it with its own columns and the same ids, gets the same numbers,
    and goes on to the same loss; the backward pass then gives each rank the gradient of its own
    columns, without another message between ranks.

    Parameters
    ----------
    logits
        This rank's columns before the temperature; shape (..., shard), any floating dtype. Shards
        lie in the order of the ranks and may differ in size.
    token_ids, topk_ids, temperature, collision, entropy
        As in `policy_logprobs`, ids of the whole vocabulary.
    group
        The ranks that share the vocabulary.
    vocab_size
        n; columns beyond it pad the vocabulary to a round number and take no part. None takes all
        columns of all shards.
    start
        Id of this rank's first column; None asks the other ranks for the size of their shards
        (one more message).

    Returns
    -------
    PolicyLogprobs
        The same on every rank.

    Raises
    ------
    ValueError
        As `policy_logprobs`; `start` without `vocab_size`; a vocabulary larger than the shards.

    Notes
    -----
    Messages: one maximum and one sum over (token, 3 + 1 + topk) numbers in float32. The
    vocabulary itself is never gathered.
    """
    if start is None:
        widths = _widths(logits, group)
        start = sum(widths[: dist.get_rank(group)])
        size = sum(widths) if vocab_size is None else vocab_size
        if size > sum(widths):
            raise ValueError(
                f"`vocab_size` is {size}, but the shards hold {sum(widths)} columns in all"
            )
    elif vocab_size is None:
        raise ValueError("`start` needs `vocab_size` beside it, to know where the vocabulary ends")
    else:
        size = vocab_size
    return read(
        logits,
        token_ids,
        topk_ids,
        temperature=temperature,
        collision=collision,
        entropy=entropy,
        group=group,
        start=start,
        size=size,
    )


def _widths(logits: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Number of columns of every rank's shard."""
    mine = torch.tensor([logits.shape[-1]], dtype=torch.int64, device=logits.device)
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [int(width) for width in every]
