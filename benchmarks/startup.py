"""How long the commands take to begin: C1, the list of commands; C2, a table of one row."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from deltad.dumps import Dump, DumpWriter

from .measure import interleaved_processes
from .row import Row

DUMPS: Final = Path(__file__).parents[1] / "data_dumps"

FLOORS: Final = {"C1": "import typer, rich", "C2": "import pyarrow.parquet, typer, rich"}
"""What each is held against: the imports that it cannot do without."""

COMMAND: Final = "from deltad.cli import main; main()"

ENVIRONMENT: Final = {"PYTHONDONTWRITEBYTECODE": ""}
"""Modules are compiled once, in the round that is not counted, as they are where they are
installed."""


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    rounds = 3 if quick else 21
    if _wanted("C1", prefixes):
        yield _row(
            "C1", "`deltad --help` against importing typer and rich", 1.5, ["--help"], rounds
        )
    if _wanted("C2", prefixes):
        what = "`deltad table` of a row against importing pyarrow.parquet, typer and rich"
        with tempfile.TemporaryDirectory() as folder:
            _one_row(Path(folder))
            yield _row("C2", what, 1.3, ["table", folder], rounds)


def _wanted(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a row was asked for."""
    return not prefixes or any(name.startswith(prefix) for prefix in prefixes)


def _row(id: str, what: str, limit: float, arguments: list[str], rounds: int) -> Row:
    """Time a command and its floor in turn, each in a process of its own."""
    python = [sys.executable, "-c"]
    times = interleaved_processes(
        {"command": [*python, COMMAND, *arguments], "floor": [*python, FLOORS[id]]},
        rounds=rounds,
        environment=ENVIRONMENT,
    )
    return Row(
        id=id,
        what=what,
        limit=limit,
        figure=times.ratio("command", "floor"),
        spread=times.spread("command", "floor"),
        note=(
            f"{times.median('command'):.3f} s against {times.median('floor'):.3f} s of CPU time, "
            f"the interpreter's start in both; medians of {rounds} processes"
        ),
    )


def _one_row(run: Path) -> None:
    """Write a dump of one row: the first of the committed one."""
    dump = Dump.open(min(DUMPS.glob("*/arm=none")).parent)
    seed = dump.seeds("none")[0]
    batch = next(iter(dump.batches("none", seed)))
    metadata = replace(dump.metadata("none"), rows_seen=0, created="")
    with DumpWriter(run, arm="none", seed=0, metadata=metadata) as writer:
        writer.append(
            {name: column[:1] for name, column in batch.columns.items()},
            vectors_stored=None if batch.vectors.all() else batch.vectors[:1],
        )
