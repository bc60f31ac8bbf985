"""`python -m benchmarks`: every goal, measured, as a table; `--json FILE` and `--markdown FILE`."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from .measure import machine, one_thread
from .row import Row

MODULES: Final = ("readout", "accuracy", "gpu", "probe", "analysis", "storage", "startup")
"""Each has `rows(prefixes, quick)`; they run in processes of their own, one after the other."""

_PACKAGES: Final = (
    "torch",
    "transformers",
    "trl",
    "liger-kernel",
    "triton",
    "numpy",
    "pyarrow",
    "duckdb",
    "polars",
    "pandas",
    "numba",
    "typer",
    "rich",
)


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Beginning of a row's id, R1 say; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Small shapes: to see that all runs, not to measure.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="With --only, the other rows that are in FILE already stay there.",
        ),
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", metavar="FILE")] = None,
    module: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure every goal against its figure."""
    prefixes = tuple(only or ())
    if module:
        _in_process(module, prefixes, quick)
        return
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    found: list[Row] = []
    for name in MODULES:
        found += _of_module(name, prefixes, quick)
    if not found:
        raise typer.BadParameter(f"no row begins with {', '.join(prefixes)}", param_hint="--only")
    _show(found)
    missed = any(row.met is False for row in found)
    if json_file is not None:
        if prefixes and json_file.exists():
            found = _updated(json_file, found)
        json_file.write_text(
            json.dumps([row.to_json_object() for row in found], indent=1, ensure_ascii=False)
            + "\n",
            encoding="utf-8",
        )
    if markdown_file is not None:
        markdown_file.write_text(_markdown(found, about, quick), encoding="utf-8")
    if missed:
        raise typer.Exit(1)


def _in_process(name: str, prefixes: tuple[str, ...], quick: bool) -> None:
    """Run one module and print its rows as JSON lines."""
    one_thread()
    for row in importlib.import_module(f"benchmarks.{name}").rows(prefixes, quick):
        fields = {key: getattr(row, key) for key in row.__dataclass_fields__}
        print(json.dumps(fields), flush=True)


def _of_module(name: str, prefixes: tuple[str, ...], quick: bool) -> list[Row]:
    """Rows of a module, measured in a fresh process; progress goes to standard error."""
    command = [sys.executable, "-m", "benchmarks", "--module", name]
    command += [part for prefix in prefixes for part in ("--only", prefix)]
    found = []
    with subprocess.Popen(
        [*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            fields = json.loads(line)
            fields["spread"] = None if fields["spread"] is None else tuple(fields["spread"])
            found.append(Row(**fields))
            print(*found[-1].cells()[:5], sep=" · ", file=sys.stderr, flush=True)
    if process.returncode:
        raise typer.Exit(process.returncode)
    return found


def _updated(file: Path, found: list[Row]) -> list[Row]:
    """Rows of a file with those that were just measured in their places, new ones at the end."""
    fresh = {row.id: row for row in found}
    kept = [Row.from_json_object(each) for each in json.loads(file.read_text(encoding="utf-8"))]
    return [fresh.pop(row.id, row) for row in kept] + list(fresh.values())


def _show(rows: Iterable[Row]) -> None:
    """Print the table."""
    table = Table("id", "what", "goal", "figure", "met", "note")
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)


def _markdown(rows: Iterable[Row], about: dict[str, str], quick: bool) -> str:
    """The table of the documentation."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    lines = [
        "; ".join(f"{key}: {value}" for key, value in about.items()) + ".  ",
        ", ".join(versions) + ".",
        *(["", "Small shapes: these figures say nothing."] if quick else []),
        "",
        "| id | what | goal | figure | met | note |",
        "|---|---|---|---|---|---|",
        *(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
