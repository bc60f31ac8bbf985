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
from .heads import IDS, Inputs, Size
from .measure import Times, interleaved, peak_extra_mb
from .row import Row, asked, missing

SIZES: Final = (Size(1024, 151936, 1024), Size(576, 49152, 2048))
QUICK: Final = (Size(64, 6144, 64), Size(32, 4096, 64))
LIMITS: Final = {"bf16": (1.6, 2.6), "float32": (1.1, 1.3)}
PEERS: Final[Mapping[Anchor, float]] = {LOG_SOFTMAX: 0.5, LIGER: 0.9, PRIME_RL: 0.4, TRL: 0.5}

_SLICE: Final = 8
"""Share of the vocabulary whose bf16 product is timed where the processor does it in software."""

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


def _product(inputs: Inputs, vocab: int) -> Callable[[], Any]:
    """The bare matrix product over some of the vocabulary, into a buffer that is used again."""
    buffer = inputs.hidden.new_empty(len(inputs.hidden), vocab)
    return partial(torch.mm, inputs.hidden, inputs.weight[:vocab].T, out=buffer)


def _against_products(size: Size, place: int) -> Iterator[Row]:
    """R1 and R2: bf16 and float32 against their own bare product, side by side."""
    wide = Inputs.make(size, torch.float32)
    half = Inputs(wide.hidden.bfloat16(), wide.weight.bfloat16(), wide.ids)
    native = multiplies_bfloat16()
    part = size.vocab if native else size.vocab // _SLICE
    things: Things = {
        "bf16": partial(_read, half),
        "float32": partial(_read, wide),
        "bf16 product": _product(half, part),
        "float32 product": _product(wide, size.vocab),
    }
    if not native:
        things["half of that"] = _product(half, part // 2)
    times = interleaved(things)

    def absolute(name: str, share: float = 1.0) -> str:
        return f"{name} {times.median(name) / share / size.logits * 1e9:.2f} ns/logit"

    share = part / size.vocab
    ratio = times.ratio("bf16", "bf16 product") * share
    low, high = times.spread("bf16", "bf16 product")
    sliced = ""
    if not native:
        linear = times.ratio("bf16 product", "half of that")
        sliced = (
            "; this processor multiplies bf16 in software, so its product was timed over 1/"
            f"{_SLICE} of the ids and multiplied up (a slice twice as wide took {linear:.2f} × as "
            "long)"
        )
    yield Row(
        id=f"R1 bf16 {size}",
        what=f"readout of {IDS} ids with collision / bare bf16 product, T {size.tokens}",
        limit=LIMITS["bf16"][place],
        figure=ratio,
        spread=(low * share, high * share),
        note=f"{absolute('bf16')}, {absolute('bf16 product', share)}{sliced}",
    )
    if not native:
        yield Row(
            id=f"R1 bf16 {size} float32",
            what=f"the same / bare float32 product, T {size.tokens}",
            limit=LIMITS["bf16"][place],
            figure=times.ratio("bf16", "float32 product"),
            spread=times.spread("bf16", "float32 product"),
            note="the fastest product that this processor has",
        )
    yield Row(
        id=f"R2 float32 {size}",
        what=f"readout of {IDS} ids with collision / bare float32 product, T {size.tokens}",
        limit=LIMITS["float32"][place],
        figure=times.ratio("float32", "float32 product"),
        spread=times.spread("float32", "float32 product"),
        note=f"{absolute('float32')}, {absolute('float32 product')}",
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
            note=f"{anchor.method}; {anchor.source}; {reads}; {_seconds(times, anchor.name)}"
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
        note=f"{ours:.1f} MB against {theirs:.0f} MB (its logits filled without a product)",
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
        note=f"with entropy too (off by default) {times.ratio('entropy', 'plain'):.2f} ×; from "
        f"logits that exist already (hybrid) {times.ratio('hybrid', 'plain'):.2f} ×, "
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
        note=f"{times.median('one'):.2f} s against {times.median('two'):.2f} s; same bits; "
        "needs a second core that is idle",
    )
