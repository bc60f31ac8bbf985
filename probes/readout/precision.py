"""Exact products of hidden states and head, whatever precision the process allows elsewhere.

Torch keeps one setting per process for the precision inside float32 matrix products. The readout
needs it at full precision, or, for numbers that are bfloat16 already, may lower it to use the
processor's bfloat16 arithmetic: such products are exact in both. Either way the setting is changed
only while no other thread can be multiplying, since that thread's products would change with it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_IDLE_THREADS: Final = ("tqdm", "tensorboard")
"""Packages whose own classes of threads never multiply tensors: a progress bar, a log."""

_OUR_THREADS: Final = "deltad "
"""How the names of our own threads begin; none of them multiplies tensors but the readout's."""


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16, and oneDNN may use them."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return _onednn_takes_bfloat16() and any(getattr(torch.cpu, name, bool)() for name in probes)


def _onednn_takes_bfloat16() -> bool:
    """Whether oneDNN is there and multiplies bfloat16; `ONEDNN_MAX_CPU_ISA` can forbid it."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_exclusive() -> bool:
    """Whether no other thread of this process can be multiplying tensors.

    Threads that Python knows of count, but for our own and those of progress bars and logs.
    """
    return not any(
        thread is not threading.current_thread()
        and not thread.name.startswith(_OUR_THREADS)
        and type(thread).__module__.partition(".")[0] not in _IDLE_THREADS
        for thread in threading.enumerate()
    )


@contextmanager
def exact_products(
    *operands: Tensor, values_only: bool = False, exclusive: bool | None = None
) -> Iterator[torch.dtype]:
    """Make products of these tensors exact but for the rounding of float32 sums.

    Within, autocast is off and no float32 product is rounded to TF32 or bfloat16 inside.

    Parameters
    ----------
    *operands : Tensor
        All that is multiplied within, on one device.
    values_only : bool
        No derivative is taken within, so that the operands are all that is multiplied. Only then
        bfloat16 operands may be multiplied by a CPU's bfloat16 arithmetic.
    exclusive : bool, optional
        Whether no other thread multiplies tensors meanwhile; by default `is_exclusive()`.

    Yields
    ------
    torch.dtype
        What to convert the operands to: float32, or float64 where one of them is, or where the
        process has lowered the precision of float32 products and another thread relies on it.
    """
    device = operands[0].device
    dtypes = {each.dtype for each in operands}
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    exact = {"ieee", "none"}
    if values_only and dtypes == {torch.bfloat16}:
        exact |= {"bf16", "tf32"}
    elif values_only and dtypes <= {torch.bfloat16, torch.float16}:
        exact.add("tf32")  # it holds all digits of either
    alone = is_exclusive() if exclusive is None else exclusive
    mkldnn: Any = torch.backends.mkldnn  # its stubs leave `matmul` out
    switch = {"cpu": mkldnn.matmul, "cuda": torch.backends.cuda.matmul}.get(device.type)
    with ExitStack() as put_back, torch.autocast(device.type, enabled=False):
        if device.type == "cpu" and alone and "bf16" in exact and multiplies_bfloat16():
            put_back.callback(_set(mkldnn.matmul, mkldnn, "bf16"))
        elif switch is not None and switch.fp32_precision not in exact:
            if not alone:
                dtype = torch.float64
            elif device.type == "cpu":
                put_back.callback(_set(mkldnn.matmul, mkldnn, "ieee"))
            else:
                put_back.callback(_lift_tf32())
        yield dtype


def _set(switch: Any, above: Any, precision: str) -> Callable[[], None]:
    """Set one switch; the function returned sets it back, to inheriting where it inherits."""
    before = "none" if _inherits(switch, above) else switch.fp32_precision
    switch.fp32_precision = precision
    return functools.partial(setattr, switch, "fp32_precision", before)


def _inherits(switch: Any, above: Any) -> bool:
    """Whether a switch follows those above it, which torch does not tell.

    Where it agrees with the one for all backends, that is moved for a moment to see.
    """
    everything: Any = torch.backends
    value, general = switch.fp32_precision, everything.fp32_precision
    if value != above.fp32_precision:
        return False
    if value == "none" or value != general:
        return True
    everything.fp32_precision = moved = "tf32" if value == "ieee" else "ieee"
    follows: bool = switch.fp32_precision == moved
    everything.fp32_precision = general
    return follows


def _lift_tf32() -> Callable[[], None]:
    """Forbid TF32 on CUDA; the function returned allows again what was allowed.

    Torch has an older switch for the same, and raises wherever both are read and differ, in its
    profiler and compiler for instance. So where the older one was used, it is set too.
    """
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switches alone were used
        older = "highest"
    mkldnn: Any = torch.backends.mkldnn
    put_back = ExitStack()
    put_back.callback(_set(torch.backends.cuda.matmul, torch.backends.cudnn, "ieee"))
    if older != "highest":
        # It moves both newer switches along with itself, so it is put back before them.
        put_back.callback(_set(mkldnn.matmul, mkldnn, mkldnn.matmul.fp32_precision))
        torch.set_float32_matmul_precision("highest")
        put_back.callback(torch.set_float32_matmul_precision, older)
    return put_back.close
