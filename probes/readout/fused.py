"""The two halves of a readout by the Triton kernels, in the form that its tiles have."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from .logits import Logits


class _Options(TypedDict):
    """What the kernels must know of the head."""

    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float


def fused_dots(head: Logits, part: slice, ids: Tensor) -> tuple[Tensor, Tensor]:
    """As `Logits.at_ids`, ids that are not here being negative."""
    from deltad.probes.triton import dots

    z, spread = dots(head.hidden[part], head.weight, ids, **_options(head))
    return z.double(), spread.double()


def fused_sums(
    head: Logits, part: slice, ids: Tensor, pivot: Tensor, *, collision: bool, entropy: bool
) -> Tensor:
    """As `tail.tail_sums`."""
    from deltad.probes.triton import sums

    found = sums(
        head.hidden[part],
        head.weight,
        ids,
        pivot.to(head.dtype),
        collision=collision,
        entropy=entropy,
        **_options(head),
    )
    return torch.stack([torch.zeros_like(pivot) if each is None else each for each in found])


def _options(head: Logits) -> _Options:
    """Of the kernels."""
    transform = head.transform
    return {
        "bias": head.bias,
        "scale": transform.scale,
        "softcap": transform.softcap,
        "temperature": transform.temperature,
    }
