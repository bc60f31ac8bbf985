"""What the losses need of the logits, without a second copy of them.

A log-softmax in float32 of bfloat16 logits is twice their size, and autograd keeps it. Here the
logits are read tile by tile in float32, the backward pass makes its softmax anew, and the largest
new tensor is the gradient itself, in the logits' own dtype.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE: Final = 2**24
"""Logits that are held in float32 at a time: 64 MiB."""


class PolicyLogprobs(NamedTuple):
    """The policy at the sampled tokens and at the behaviour policy's top-K ids.

    Attributes
    ----------
    logprob : Tensor, shape (...)
        log π_k in nats, float32 (float64 of float64 logits), with gradient.
    topk : Tensor, shape (..., topk), optional
        log π at the top-K ids, without gradient; NaN where the id is −1.
    collision : Tensor, shape (...), optional
        Σ_j π_j² over the vocabulary, without gradient.
    entropy : Tensor, shape (...), optional
        −Σ_j π_j log π_j in nats, without gradient.
    """

    logprob: Tensor
    topk: Tensor | None
    collision: Tensor | None
    entropy: Tensor | None


def policy_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    topk_ids: Tensor | None = None,
    *,
    temperature: float = 1.0,
    collision: bool = False,
    entropy: bool = False,
) -> PolicyLogprobs:
    """Read log-probs of the policy off its logits.

    Parameters
    ----------
    logits
        Before the temperature; shape (..., vocab), any floating dtype. Of padded logits give the
        first n columns alone.
    token_ids
        Sampled token k; shape (...), integers. Where a token is padding any id in the vocabulary
        will do.
    topk_ids
        The behaviour policy's top-K ids; shape (..., topk), integers, −1 pads.
    temperature
        τ > 0 of the sampling: all is of softmax(logits/τ).
    collision, entropy
        Also give these, for one more reading of each tile.

    Returns
    -------
    PolicyLogprobs
        Gradient flows through `logprob` alone; it is 0 in rows that the loss does not use, even
        where their logits are NaN.

    Raises
    ------
    ValueError
        Shapes that do not fit each other, ids outside the vocabulary on a CPU (elsewhere the
        device says so), or a temperature that is not positive.

    Examples
    --------
    >>> import torch
    >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> found = policy_logprobs(logits, torch.tensor([1]), torch.tensor([[0, -1]]), collision=True)
    >>> found.logprob.exp().tolist(), found.topk.exp().tolist(), found.collision.tolist()
    ([0.25], [[0.5, nan]], [0.375])
    """
    return read(
        logits,
        token_ids,
        topk_ids,
        temperature=temperature,
        collision=collision,
        entropy=entropy,
        group=None,
        start=0,
        size=logits.shape[-1],
    )


def read(
    logits: Tensor,
    token_ids: Tensor,
    topk_ids: Tensor | None,
    *,
    temperature: float,
    collision: bool,
    entropy: bool,
    group: dist.ProcessGroup | None,
    start: int,
    size: int,
) -> PolicyLogprobs:
    """Both public readings: of all the vocabulary, or of the shard from `start` of `size` ids."""
    lead = logits.shape[:-1]
    if token_ids.shape != lead:
        raise ValueError(
            f"`token_ids` must have the shape of `logits` without the vocabulary, {tuple(lead)}, "
            f"got {tuple(token_ids.shape)}"
        )
    if topk_ids is not None and topk_ids.shape[:-1] != lead:
        raise ValueError(
            f"`topk_ids` must be of shape {(*lead, 'topk')}, got {tuple(topk_ids.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive, got {temperature}")
    for name, given in (("token_ids", token_ids), ("topk_ids", topk_ids)):
        if given is not None and (given.is_floating_point() or given.dtype == torch.bool):
            raise ValueError(f"`{name}` must be integers, got {given.dtype}")
    sampled = token_ids.reshape(-1, 1).long()
    listed = None if topk_ids is None else topk_ids.reshape(-1, topk_ids.shape[-1]).long()
    ids = sampled if listed is None else torch.cat([sampled, listed], dim=1)
    if ids.device.type == "cpu" and ids.numel():
        least, greatest = int(ids.min()), int(ids.max())
        if least < -1 or greatest >= size or int(sampled.min()) < 0:
            raise ValueError(
                f"ids must lie in the vocabulary of {size} (top-K ids may be -1), got "
                f"{least if least < -1 else greatest if greatest >= size else -1}"
            )
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, squares, entropies = _Logprobs.apply(  # type: ignore[no-untyped-call]
        flat, ids, temperature, group, start, size, collision, entropy
    )
    return PolicyLogprobs(
        logprobs[:, 0].reshape(lead),
        None if topk_ids is None else logprobs[:, 1:].detach().reshape(topk_ids.shape),
        squares.reshape(lead) if collision else None,
        entropies.reshape(lead) if entropy else None,
    )


class _Logprobs(torch.autograd.Function):
    """Log-probs at ids, of one shard or of all; the sums over shards are one all-reduce."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        start: int,
        size: int,
        collision: bool,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = max(0, min(logits.shape[1], size - start))  # what lies beyond pads the vocabulary
        rows = logits.shape[0]
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        peak = torch.full((rows,), -torch.inf, dtype=wide, device=logits.device)
        if width:
            peak = logits[:, :width].amax(dim=1).to(wide)
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)

        sums = torch.zeros(rows, 3, dtype=wide, device=logits.device)
        for tile in _tiles(logits):
            # Differences from the greatest logit: small numbers, so float32 rounds them little.
            height = _height(logits[tile, :width], peak[tile], temperature)
            mass = height.exp()
            sums[tile, 0] = mass.sum(dim=1)
            if entropy:
                sums[tile, 2] = torch.where(mass > 0, mass * height, 0).sum(dim=1)
            if collision:
                sums[tile, 1] = mass.square_().sum(dim=1)
        local, mine = _local(ids, start, width)
        at = torch.zeros(ids.shape, dtype=wide, device=logits.device)
        if width:
            at = torch.where(
                mine, _height(logits.gather(1, local), peak, temperature), torch.zeros_like(at)
            )
        if group is not None:
            both = torch.cat([sums, at], dim=1)
            dist.all_reduce(both, group=group)
            sums, at = both[:, :3].contiguous(), both[:, 3:].contiguous()
        total = sums[:, 0]
        log_total = total.log()
        logprobs = torch.where(ids >= 0, at - log_total[:, None], torch.nan)
        ctx.save_for_backward(logits, ids, peak, log_total)
        ctx.shard = (temperature, start, width)
        squares = sums[:, 1] / total.square()
        entropies = log_total - sums[:, 2] / total
        ctx.mark_non_differentiable(squares, entropies)
        return logprobs, squares, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, peak, log_total = ctx.saved_tensors
        temperature, start, width = ctx.shard
        local, mine = _local(ids, start, width)
        # At padding the log-prob is NaN by definition, whatever the logits.
        push = torch.where(ids >= 0, outputs[0], torch.zeros_like(outputs[0])) / temperature
        total = push.sum(dim=1)
        gradient = torch.zeros_like(logits)
        if not width:
            return gradient, *(None,) * 7
        here = torch.where(mine, push, torch.zeros_like(push))
        for tile in _tiles(logits):
            softmax = _height(logits[tile, :width], peak[tile], temperature)
            softmax.sub_(log_total[tile, None]).exp_().mul_(-total[tile, None])
            # A row that the loss does not use stays 0, even where its logits are NaN.
            softmax.masked_fill_((total[tile] == 0)[:, None], 0)
            softmax.scatter_add_(1, local[tile], here[tile])
            gradient[tile, :width] = softmax.to(gradient.dtype)
        return gradient, *(None,) * 7


def _tiles(logits: Tensor) -> list[slice]:
    """Slices of rows of at most `TILE` logits, at least one row each."""
    height = max(1, TILE // max(1, logits.shape[1]))
    return [slice(at, at + height) for at in range(0, logits.shape[0], height)]


def _height(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """(logits − the row's greatest)/τ in the dtype of `peak`, always a new tensor."""
    height = logits.to(peak.dtype) - peak[:, None]
    return height if temperature == 1 else height.div_(temperature)


def _local(ids: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns of the ids in this shard (0 where it does not hold them), and where it does."""
    local = ids - start
    mine = (local >= 0) & (local < width) & (ids >= 0)
    return torch.where(mine, local, torch.zeros_like(local)), mine
