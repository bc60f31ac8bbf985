"""The readout: exact dots at the ids asked for, one pass of tiles for the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from deltad.probes.errors import ProbeError
from deltad.probes.sharded.vocab import VocabShard
from deltad.probes.triton import supports

from .assembly import Reading
from .checks import check_options, check_shapes
from .logits import GivenLogits, Logits, Transform
from .precision import exact_products
from .result import Readout
from .rounding import Rounding

_TOKENS_OF_GIVEN: Final = 128
"""Tokens of a tile of logits that exist already: small, as no product asks for more."""


@torch.no_grad()
def readout(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    token_chunk: int = 512,
    vocab_chunk: int = 1024,
    low_rank: Sequence[tuple[Tensor, Tensor]] = (),
    shard: VocabShard | None = None,
    collision: bool = True,
    entropy: bool = False,
    workers: int = 1,
    exclusive: bool | None = None,
    fused: bool = False,
) -> Readout:
    r"""Log-probs at given ids, logsumexp and collision of softmax(z / T), from hidden states.

    .. math:: z = c \tanh\!\big(s\,(W h + b) / c\big), \qquad
              \log\pi_j = z_j / T - \log \textstyle\sum_i \exp(z_i / T)

    with s = `scale`, c = `softcap` (without it z = s (W h + b)) and T = `temperature`. With
    `low_rank` pairs (x, B) the logits gain B x before s.

    Parameters
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head at each position, any floating dtype.
    head_weight : Tensor, shape (vocab, hidden)
        W, any floating dtype.
    ids : Tensor of int, shape (token, id)
        Where the log-probs are wanted; negative ids are padding, and ids may repeat. Fast where
        they hold the likeliest ids: the behavior policy's top-K and the sampled token.
    bias : Tensor, shape (vocab,), optional
        b.
    scale : float
        s, what the model multiplies its logits by; not 0.
    softcap : float, optional
        c, the bound of the logits.
    temperature : float
        T > 0.
    token_chunk, vocab_chunk : int
        Sides of a tile; beside the inputs and the result one tile of logits exists at a time, and
        one of the head's rows in float32 where they are converted.
    low_rank : sequence of (Tensor, Tensor)
        x of shape (token, rank) and B of shape (vocab, rank) of each adapter of the head.
    shard : VocabShard, optional
        `head_weight`, `bias` and each B hold the rows of some ids only, and the other ranks of
        its group the rest; all of them call this together, with the same hidden states and ids.
    collision, entropy : bool
        Whether Σ π² and −Σ π log π are wanted.
    workers : int
        Threads that share out the token tiles, each computing on one thread. The result has the
        bits of one worker on one thread. It helps on a CPU with cores to spare and other work on
        them, where torch's own threads wait for each other in small tiles; on a quiet machine
        they do as well, for fewer tokens than `workers` tiles it does nothing, and on a GPU there
        is nothing to gain.
    exclusive : bool, optional
        Whether no other thread of the process multiplies tensors meanwhile, by default found out
        from the threads that Python knows of. Then a CPU with bfloat16 arithmetic multiplies
        bfloat16 inputs by it, exactly and in less than half of the time; the setting for that is
        one for the whole process. Results differ by float32 rounding.
    fused : bool
        Take the Triton kernels of `deltad.probes.triton`, which keep no tile in memory. On CUDA;
        not measured on a GPU yet, so never taken by default.

    Returns
    -------
    Readout
        Of shape (token,) and (token, id).

    Raises
    ------
    ProbeError
        Shapes that do not match, an id that the head has no row for, an option that is not
        positive, or `fused` where the kernels cannot take these tensors.

    Notes
    -----
    The logits z_i of the ids asked for are multiplied out row by row in float32, and their
    maximum m is the *pivot*. The mass of all other ids, the tail, is summed in tiles of z − m
    with the ids asked for masked out, so

    .. math:: \log \textstyle\sum_j e^{z_j} =
              m + \log\big(\sum_{j \notin S} e^{z_j - m} + \sum_{i \in S} e^{z_i - m}\big)

    where the last sum and everything after it is float64. So the log-probs at the ids, whose
    mass is most of it, carry no rounding of tiles at all, no log-prob can exceed 0, and one pass
    suffices without a running maximum. Where S misses the mode by so much that e^(z−m) overflows,
    the token is read again by `reference_readout`. Inputs of half precision are multiplied
    exactly and summed in float32, whatever precision the process has set for float32 products.

    Examples
    --------
    Two words with logits log 3 and 0, so probabilities ¾ and ¼:

    >>> import math
    >>> r = readout(
    ...     torch.tensor([[1.0]]), torch.tensor([[math.log(3)], [0.0]]), torch.tensor([[1, 0]])
    ... )
    >>> [round(p, 6) for p in r.logprobs.exp()[0].tolist()], round(r.collision.item(), 6)
    ([0.25, 0.75], 0.625)
    """
    rows = head_weight.shape[0] if shard is None else shard.total
    check_shapes(hidden, head_weight, ids, rows, bias)
    check_options(
        softcap,
        temperature,
        token_chunk,
        vocab_chunk,
        scale=scale,
        workers=workers,
        exclusive=exclusive,
    )
    if fused and not supports(hidden, head_weight, ids, low_rank=low_rank):
        raise ProbeError(
            "`fused` needs Triton, CUDA tensors with contiguous rows in bfloat16, float16 or "
            f"float32, at most 256 ids per token and no adapter of the head; got {hidden.dtype} "
            f"and {head_weight.dtype} on {hidden.device}, {ids.shape[1]} ids, "
            f"{len(low_rank)} adapters"
        )
    operands = (hidden, head_weight, *itertools.chain.from_iterable(low_rank))
    with exact_products(*operands, values_only=True, exclusive=exclusive) as dtype:
        head = Logits(
            hidden, head_weight, bias, low_rank, Transform(scale, softcap, temperature), dtype
        )
        reading = Reading(
            head,
            ids,
            shard,
            token_chunk,
            vocab_chunk,
            workers,
            exclusive,
            fused,
            collision=collision,
            entropy=entropy,
        )
        return reading.run(head, Rounding.of(head), token_chunk)


@torch.no_grad()
def read_logits(
    hidden: Tensor,
    head_weight: Tensor,
    logits: Tensor,
    ids: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    token_chunk: int = 512,
    vocab_chunk: int = 1024,
    low_rank: Sequence[tuple[Tensor, Tensor]] = (),
    shard: VocabShard | None = None,
    collision: bool = True,
    entropy: bool = False,
    workers: int = 1,
    exclusive: bool | None = None,
) -> Readout:
    """Read as `readout` does, with the tail taken from logits that exist already.

    The K + 1 dots are exact, as there; only the mass of all other ids carries the rounding of
    the trainer's logits, whose single errors average out in the sum. It costs a pass of
    exponentials instead of a matrix product.

    Parameters
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head at each token.
    head_weight : Tensor, shape (vocab, hidden)
        W, as it was when the logits were made.
    logits : Tensor, shape (position, vocab)
        W h + b and what adapters add, as the head's module gave them: before scale, bound and
        temperature; any floating dtype. Of this rank's ids where the head is sharded.
    ids : Tensor of int, shape (token, id)
        As in `readout`.
    rows : Tensor of int, shape (token,), optional
        At which positions the tokens are; by default they are the positions, in order.
    bias, scale, softcap, temperature, low_rank, shard, collision, entropy, workers, exclusive
        As in `readout`.
    token_chunk, vocab_chunk : int
        Sides of a tile of logits in float32; no more tokens are taken than fit a cache.

    Returns
    -------
    Readout
        As `readout` gives it.

    Raises
    ------
    ProbeError
        As `readout`, or logits of another shape.
    """
    total = head_weight.shape[0] if shard is None else shard.total
    check_shapes(hidden, head_weight, ids, total, bias)
    check_options(
        softcap,
        temperature,
        token_chunk,
        vocab_chunk,
        scale=scale,
        workers=workers,
        exclusive=exclusive,
    )
    positions = logits.shape[0] if rows is None else len(rows)
    if logits.ndim != 2 or logits.shape[1] != len(head_weight) or positions != len(hidden):
        raise ProbeError(
            f"`logits` must have shape (position, {len(head_weight)}), one position for each of "
            f"the {len(hidden)} hidden states (or `rows` must say which); got "
            f"{tuple(logits.shape)}"
            + ("" if rows is None else f" and rows of shape {tuple(rows.shape)}")
        )
    transform = Transform(scale, softcap, temperature)
    operands = (hidden, head_weight, *itertools.chain.from_iterable(low_rank))
    with exact_products(*operands, values_only=True, exclusive=exclusive) as dtype:
        head = Logits(hidden, head_weight, bias, low_rank, transform, dtype)
        given = GivenLogits(logits, rows, transform, torch.promote_types(dtype, logits.dtype))
        reading = Reading(
            head,
            ids,
            shard,
            token_chunk,
            vocab_chunk,
            workers,
            exclusive,
            fused=False,
            collision=collision,
            entropy=entropy,
        )
        return reading.run(
            given, Rounding.of(head, logits.dtype), min(token_chunk, _TOKENS_OF_GIVEN)
        )
