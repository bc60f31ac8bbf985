"""What a readout refuses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deltad._checks import is_integer, is_real
from deltad.probes.errors import ProbeError


def check_shapes(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    rows: int,
    bias: Tensor | None,
) -> None:
    """Refuse shapes that do not match, and ids that the head has no row for."""
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ProbeError(
            "`hidden` (token, hidden) and `head_weight` (vocab, hidden) must agree in their last "
            f"axis, got shapes {tuple(hidden.shape)} and {tuple(head_weight.shape)}"
        )
    if ids.ndim != 2 or ids.shape[0] != hidden.shape[0]:
        raise ProbeError(
            f"`ids` must have shape ({hidden.shape[0]}, id), a row for each hidden state; "
            f"got {tuple(ids.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ProbeError(f"`ids` must be int32 or int64, got {ids.dtype}")
    if ids.numel() and int(ids.max()) >= rows:
        raise ProbeError(f"`ids` must be below {rows}, the rows of the head; got {int(ids.max())}")
    if bias is not None and bias.shape != head_weight.shape[:1]:
        raise ProbeError(
            f"`bias` must have shape ({head_weight.shape[0]},), got {tuple(bias.shape)}"
        )


def check_options(
    softcap: float | None,
    temperature: float,
    token_chunk: int,
    vocab_chunk: int,
    *,
    scale: float = 1.0,
    workers: int = 1,
    exclusive: bool | None = None,
) -> None:
    """Refuse options that must be positive and are not, and a scale that wipes out the logits."""
    numbers: dict[str, Any] = {"temperature": temperature}
    if softcap is not None:
        numbers["softcap"] = softcap
    for name, value in numbers.items():
        if not is_real(value) or not 0 < value < math.inf:
            raise ProbeError(f"`{name}` must be positive and finite, got {value!r}")
    counts: dict[str, Any] = {
        "token_chunk": token_chunk,
        "vocab_chunk": vocab_chunk,
        "workers": workers,
    }
    for name, value in counts.items():
        if not is_integer(value) or value < 1:
            raise ProbeError(f"`{name}` must be positive and an integer, got {value!r}")
    if not isinstance(exclusive, bool | None):
        raise ProbeError(f"`exclusive` must be True, False or None, got {exclusive!r}")
    factor: Any = scale
    if not is_real(factor) or not math.isfinite(factor):
        raise ProbeError(f"`scale` must be finite, got {factor!r}")
    if factor == 0:
        raise ProbeError("`scale` must not be 0: all logits would be equal")
