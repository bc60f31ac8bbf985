"""Commands that look at a run: what it does as it goes on, and whether it is in order."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING

import typer

from .analysis import FORMS
from .options import PAIR, QUIET, RUN, Call, Option, command, switch
from .terminal import OptionError, Status, complain, must_be_folder

if TYPE_CHECKING:
    from rich.console import Console

    from deltad.analysis.tables.steps import StepFiles, StepTable
    from deltad.dumps import Dump


@command(
    RUN,
    switch("--once", "Print what there is now, and end."),
    Option("--interval", float, "Seconds between two looks.", 2.0, min=0.05),
    Option("--scalar", [str], "Show the course of this number; may be given several times.",
           metavar="NAME", shown="the usual ones"),
    Option("--rows", int, "Arms and seeds listed in text.", 8, min=1),
    *PAIR, forms=FORMS,
)  # fmt: skip
def watch(call: Call) -> None:
    """Follow the optimizer steps of a running or finished recording; Ctrl-C ends it.

    Reads what a monitor writes into RUN/_steps, else the files of the dump as they become
    complete. Without a terminal, with -o or with --format it prints once. JSON holds the newest
    step of every arm and seed; files have one row per step.

    Example: deltad watch data_dumps/tiny-whole --once
    """
    must_be_folder(call.run)
    given, question = call.given(PAIR), None
    if given != {each.name: each.default for each in PAIR if each.default}:
        from deltad.steps import StepQuestion

        question = StepQuestion(**given)
    from deltad.analysis.tables.steps import SHOWN, StepFiles, StepTable

    files = StepFiles(call.run, question)
    shown = call.scalar or SHOWN

    def table(height: int = 1000, width: int = 80) -> StepTable:
        places = min(call.rows, max(1, height - len(shown) - 12))
        return StepTable.from_files(files, shown=shown, places=places, width=width)

    if call.once or call.output or call.format or not sys.stdout.isatty():
        files.refresh()
        call.write(table())
        return
    from rich.console import Console

    with contextlib.suppress(KeyboardInterrupt):
        follow(files, table, Console(highlight=False, markup=False), call.interval, Event())


def follow(
    files: StepFiles,
    table: Callable[[int, int], StepTable],
    console: Console,
    interval: float,
    over: Event,
) -> None:
    """Redraw when there is something new, or the window has another size, until it is over."""
    from rich.live import Live

    size = None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not over.is_set():
            if files.refresh() or console.size != size:
                size = console.size
                live.update(table(size.height, size.width).text(width=size.width), refresh=True)
            over.wait(interval)


@command(RUN, Option("--format", ("text", "json"), "Form of the output.", "text"), QUIET)
def check(call: Call) -> None:
    """Check every row of a dump against the contract.

    Prints one line per problem, and ends with status 1 where there is any.

    Example: deltad check data_dumps/tiny-whole
    """
    from deltad.dumps.validate import check_dump

    with call.progress(unit="files") as bar:
        try:
            problems = check_dump(call.run, strict=False, progress=bar.at)
        except FileNotFoundError as error:
            raise OptionError(f"{call.run} does not exist") from error
    if call.format == "json":
        found = {"format": 1, "ok": not problems, "problems": [vars(each) for each in problems]}
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    elif problems:
        for problem in problems:
            complain(problem)
    else:
        typer.echo(_contents(call.dump))
    if problems:
        raise typer.Exit(Status.BAD_CONTENT)


def _contents(dump: Dump) -> str:
    """What a dump in order holds, in one line."""
    from deltad.analysis.result import counted

    parts = [part for arm in dump.arms for part in dump.files(arm)]
    seeds = {part.seed for part in parts}
    rows = sum(part.rows for part in parts)
    seen = sum(part.metadata.rows_seen for part in parts)
    words = ""
    for reading, when in (("pre", "before"), ("post", "after")):
        arms = [arm for arm in dump.arms if reading not in dump.readings(arm)]
        if arms:
            words += f"; the policy {when} the update was not read in arm {', '.join(arms)}"
    return (
        f"in order: {dump.path} has arms {', '.join(dump.arms)}; {counted(len(seeds), 'seed')}, "
        f"{counted(len(parts), 'file')}, {counted(rows, 'row')} of {counted(seen, 'token')}, "
        f"top-{dump.top_k} of {dump.vocab_size} ids{words}"
    )
