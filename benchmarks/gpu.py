"""The readout on a GPU beside a matrix product, Liger and cut-cross-entropy."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from deltad.probes.readout import readout
from deltad.probes.triton import supports

from .anchors import LIGER, float64_head
from .heads import IDS, Inputs, Size
from .measure import interleaved
from .row import Row, asked, missing

SIZE: Final = Size(1024, 151936, 4096)
QUICK: Final = Size(256, 8192, 512)
ROUNDS: Final = 20

_TIME = "GPU time"
_MEMORY = "GPU memory"
_PEERS: Final = {"Liger": "GPU Liger", "cut-cross-entropy": "GPU cut-cross-entropy"}
_ACCURACY = "GPU accuracy"


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    if not asked(prefixes, "GPU"):
        return
    size = QUICK if quick else SIZE
    whats = {
        _TIME: (f"readout of {IDS} ids / torch.mm into [T, V], bf16 {size} T {size.tokens}", 1.5),
        _MEMORY: (f"readout beyond its inputs, bf16 {size} T {size.tokens}", 64.0),
        **{
            id: (f"readout of {IDS} ids / {name} of one, bf16 {size} T {size.tokens}", 1.0)
            for name, id in _PEERS.items()
        },
        _ACCURACY: ("mean |error of log π| against a float64 head, 256 tokens", 1e-5),
    }
    if why := _cannot():
        for id, (what, limit) in whats.items():
            unit = {_MEMORY: "MB", _ACCURACY: "nats"}.get(id, "×")
            yield missing(id, what, limit, why, unit=unit)
        return
    inputs = Inputs.make(size, torch.bfloat16, "cuda")
    yield from _times(inputs, whats)
    what, limit = whats[_MEMORY]
    yield Row(id=_MEMORY, what=what, limit=limit, figure=_extra_mb(inputs), unit="MB")
    some = inputs.of_tokens(256)
    error = _ours(some) - float64_head(some.hidden, some.weight, some.ids)
    what, limit = whats[_ACCURACY]
    yield Row(
        id=_ACCURACY, what=what, limit=limit, figure=float(error.abs().mean()), unit="nats",
        note=f"largest {float(error.abs().max()):.1e}",
    )  # fmt: skip


def _cannot() -> str:
    """Why nothing can be measured; empty where it can."""
    if not torch.cuda.is_available():
        return (
            "no CUDA device here; the kernels are tested in Triton's interpreter, and compiled "
            "for compute capability 8.0 and 9.0, without one"
        )
    inputs = Inputs.make(Size(16, 32, 2), torch.bfloat16, "cuda")
    if not supports(inputs.hidden, inputs.weight, inputs.ids):
        return "Triton is not installed: pip install 'deltad[triton]'"
    return ""


def _ours(inputs: Inputs) -> torch.Tensor:
    """The readout through the kernels, which these goals are for."""
    return readout(inputs.hidden, inputs.weight, inputs.ids, fused=True).logprobs


def _times(inputs: Inputs, whats: dict[str, tuple[str, float]]) -> Iterator[Row]:
    """Wall clock between synchronisations, the tiles' sides side by side."""
    buffer = inputs.hidden.new_empty(len(inputs.hidden), len(inputs.weight))
    one = inputs.ids[:, :1]
    things: dict[str, Callable[[], Any]] = {
        "ours": partial(_ours, inputs),
        "tiles": partial(readout, inputs.hidden, inputs.weight, inputs.ids),
        "torch.mm": partial(torch.mm, inputs.hidden, inputs.weight.T, out=buffer),
    }
    if LIGER.package is not None:
        things["Liger"] = partial(LIGER.read, inputs.hidden, inputs.weight, one)
    if importlib.util.find_spec("cut_cross_entropy"):
        things["cut-cross-entropy"] = partial(_cut_cross_entropy, inputs)
    times = interleaved(things | _tiles(inputs), rounds=ROUNDS, clock=_synchronised)
    milliseconds = {name: 1e3 * times.median(name) for name in times.seconds}
    device = torch.cuda.get_device_name()
    sides = ", ".join(
        f"{name} {taken:.2f} ms" for name, taken in milliseconds.items() if name.startswith("sums")
    )
    for name, id in {"torch.mm": _TIME, **_PEERS}.items():
        what, limit = whats[id]
        if name not in things:
            yield missing(id, what, limit, f"{name} is not installed")
            continue
        note = f"{device}: {milliseconds['ours']:.2f} ms against {milliseconds[name]:.2f} ms"
        note += f" (without the kernels, as the probe reads, {milliseconds['tiles']:.2f} ms)"
        yield Row(
            id=id, what=what, limit=limit, figure=times.ratio("ours", name),
            spread=times.spread("ours", name), note=f"{note}; {sides}" if id == _TIME else note,
        )  # fmt: skip


def _tiles(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """The kernel of the sums with other sides of its tiles, so that defaults can be mended."""
    from deltad.probes.triton.launch import Blocks, sums

    pivot = torch.full((len(inputs.hidden),), 20.0, device="cuda")
    return {
        f"sums {tokens}×{vocab}×{hidden}, {warps} warps, {stages} stages": partial(
            sums, inputs.hidden, inputs.weight, inputs.ids, pivot,
            blocks=Blocks(tokens, vocab, hidden, warps, stages),
        )
        for tokens, vocab, hidden, warps, stages in (
            (128, 128, 32, 4, 3), (128, 128, 64, 8, 2), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3),
        )
        if stages * 2 * hidden * (tokens + vocab) <= _shared_memory()
    }  # fmt: skip


def _shared_memory() -> int:
    """Bytes of shared memory that a program may take."""
    properties: Any = torch.cuda.get_device_properties("cuda")
    return int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


def _cut_cross_entropy(inputs: Inputs) -> torch.Tensor:
    """Log-probs of one id a token from the package of Apple."""
    from cut_cross_entropy import linear_cross_entropy

    loss: torch.Tensor = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.ids[:, 0], reduction="none"
    )
    return -loss


def _extra_mb(inputs: Inputs) -> float:
    """Peak of the allocator during a readout, less what was there before."""
    _ours(inputs)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _ours(inputs)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def _synchronised() -> float:
    """Seconds, once the device has done what it was told."""
    torch.cuda.synchronize()
    return time.perf_counter()
