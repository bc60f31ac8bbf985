"""Cost against tokens, K, vocabulary, seeds and ranks: what grows with what, and how fast.

`python -m benchmarks.scaling --into docs/scale.md` makes the tables of that page: what is
measured here on one thread, and what follows for 10⁹ to 10¹¹ tokens if cost stays linear.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltad.analysis import Question, rate_table
from deltad.analysis.backends import SPAN_ROWS, LocalBackend
from deltad.analysis.statistics import bootstrap_mean
from deltad.dumps import Dump, DumpWriter, Near

from .measure import machine, one_thread
from .storage import Case, Rows, synthetic

CORES: Final = 64
LINK: Final = 1.25e9
"""Bytes a second that a machine reads from a store: 10 Gbit/s."""

SIZES: Final = (1e9, 1e10, 1e11)
"""Tokens of the modelled dumps."""

MARKS: Final = ("<!-- scaling: begin -->", "<!-- scaling: end -->")

RAISED: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

PER_TOKEN: Final = "ns a token"
READING: Final = "µs a token"
BYTES: Final = "bytes a token"


@dataclass(frozen=True)
class Line:
    """One measured point.

    Attributes
    ----------
    what : str
        What was varied.
    value : str
        To what.
    figure : float
        What it costs.
    unit : str
        Of the figure.
    """

    what: str
    value: str
    figure: float
    unit: str


def seconds(thing: Callable[[], Any], rounds: int) -> float:
    """CPU seconds of this process, the median of some rounds after one that is not counted."""
    found = []
    for counted in range(rounds + 1):
        begin = time.process_time()
        thing()
        if counted:
            found.append(time.process_time() - begin)
    return statistics.median(found)


def first(case: Case, rows: int) -> Case:
    """The first rows."""
    mine = {name: values[:rows] for name, values in case.rows.items()}
    return Case(case.name, case.metadata, mine)


def cut(case: Case, top_k: int) -> Case:
    """The same rows with shorter lists."""
    rows: Rows = {
        name: values[:, :top_k] if values.ndim == 2 else values
        for name, values in case.rows.items()
    }
    return Case(case.name, replace(case.metadata, top_k=top_k), rows)


def dump_of(case: Case, run: Path, *, seeds: int = 1, ranks: int = 1, **options: Any) -> Dump:
    """Write rows, dealt out evenly, and open them."""
    places = [(seed, rank) for seed in range(seeds) for rank in range(ranks)]
    for (seed, rank), mine in zip(
        places, np.array_split(np.arange(len(case)), len(places)), strict=True
    ):
        metadata = replace(case.metadata, ranks=ranks)
        with DumpWriter(
            run, arm="none", seed=seed, rank=rank, metadata=metadata, **options
        ) as writer:
            writer.append({name: values[mine] for name, values in case.rows.items()})
    return Dump.open(run)


def bytes_of(dump: Dump) -> int:
    """Size of the files."""
    return sum(part.path.stat().st_size for part in dump.parts)


def count(dump: Dump, *, recompute: bool) -> None:
    """Count a pair of criteria, without the statistics over seeds."""
    rate_table(dump, Question(), backend=LocalBackend(1), recompute=recompute)


def measured(folder: Path, quick: bool) -> Iterator[Line]:
    """Every measured point."""
    rounds, rows = (1, 32_768) if quick else (5, 262_144)
    whole = synthetic(rows)
    for fewer in (rows // 4, rows // 2, rows):
        dump = dump_of(first(whole, fewer), folder / f"tokens-{fewer}")
        for source, recompute in (("vectors", True), ("scalars", False)):
            spent = seconds(partial(count, dump, recompute=recompute), rounds)
            yield Line(f"tokens, from {source}", f"{fewer:,}", 1e9 * spent / fewer, PER_TOKEN)
    for top_k in (5, 10, 20):
        dump = dump_of(cut(whole, top_k), folder / f"k-{top_k}")
        spent = seconds(partial(count, dump, recompute=True), rounds)
        yield Line("K, from vectors", str(top_k), 1e9 * spent / rows, PER_TOKEN)
        yield Line("K, size", str(top_k), bytes_of(dump) / rows, BYTES)
    near = dump_of(whole, folder / "near", vectors=Near())
    yield Line("vectors near the region alone, size", "20", bytes_of(near) / rows, BYTES)
    few = first(whole, 8_192)
    for ranks in (1, 8, 64):
        run = folder / f"ranks-{ranks}"
        dump = dump_of(few, run, ranks=ranks)
        files = f"{ranks} files"
        yield Line("ranks, opening", files, 1e3 * seconds(partial(Dump.open, run), rounds), "ms")
        spent = seconds(partial(count, dump, recompute=True), rounds)
        yield Line("ranks, counting 8,192 tokens", files, 1e3 * spent, "ms")
    for seeds in (8, 64, 512):
        rates = np.random.default_rng(0).random(seeds)
        spent = seconds(partial(bootstrap_mean, rates, seed=0), rounds)
        yield Line("seeds, one interval", str(seeds), 1e3 * spent, "ms")
    yield from readouts(quick, rounds)


def readouts(quick: bool, rounds: int) -> Iterator[Line]:
    """Reading log-probs from hidden states, by vocabulary."""
    import torch

    from deltad.probes.readout import readout

    tokens, hidden = (64, 256) if quick else (256, 576)
    for vocab in (12_288, 24_576, 49_152):
        states = torch.randn(tokens, hidden)
        weight = torch.randn(vocab, hidden) / hidden**0.5
        ids = torch.randint(vocab, (tokens, 21))
        spent = seconds(partial(readout, states, weight, ids), rounds)
        yield Line(f"vocabulary, reading, H {hidden}", f"{vocab:,}", 1e6 * spent / tokens, READING)


def modelled(lines: list[Line]) -> Iterator[tuple[str, ...]]:
    """Rows of the model: what is stored, what it takes to count, and to carry all of it."""
    last = {(line.what, line.unit): line.figure for line in lines}
    near = "vectors near the region alone, size"
    for what, size, spent in (
        ("all vectors", last["K, size", BYTES], last["tokens, from vectors", PER_TOKEN]),
        ("scalars, near vectors", last[near, BYTES], last["tokens, from scalars", PER_TOKEN]),
    ):
        for tokens in SIZES:
            hours = tokens * spent / 1e9 / 3600
            yield (
                f"10{str(round(math.log10(tokens))).translate(RAISED)}",
                what,
                f"{number(tokens * size / 1e12)} TB",
                f"{tokens / SPAN_ROWS:,.0f}",
                f"{number(hours)} h",
                f"{number(60 * hours / CORES)} min",
                f"{number(tokens * size / LINK / 60)} min",
            )


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    every = (header, ("---",) * len(header), *rows)
    return "\n".join(f"| {' | '.join(each)} |" for each in every)


def report(quick: bool) -> str:
    """Both tables, and what they were measured on."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    with tempfile.TemporaryDirectory(prefix="deltad-scaling-") as folder:
        lines = list(measured(Path(folder), quick))
    rows = ((each.what, each.value, f"{number(each.figure)} {each.unit}") for each in lines)
    header = ("tokens", "stored", "size", "spans", "CPU", f"on {CORES} cores", "over one link")
    return (
        f"Measured, CPU time of one thread ({about}):\n\n"
        f"{table(('varied', 'to', 'cost'), rows)}\n\n"
        f"Modelled ({CORES} cores, one link of {LINK * 8 / 1e9:g} Gbit/s):\n\n"
        f"{table(header, modelled(lines))}\n"
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print or put into a page."""
    one_thread()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows: to see that it runs")
    parser.add_argument("--into", type=Path, help="page that holds the tables between its marks")
    given = parser.parse_args(arguments)
    text = report(given.quick)
    if given.into is None:
        print(text)
        return
    page = given.into.read_text(encoding="utf-8")
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    made = f"{before}{MARKS[0]}\n{text}{MARKS[1]}{after}"
    given.into.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
