"""R1 to R5 and R7: time and memory of the readout beside matrix products and other heads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch

from deltad.probes.readout import Readout, read_logits, readout
from deltad.probes.readout.precision import multiplies_bfloat16

from .anchors import LIGER, LOG_SOFTMAX, PRIME_RL, TRL, Anchor
from .heads import IDS, Inputs, Size, arithmetic
from .measure import Times, interleaved, peak_extra_mb
from .row import Row, asked, missing

SIZES: Final = (Size(1024, 151936, 1024), Size(576, 49152, 2048))
QUICK: Final = (Size(64, 6144, 64), Size(32, 4096, 64))
LIMITS: Final = {"bf16": (2.6, 2.9), "float32": (1.1, 1.3)}
"""Against the bare product in the same dtype, by size."""

LIMIT_WITHOUT_BF16: Final = 1.1
"""Of bf16 inputs against the float32 product, where the processor has no bf16 arithmetic."""

PEERS: Final[Mapping[Anchor, float]] = {LOG_SOFTMAX: 0.5, LIGER: 0.9, PRIME_RL: 0.4, TRL: 0.5}

Things = dict[str, Callable[[], Any]]


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    sizes = QUICK if quick else SIZES
    if asked(prefixes, "R1", "R2"):
        for place, size in enumerate(sizes):
            yield from _against_products(size, place)
    small = Size(sizes[1].hidden, sizes[1].vocab, min(1024, sizes[1].tokens))
    if asked(prefixes, "R3"):
        yield from _against_peers(small, torch.bfloat16)
        yield from _against_peers(small, torch.float32)
    if asked(prefixes, "R4"):
        yield from _memory(Size(sizes[0].hidden, sizes[0].vocab, 4 * sizes[0].tokens))
    if asked(prefixes, "R5"):
        yield _extras(sizes[1])
    if asked(prefixes, "R7"):
        yield _workers(sizes[1])


def _read(inputs: Inputs, **options: Any) -> Readout:
    """The readout with its defaults."""
    return readout(inputs.hidden, inputs.weight, inputs.ids, **options)


def _product(inputs: Inputs) -> Callable[[], Any]:
    """The bare matrix product, into a buffer that is used again."""
    buffer = inputs.hidden.new_empty(len(inputs.hidden), len(inputs.weight))
    return partial(torch.mm, inputs.hidden, inputs.weight.T, out=buffer)


def _against_products(size: Size, place: int) -> Iterator[Row]:
    """R1 and R2: bf16 and float32 against bare products, side by side.

    A processor without bf16 arithmetic multiplies bf16 in software, tens of times slower; there
    only the float32 product is a measure.
    """
    wide = Inputs.make(size, torch.float32)
    half = Inputs(wide.hidden.bfloat16(), wide.weight.bfloat16(), wide.ids)
    things: Things = {
        "bf16": partial(_read, half),
        "float32": partial(_read, wide),
        "float32 product": _product(wide),
    }
    if multiplies_bfloat16():
        things["bf16 product"] = _product(half)
    times = interleaved(things)
    reads = f"readout of {IDS} ids with collision"

    def against(id: str, ours: str, product: str, limit: float, dtype: torch.dtype) -> Row:
        nanoseconds = ", ".join(
            f"{name} {times.median(name) / size.logits * 1e9:.2f} ns/logit"
            for name in (ours, product)
        )
        return Row(
            id=f"{id} {size}",
            what=f"{reads} of {ours} inputs / bare {product}, T {size.tokens}",
            limit=limit,
            figure=times.ratio(ours, product),
            spread=times.spread(ours, product),
            note=f"{arithmetic(dtype)}; {nanoseconds}",
        )

    if multiplies_bfloat16():
        yield against("R1 bf16", "bf16", "bf16 product", LIMITS["bf16"][place], torch.bfloat16)
    else:
        yield against("R1 bf16", "bf16", "float32 product", LIMIT_WITHOUT_BF16, torch.bfloat16)
    yield against(
        "R2 float32", "float32", "float32 product", LIMITS["float32"][place], torch.float32
    )


def _against_peers(size: Size, dtype: torch.dtype) -> Iterator[Row]:
    """R3: other heads, each as its users call it: one id a token, ours all of them."""
    inputs = Inputs.make(size, dtype)
    one = inputs.ids[:, :1]
    things: Things = {"ours": partial(_read, inputs)}
    for anchor in PEERS:
        ids = inputs.ids if anchor is LOG_SOFTMAX else one
        things[anchor.name] = partial(anchor.read, inputs.hidden, inputs.weight, ids)
    times = interleaved(things)
    kind = "bf16" if dtype == torch.bfloat16 else "float32"
    # The goals are for bf16; in float32, where nothing is rounded, only the first has one.
    limits = PEERS if kind == "bf16" else {LOG_SOFTMAX: 0.9}
    others = "; ".join(
        f"{anchor.name} {times.ratio('ours', anchor.name):.2f} ×"
        for anchor in PEERS
        if anchor not in limits
    )
    for anchor, limit in limits.items():
        reads = "all ids" if anchor is LOG_SOFTMAX else "1 id a token, ours " + str(IDS)
        yield Row(
            id=f"R3 {kind} {anchor.name}",
            what=f"readout / {anchor.name}, {size} T {size.tokens}",
            limit=limit,
            figure=times.ratio("ours", anchor.name),
            spread=times.spread("ours", anchor.name),
            note=f"{arithmetic(dtype)}; {anchor.method}; {anchor.source}; {reads}; "
            f"{_seconds(times, anchor.name)}"
            + (f"; against the others: {others}" if others else ""),
        )


def _seconds(times: Times, name: str) -> str:
    """Medians of ours and one other."""
    return f"{times.median('ours'):.2f} s against {times.median(name):.2f} s"


def _memory(size: Size) -> Iterator[Row]:
    """R4: growth of the resident set in a forked child."""
    what = f"peak memory of the readout / float log_softmax, bf16 {size} T {size.tokens}"
    needed = 2 * 4 * size.logits  # two float32 matrices at once
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached()
    if free < 1.2 * needed:
        why = f"log_softmax alone needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        yield missing(f"R4 {size}", what, 0.01, why)
        return
    inputs = Inputs.make(size, torch.bfloat16)
    ours = peak_extra_mb(partial(_read, inputs))

    def log_softmax() -> None:
        # Memory is what counts: the logits are filled, not multiplied out.
        logits = torch.full((size.tokens, size.vocab), 0.5, dtype=torch.bfloat16)
        wide = logits.float()
        del logits
        wide.log_softmax(-1).gather(1, inputs.ids)

    theirs = peak_extra_mb(log_softmax)
    yield Row(
        id=f"R4 {size}",
        what=what,
        limit=0.01,
        figure=ours / theirs,
        note=f"{arithmetic(torch.bfloat16)}; {ours:.1f} MB against {theirs:.0f} MB (its logits "
        "filled without a product)",
    )
    yield Row(
        id=f"R4 {size} MB",
        what=f"peak memory of the readout beyond its inputs, bf16 {size} T {size.tokens}",
        limit=48,
        figure=ours,
        unit="MB",
        note="its result is 0.9 MB of it" if size.tokens == 4096 else "",
    )


def _cached() -> int:
    """Bytes of the page cache, which can be had."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["Cached"].split()[0]) * 1024


