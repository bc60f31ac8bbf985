"""In which precision products of hidden states and head are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from deltad.probes.errors import ProbeError

Product = Literal["converted", "rounded", "widened", "fused"]
"""How a tile of logits is made; see `product_of`."""

PRODUCTS: Final[tuple[Product, ...]] = get_args(Product)


def wide_dtype(hidden: Tensor, head_weight: Tensor) -> torch.dtype:
    """Float32, or float64 where one of the two is."""
    both = torch.promote_types(hidden.dtype, head_weight.dtype)
    return torch.promote_types(both, torch.float32)


def product_of(
    hidden: Tensor,
    head_weight: Tensor,
    *,
    plain: bool,
    fusable: bool,
    asked: Product | None = None,
) -> Product:
    """Decide how tiles of logits are made, by what the device can multiply.

    - "converted": both are converted to float32 and multiplied there, a tile of the head at a
      time. Exact but for float32 rounding; the only way for float32, mixed dtypes and float16
      on a CPU, and the fastest for bfloat16 on a CPU that does not multiply it natively (AVX2:
      a seventh of the time).
    - "rounded": bfloat16 products, summed in float32 by the hardware and then rounded to
      bfloat16. On CPUs with AMX or AVX512-BF16. Rounding comes after the pivot is taken off,
      so it is relative to the distance from the mode.
    - "widened": products of half precision written as float32. On CUDA.
    - "fused": no tiles in memory at all, but the kernels of `deltad.probes.triton`. On CUDA where
      Triton is installed.

    Parameters
    ----------
    hidden, head_weight : Tensor
        What is multiplied.
    plain : bool
        Whether the logits are a multiple of W h and nothing more; "rounded" needs it.
    fusable : bool
        Whether the kernels can take it.
    asked : Product, optional
        Take this one.

    Returns
    -------
    Product
        One of `PRODUCTS`.

    Raises
    ------
    ProbeError
        The one asked for cannot make these logits.
    """
    half = hidden.dtype == head_weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    bfloat16 = half and hidden.dtype == torch.bfloat16 and plain
    widens = half and hidden.is_cuda and torch.version.hip is None
    if asked is None:
        if fusable and hidden.is_cuda:
            return "fused"
        if widens:
            return "widened"
        native = hidden.device.type == "cpu" and multiplies_bfloat16()
        return "rounded" if bfloat16 and native else "converted"
    if asked not in PRODUCTS:
        raise ProbeError(f"`product` must be one of {', '.join(PRODUCTS)}, got {asked!r}")
    possible = {"converted": True, "rounded": bfloat16, "widened": widens, "fused": fusable}
    if not possible[asked]:
        raise ProbeError(
            f"`product` cannot be {asked!r} for hidden states of {hidden.dtype} and a head of "
            f"{head_weight.dtype} on {hidden.device}"
            + ("" if plain else " whose logits are more than a multiple of W h")
        )
    return asked


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, bool)() for name in probes)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Float32 products in float32: no autocast, no TF32 or bfloat16 inside matrix products."""
    mkldnn: Any = torch.backends.mkldnn  # its stubs leave `matmul` out
    backends: list[Any] = [mkldnn.matmul, torch.backends.cuda.matmul]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
