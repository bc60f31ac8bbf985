"""Weights as an engine in low precision would hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FP8_LARGEST = 448.0
"""Largest finite number of float8 e4m3."""


@torch.no_grad()
def round_weights(model: torch.nn.Module, kind: str) -> None:
    """Round all matrices of a model in place, as a serving engine in low precision would.

    Parameters
    ----------
    model
        Its parameters of two or more axes are rounded; norms and biases stay.
    kind
        "exact" leaves them, "bf16" rounds to bfloat16, "fp8" to float8 e4m3 with one scale a
        row (the row's largest magnitude becomes 448).
    """
    for parameter in model.parameters():
        if parameter.ndim < 2 or kind == "exact":
            continue
        if kind == "bf16":
            parameter.copy_(parameter.bfloat16())
            continue
        scale = parameter.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / FP8_LARGEST
        parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).to(parameter.dtype) * scale)


@contextmanager
def rounded(model: torch.nn.Module, kind: str) -> Iterator[None]:
    """Round the model's matrices for a while."""
    if kind == "exact":
        yield
        return
    kept = [value.detach().clone() for value in model.parameters()]
    round_weights(model, kind)
    try:
        yield
    finally:
        with torch.no_grad():
            for value, saved in zip(model.parameters(), kept, strict=True):
                value.copy_(saved)