def _extras(size: Size) -> Row:
    """R5: collision against none; entropy and the hybrid form beside them."""
    inputs = Inputs.make(size, torch.bfloat16)
    logits = (inputs.hidden.float() @ inputs.weight.float().T).bfloat16()
    times = interleaved(
        {
            "plain": partial(_read, inputs, collision=False),
            "collision": partial(_read, inputs),
            "entropy": partial(_read, inputs, entropy=True),
            "hybrid": partial(read_logits, inputs.hidden, inputs.weight, logits, inputs.ids),
        }
    )
    return Row(
        id=f"R5 bf16 {size}",
        what=f"readout with collision / without, T {size.tokens}",
        limit=1.12,
        figure=times.ratio("collision", "plain"),
        spread=times.spread("collision", "plain"),
        note=f"{arithmetic(torch.bfloat16)}; with entropy too (off by default) "
        f"{times.ratio('entropy', 'plain'):.2f} ×; from logits that exist already (hybrid) "
        f"{times.ratio('hybrid', 'plain'):.2f} ×, "
        f"{times.median('hybrid') / size.logits * 1e9:.2f} ns/logit",
    )


def _workers(size: Size) -> Row:
    """R7: wall clock of two threads against one, with the same bits."""
    id, what = f"R7 bf16 {size}", f"wall clock with 2 workers / 1, T {size.tokens}"
    if (os.cpu_count() or 1) < 2:
        return missing(id, what, 0.65, "one core")
    inputs = Inputs.make(size, torch.bfloat16)
    one, two = _read(inputs), _read(inputs, workers=2)
    if not torch.equal(one.logprobs, two.logprobs):
        raise RuntimeError("two workers gave other bits than one")
    times = interleaved(
        {"one": partial(_read, inputs), "two": partial(_read, inputs, workers=2)},
        clock=time.perf_counter,
    )
    return Row(
        id=id,
        what=what,
        limit=0.65,
        figure=times.ratio("two", "one"),
        spread=times.spread("two", "one"),
        note=f"{arithmetic(torch.bfloat16)}; {times.median('one'):.2f} s against "
        f"{times.median('two'):.2f} s; same bits; "
        "needs a second core that is idle",
    )
