"""Commands that look at a run: what it does as it goes on, and whether it is in order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import typer

from .analysis import FORMS
from .options import PAIR, QUIET, REGION, Call, Group, command, option
from .terminal import BAD_CONTENT, OptionError, complain

if TYPE_CHECKING:
    from deltad.dumps import Dump


WATCH: Final[Group] = {
    "once": option(bool, False, "Print what there is now, and end."),
    "interval": option(float, 2.0, "Seconds between two looks.", min=0.05),
    "scalar": option(
        list[str] | None, None, "Show the course of this number; may be given several times.",
        metavar="NAME", show_default="the usual ones",
    ),
    "rows": option(int, 8, "Arms and seeds listed in text.", min=1),
}  # fmt: skip
CHECK: Final[Group] = {
    "form": option(str, "text", "Form of the output.", "--format", metavar="text|json"),
}


@command(WATCH, REGION, PAIR, forms=FORMS)
def watch(call: Call) -> None:
    """Follow the optimizer steps of a running or finished recording; Ctrl-C ends it.

    Reads what a monitor writes into RUN/_steps, else the files of the dump as they become
    complete. Without a terminal, with -o or with --format it prints once. JSON holds the newest
    step of every arm and seed; files have one row per step.

    Example: deltad watch data_dumps/tiny-whole --once
    """
    (run,) = call.run
    if not run.is_dir():
        raise OptionError(f"{run} {'is no folder' if run.exists() else 'does not exist'}")
    asked = call.given(*REGION, *PAIR)
    question = None
    if asked != {name: each.default for name, each in {**REGION, **PAIR}.items() if name in asked}:
        from deltad.steps import StepQuestion

        question = StepQuestion(**asked)
    from deltad.analysis.tables.steps import SHOWN, StepFiles, StepTable

    files = StepFiles(run, question)
    shown = tuple(call.scalar or SHOWN)

    def look(height: int = 1000, width: int = 80) -> StepTable:
        places = min(call.rows, max(1, height - len(shown) - 12))
        return StepTable.from_files(files, shown=shown, places=places, width=width)

    files.refresh()
    if call.once or call.output is not None or call.values["form"] or not sys.stdout.isatty():
        call.write(look())
    else:
        _follow(files, look, call.interval)


def _follow(files: Any, look: Callable[[int, int], Any], interval: float) -> None:
    """Redraw whenever there is something new or the window has another size, until interrupted."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False)
    size = console.size

    def text() -> str:
        return str(look(size.height, size.width).text(width=size.width))

    try:
        with Live(text(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            while True:
                time.sleep(interval)
                if files.refresh() or console.size != size:
                    size = console.size
                    live.update(text(), refresh=True)
    except KeyboardInterrupt:
        return


@command(CHECK, QUIET)
def check(call: Call) -> None:
    """Check every row of a dump against the contract.

    Prints one line per problem, and ends with status 1 where there is any.

    Example: deltad check data_dumps/tiny-whole
    """
    form = call.values["form"]
    if form not in ("text", "json"):
        raise OptionError(f"`--format` must be one of text, json, got {form!r}")
    from deltad.dumps.validate import check_dump

    (run,) = call.run
    with call.progress(unit="files") as bar:
        try:
            problems = check_dump(run, strict=False, progress=bar.at)
        except FileNotFoundError as error:
            raise OptionError(f"{run} does not exist") from error
    if form == "json":
        found = {"format": 1, "ok": not problems, "problems": [vars(each) for each in problems]}
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    elif problems:
        for problem in problems:
            complain(str(problem))
    else:
        typer.echo(_contents(call.dump))
    if problems:
        raise typer.Exit(BAD_CONTENT)


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
