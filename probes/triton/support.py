"""Whether the kernels can take a readout; needs no Triton to be asked."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_IDS: Final = 256
"""Most ids a token: each is masked out of the sums by a pass over its tile."""


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU and without a compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def installed() -> bool:
    """Whether Triton is there, the extra `triton`."""
    return importlib.util.find_spec("triton") is not None


def supports(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    low_rank: Sequence[tuple[Tensor, Tensor]] = (),
) -> bool:
    """Whether `dots` and `sums` can take these arguments.

    Parameters
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head.
    weight : Tensor, shape (vocab, hidden)
        Of the head.
    ids : Tensor of int, shape (token, id)
        Where log-probs are wanted.
    low_rank : sequence
        What adapters of the head add, which the kernels know nothing of.

    Returns
    -------
    bool
        True on a CUDA device (or in the interpreter) with Triton, where both are bfloat16,
        float16 or float32 with contiguous rows, for at most 256 ids a token.
    """
    return (
        (hidden.is_cuda or (interpreting() and hidden.device.type == "cpu"))
        and hidden.device == weight.device == ids.device
        and all(each.dtype in _DTYPES and each.stride(1) == 1 for each in (hidden, weight))
        and min(*hidden.shape, *weight.shape) > 0
        and 0 < ids.shape[1] <= _IDS
        and not low_rank
        and installed()
    )
