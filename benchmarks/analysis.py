"""Counting a dump: against decoding alone, against other tools, from scalars, and its memory.

The dumps are synthetic (`benchmarks.shaped`). A few files are made and stand in for all seeds by
hard links: every reader decodes each of them anew. Peers are programs of their own, on one
thread, whose counts must be ours; times are CPU seconds of whole processes, start and, for ours,
intervals and tests included, unless a row says otherwise.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deltad.analysis.backends import LocalBackend
from deltad.analysis.question import Question
from deltad.analysis.reading import Ask, read, topk_columns
from deltad.analysis.tables.rates import rate_table
from deltad.dumps import Dump, DumpWriter, Metadata

from .measure import Times, interleaved, interleaved_processes
from .row import Row, missing
from .shaped import TOP_K, VOCAB, Rows, shaped_rows

PEERS: Final = {
    "duckdb_wide": ("DuckDB on wide columns", "duckdb", 0.7),
    "duckdb_lists": ("DuckDB on lists (unnest, group by token)", "duckdb", 0.5),
    "polars_wide": ("Polars on wide columns (lazy, streaming)", "polars", 0.65),
}
PANDAS: Final = ("a pandas explode", 0.1)
DECODE: Final = 0.6
SCALARS: Final = 0.25
SCALARS_DUCKDB: Final = 1.1
MEMORY: Final = 300.0
ROOT: Final = Path(__file__).parents[1]

Counts = dict[str, list[int]]


@dataclass(frozen=True)
class Sizes:
    """How much is counted.

    Attributes
    ----------
    files, rows : int
        Files that are made, and rows a file.
    seeds : int
        Seeds, each one of the files.
    pandas_seeds : int
        Seeds that pandas counts; its time is scaled.
    rounds, process_rounds : int
        Rounds in this process, and of whole processes.
    many : int
        Seeds of the larger dump whose memory is measured.
    """

    files: int = 4
    rows: int = 100_000
    seeds: int = 61
    pandas_seeds: int = 1
    rounds: int = 5
    process_rounds: int = 5
    many: int = 600

    @property
    def total(self) -> str:
        """Rows in words."""
        return f"{self.seeds} × {self.rows} rows"


QUICK: Final = Sizes(2, 4_000, 3, 1, 1, 1, 9)


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    sizes = QUICK if quick else Sizes()
    parts: dict[str, Callable[[Path, Sizes], Iterator[Row]]] = {
        "A1": _decoding, "A2": _peers, "A3": _scalars, "A4": _memory
    }  # fmt: skip
    wanted = [
        part
        for name, part in parts.items()
        if not prefixes or any(name.startswith(each) or each.startswith(name) for each in prefixes)
    ]
    if not wanted:
        return
    folder = Path(tempfile.mkdtemp(prefix="deltad-benchmark-"))
    try:
        _make(folder, sizes)
        for part in wanted:
            for row in part(folder, sizes):
                if not prefixes or row.id.startswith(prefixes):
                    yield row
    finally:
        shutil.rmtree(folder)


def _decoding(folder: Path, sizes: Sizes) -> Iterator[Row]:
    """A1: rows a second beside decoding the same columns."""
    dump = Dump.open(folder / "files")
    question = Question().resolve(dump).question
    names = topk_columns(question.rules)
    rows = sizes.files * sizes.rows

    def decode(batch_rows: int, *, verify: bool) -> Callable[[], None]:
        def run() -> None:
            for part in dump.parts:
                with pq.ParquetFile(part.path, page_checksum_verification=verify) as file:
                    for _ in file.iter_batches(batch_rows, columns=names, use_threads=False):
                        pass

        return run

    times = interleaved(
        {
            "decode": decode(16_384, verify=True),
            "unverified": decode(16_384, verify=False),
            "ours": lambda: _read(dump, question, recompute=True),
        },
        rounds=sizes.rounds,
    )
    least, most = times.spread("decode", "ours")
    yield Row(
        id="A1",
        what="rows a second: the table from vectors, every value checked, against decoding the "
        "same columns",
        limit=DECODE,
        figure=times.ratio("decode", "ours"),
        at_least=True,
        spread=(least, most),
        note=f"ns a row: {_each(times, rows)}; the file's checksums verified in both, "
        f"{times.ratio('unverified', 'ours'):.2f} against decoding without",
    )


def _read(dump: Dump, question: Question, *, recompute: bool = False) -> None:
    """Count on one thread what a table is made of."""
    ask = Ask(question, question.rules, recompute=recompute, apart=True)
    read(dump, dump.arms, ask, backend=LocalBackend(1))


def _peers(folder: Path, sizes: Sizes) -> Iterator[Row]:
    """A2: whole processes beside other tools."""
    run, wide = folder / "run", folder / "wide"
    expected = _counted(run)
    commands: dict[str, list[str]] = {"ours": _ours(run, "--recompute")}
    for name, (_, package, _) in PEERS.items():
        if importlib.util.find_spec(package) is not None:
            where = run if name.endswith("lists") else wide
            commands[name] = _program(name, str(where))
            _same(name, _answer(commands[name]), expected)
    times = interleaved_processes(
        commands, rounds=sizes.process_rounds, environment=_environment(), cwd=ROOT, warm=True
    )
    seconds = {name: times.median(name) for name in commands}
    for name, (words, package, limit) in PEERS.items():
        id, what = f"A2 {name.replace('_', ' ')}", f"{sizes.total}: the table against {words}"
        if name not in commands:
            yield missing(id, what, limit, f"{package} is not installed")
            continue
        yield Row(
            id=id,
            what=what,
            limit=limit,
            figure=times.ratio("ours", name),
            spread=times.spread("ours", name),
            note=f"{seconds['ours']:.1f} against {seconds[name]:.1f} s; the same counts, seed by "
            "seed; ours checks every value too",
        )
    yield _pandas(run, sizes, seconds["ours"], expected)


def _pandas(run: Path, sizes: Sizes, ours: float, expected: Counts) -> Row:
    """The row beside pandas: a few seeds, their time without its start times all seeds."""
    id, what = "A2 pandas explode", f"{sizes.total}: the table against {PANDAS[0]}"
    if importlib.util.find_spec("pandas") is None:
        return missing(id, what, PANDAS[1], "pandas is not installed")
    seeds = [str(seed) for seed in range(sizes.pandas_seeds)]
    command = _program("pandas_explode", str(run))
    _same("pandas_explode", _answer([*command, *seeds]), {seed: expected[seed] for seed in seeds})
    times = interleaved_processes(
        {"start": command, "some": [*command, *seeds]},
        rounds=1,
        environment=_environment(),
        cwd=ROOT,
    )
    start, some = times.median("start"), times.median("some")
    every = start + (some - start) * sizes.seeds / len(seeds)
    return Row(
        id=id,
        what=what,
        limit=PANDAS[1],
        figure=ours / every,
        note=f"{ours:.1f} against {every:.0f} s, scaled from {len(seeds)} of {sizes.seeds} seeds",
    )


def _scalars(folder: Path, sizes: Sizes) -> Iterator[Row]:
    """A3: from derived columns."""
    run = folder / "run"
    commands = {"vectors": _ours(run, "--recompute"), "scalars": _ours(run)}
    _run(commands["scalars"])
    times = interleaved_processes(
        commands, rounds=sizes.process_rounds, environment=_environment(), cwd=ROOT, warm=True
    )
    yield Row(
        id="A3 vectors",
        what=f"{sizes.total}: the table from recorded scalars against the table from vectors",
        limit=SCALARS,
        figure=times.ratio("scalars", "vectors"),
        spread=times.spread("scalars", "vectors"),
        note=f"{times.median('scalars'):.2f} against {times.median('vectors'):.1f} s",
    )
    id, what = "A3 duckdb", f"{sizes.total}: opening and counting scalars against DuckDB"
    if importlib.util.find_spec("duckdb") is None:
        yield missing(id, what, SCALARS_DUCKDB, "duckdb is not installed")
        return
    command = _program("duckdb_scalars", str(run))
    _same("duckdb_scalars", _answer(command), _counted(run))
    ours: list[float] = []
    theirs: list[float] = []
    for counted in range(sizes.rounds + 1):
        begin = time.process_time()
        dump = Dump.open(run)
        _read(dump, Question().resolve(dump).question)
        taken = time.process_time() - begin
        said = float(_run(command).splitlines()[1])
        if counted:
            ours.append(taken)
            theirs.append(said)
    inside = Times({"ours": tuple(ours), "duckdb": tuple(theirs)})
    whole = interleaved_processes(
        {"ours": commands["scalars"], "duckdb": command},
        rounds=sizes.process_rounds,
        environment=_environment(),
        cwd=ROOT,
    )
    yield Row(
        id=id,
        what=what,
        limit=SCALARS_DUCKDB,
        figure=inside.ratio("ours", "duckdb"),
        spread=inside.spread("ours", "duckdb"),
        note=f"{inside.median('ours'):.2f} against {inside.median('duckdb'):.2f} s, imports left "
        f"out of both; whole processes, ours with intervals and tests, "
        f"{whole.median('ours'):.2f} against {whole.median('duckdb'):.2f} s",
    )


def _memory(folder: Path, sizes: Sizes) -> Iterator[Row]:
    """A4: peak of whole processes, which count on two threads or as many cores as there are."""
    for name, seeds in (("run", sizes.seeds), ("many", sizes.many)):
        run = folder / name
        if not run.exists():
            _link(folder / "files", run, seeds)
        begin = time.perf_counter()
        code = "from deltad.cli import main; main()"
        peak = _peak_mb(["-c", code, "table", str(run), "--recompute", "--quiet"])
        yield Row(
            id=f"A4 {seeds * sizes.rows}",
            what=f"peak memory of the table from vectors, {seeds * sizes.rows} rows",
            limit=MEMORY,
            figure=peak,
            unit="MB",
            note=f"{len(os.sched_getaffinity(0))} cores, {time.perf_counter() - begin:.0f} s; "
            f"{sizes.files} files stand in for {seeds}",
        )


def _make(folder: Path, sizes: Sizes) -> None:
    """Write the files as a dump, and as wide columns, and link them to all seeds."""
    for at in range(sizes.files):
        found = shaped_rows(sizes.rows, at)
        metadata = Metadata(top_k=TOP_K, vocab_size=VOCAB)
        with DumpWriter(folder / "files", arm="none", seed=at, metadata=metadata) as writer:
            writer.append(found)
        _write_wide(found, folder / "wide_files" / f"seed={at}" / "part-0-0.parquet")
    _link(folder / "files", folder / "run", sizes.seeds)
    _link(folder / "wide_files", folder / "wide", sizes.seeds)


def _write_wide(found: Rows, path: Path) -> None:
    """One column for each slot of each list, encoded as the dump is."""
    wanted = ("token_id", "advantage", "behavior_logprob", "pre_logprob", "post_logprob")
    columns: dict[str, Any] = {name: pa.array(found[name]) for name in wanted}
    for name, values in found.items():
        if values.ndim == 2:
            for slot in range(values.shape[1]):
                columns[f"{name}_{slot}"] = pa.array(np.ascontiguousarray(values[:, slot]))
    path.parent.mkdir(parents=True)
    pq.write_table(
        pa.table(columns),
        path,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
        column_encoding=dict.fromkeys(columns, "BYTE_STREAM_SPLIT"),
        row_group_size=65_536,
    )


def _link(source: Path, target: Path, seeds: int) -> None:
    """Let every seed be one of the files."""
    files = sorted(source.rglob("part-0-0.parquet"))
    for seed in range(seeds):
        path = files[seed % len(files)]
        folder = target / path.relative_to(source).parent.with_name(f"seed={seed}")
        folder.mkdir(parents=True)
        os.link(path, folder / path.name)


def _counted(run: Path) -> Counts:
    """Our counts by seed, as `benchmarks.peers.common.COUNTS` has them."""
    found: Counts = {}
    for pair in rate_table(Dump.open(run)).by_seed:
        outside = pair.outside
        counts: list[int] = [
            outside.tokens or 0,
            outside.increase or 0,
            pair.disagreement.tokens or 0,
        ]
        for kept in (pair.criterion, pair.baseline):
            counts += [each or 0 for each in (kept.kept, kept.unsafe, kept.contracting)]
        found[str(pair.seeds[0])] = counts
    return found


def _same(name: str, found: Counts, expected: Counts) -> None:
    """Refuse to time what counts something else."""
    if found != expected:
        seed = next(each for each in expected if found.get(each) != expected[each])
        raise RuntimeError(
            f"{name} counts {found.get(seed)} in seed {seed}, and ours {expected[seed]}"
        )


def _answer(command: Sequence[str]) -> Counts:
    """The counts that a program prints."""
    found: Counts = json.loads(_run(command).splitlines()[0])
    return found


def _run(command: Sequence[str]) -> str:
    """What a program prints."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **_environment()}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-600:]}")
    return done.stdout


def _program(name: str, *arguments: str) -> list[str]:
    """A peer's command."""
    return [sys.executable, "-m", f"benchmarks.peers.{name}", *arguments]


def _ours(run: Path, *options: str) -> list[str]:
    """Our command on one core."""
    return _program("ours", "table", str(run), "--format", "json", "--quiet", *options)


def _environment() -> Mapping[str, str]:
    """One thread for everyone."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS")
    return dict.fromkeys(names, "1")


def _peak_mb(arguments: Sequence[str]) -> float:
    """Largest resident set of a Python process, in MB."""
    script = (
        "import resource, subprocess, sys; "
        "subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    unit = 1024 if sys.platform != "darwin" else 1024**2
    return float(_run([sys.executable, "-c", script, *arguments])) / unit


def _each(times: Times, rows: int) -> str:
    """Nanoseconds a row of everything timed."""
    return ", ".join(f"{name} {times.median(name) / rows * 1e9:.0f}" for name in times.seconds)
