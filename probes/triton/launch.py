"""The kernels as functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .support import interpreting

_IDS_BLOCK: Final = 32  # ids of a token that one program reads
_SPLIT: Final = 2048  # ids that one program adds up


@dataclass(frozen=True)
class Blocks:
    """Sides of the tiles of `sums`, each a power of two and at least 16.

    Attributes
    ----------
    tokens, vocab, hidden : int
        Of a tile and of the step of its inner loop; `vocab` divides 2048.
    warps, stages : int
        Of the compiler.
    """

    tokens: int = 128
    vocab: int = 128
    hidden: int = 64
    warps: int = 8
    stages: int = 3

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> Blocks:
        """What suits a device and dtype.

        Two wide operands take twice the shared memory, so less of it is prefetched; from Hopper
        on a tile of 256 ids feeds the tensor cores better.
        """
        if interpreting():
            return cls(tokens=16, vocab=256)
        if hidden.dtype != weight.dtype or hidden.dtype == torch.float32:
            return cls(tokens=64, hidden=32, warps=4, stages=2)
        if torch.version.hip is None and torch.cuda.get_device_capability(hidden.device) >= (9, 0):
            return cls(vocab=256)
        return cls(stages=2)


@torch.no_grad()
def dots(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Logits at given ids, in float32 with float32 products.

    Parameters
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head; bfloat16, float16 or float32, on the device of the others.
    weight : Tensor, shape (vocab, hidden)
        Of the head.
    ids : Tensor of int, shape (token, id)
        Where; negative ids are padding.
    bias : Tensor, shape (vocab,), optional
        Of the head.
    scale, softcap, temperature : float
        As in `readout`.

    Returns
    -------
    logits : Tensor of float32, shape (token, id)
        c tanh(s (W h + b) / c) / T; NaN at padding.
    spread : Tensor of float32, shape (token,)
        Largest :math:`\sqrt{\sum_h (w_h h_h)^2}` among the token's ids, before scale, softcap and
        temperature: what the rounding of a dot is proportional to.
    """
    from .kernels import dots_kernel

    tokens, count = ids.shape
    blocks = -(-count // _IDS_BLOCK)
    logits = torch.empty((tokens, count), dtype=torch.float32, device=hidden.device)
    spreads = torch.empty((tokens, blocks), dtype=torch.float32, device=hidden.device)
    kernel: Any = dots_kernel
    kernel[(tokens, blocks)](
        hidden, weight, ids.contiguous(), weight if bias is None else bias, logits, spreads,
        count, hidden.shape[1], hidden.stride(0), weight.stride(0),
        float(scale), float(softcap or 1.0), 1.0 / temperature,
        HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap is not None,
        BLOCK_IDS=_IDS_BLOCK, BLOCK_HIDDEN=128, enable_fp_fusion=True,
    )  # fmt: skip
    return logits, spreads.amax(1)


@torch.no_grad()
def sums(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    pivot: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    collision: bool = True,
    entropy: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    r"""Sums over the tail: all ids of the head but those given.

    With the logits z at the temperature and a pivot m of each token,

    .. math:: \sum_{j \notin S} e^{z_j - m}, \qquad \sum_{j \notin S} e^{2 (z_j - m)}, \qquad
              \sum_{j \notin S} e^{z_j - m} (z_j - m)

    Parameters
    ----------
    hidden, weight, bias, scale, softcap, temperature
        As in `dots`.
    ids : Tensor of int, shape (token, id)
        S; negative ids are padding.
    pivot : Tensor, shape (token,)
        m; best the largest logit of S.
    collision, entropy : bool
        Whether the second and the third sum are wanted.
    blocks : Blocks, optional
        Sides of the tiles; what suits the device by default.

    Returns
    -------
    total, squares, weighted : Tensor of float64, shape (token,)
        The sums, None where not wanted; infinite or NaN where the pivot lies so far below the
        largest logit that float32 overflows.

    Notes
    -----
    Products are accumulated in float32 and never rounded to a shorter dtype; a program adds up
    2048 ids of a block of tokens, and its partial sums are added in float64 in a fixed order.
    There are no atomics, so the same inputs give the same bits. Beyond its inputs it takes
    4 · vocab / 2048 bytes a token and sum.
    """
    from .kernels import sums_kernel

    tokens, vocab = hidden.shape[0], weight.shape[0]
    blocks = blocks or Blocks.of(hidden, weight)
    splits = -(-vocab // _SPLIT)
    made = [
        torch.empty((splits, tokens) if wanted else (1, 1), device=hidden.device)
        for wanted in (True, collision, entropy)
    ]
    ordered = ids.sort(1).values.to(torch.int32).contiguous()
    kernel: Any = sums_kernel
    kernel[(-(-tokens // blocks.tokens), splits)](
        hidden, weight, ordered, weight if bias is None else bias, pivot.float().contiguous(),
        *made,
        tokens, vocab, ids.shape[1], hidden.shape[1], hidden.stride(0), weight.stride(0),
        float(scale), float(softcap or 1.0), 1.0 / temperature,
        HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap is not None,
        COLLISION=collision, ENTROPY=entropy,
        # The interpreter's product of bfloat16 numbers is wrong.
        WIDEN=hidden.dtype != weight.dtype or interpreting(),
        SPLIT=_SPLIT, BLOCK_TOKENS=blocks.tokens, BLOCK_VOCAB=blocks.vocab,
        BLOCK_HIDDEN=blocks.hidden, num_warps=blocks.warps, num_stages=blocks.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    total, squares, weighted = (each.sum(0, dtype=torch.float64) for each in made)
    return total, squares if collision else None, weighted if entropy else None
