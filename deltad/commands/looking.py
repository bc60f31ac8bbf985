"""Commands that look at a run: what it does as it goes on, and whether it is in order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .analysis import FORMS
from .options import PAIR, QUIET, REGION, Call, command
from .terminal import BAD_CONTENT, OptionError, complain

if TYPE_CHECKING:
    from deltad.dumps import Dump


@command(REGION, PAIR, forms=FORMS)
def watch(
    call: Call,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    scalar: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default="the usual ones",
                     help="Show the course of this number; may be given several times."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Arms and seeds listed in text.")] = 8,
) -> None:  # fmt: skip
    """Follow the optimizer steps of a running or finished recording; Ctrl-C ends it.

    Reads what a monitor writes into RUN/_steps, else the files of the dump as they become
    complete. Without a terminal, with -o or with --format it prints once. JSON holds the newest
    step of every arm and seed; files have one row per step.

    Example: deltad watch data_dumps/tiny-whole --once
    """
    asked = call.values["form"] or call.output is not None or once
    following = not asked and sys.stdout.isatty()
    (run,) = call.run
    if not run.is_dir():
        raise OptionError(f"{run} {'is no folder' if run.exists() else 'does not exist'}")
    shared = {name: call.values[name] for name in ("threshold", "divergence", *PAIR)}
    question = None
    if tuple(shared.values()) != (None, "kl", "", "ratio"):
        from deltad.masks import DEFAULT_THRESHOLD
        from deltad.steps import StepQuestion

        if shared["threshold"] is None:
            shared["threshold"] = DEFAULT_THRESHOLD
        question = StepQuestion(**shared)
    from deltad.analysis.tables.steps import SHOWN, StepFiles, StepTable

    files = StepFiles(run, question)
    shown = tuple(scalar) if scalar else SHOWN

    def look(height: int = 1000, width: int = 80) -> StepTable:
        listed = min(rows, max(1, height - len(shown) - 12))
        return StepTable.from_files(files, shown=shown, places=listed, width=width)

    files.refresh()
    if following:
        _follow(files, look, interval)
    else:
        call.write(look())


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


@command(QUIET)
def check(
    call: Call,
    *,
    form: Annotated[
        str,
        typer.Option("--format", metavar="text|json", help="Form of the output."),
    ] = "text",
) -> None:
    """Check every row of a dump against the contract.

    Prints one line per problem, and ends with status 1 where there is any.

    Example: deltad check data_dumps/tiny-whole
    """
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
        f"in order: {dump.path} has arms {', '.join(dump.arms)}; {len(seeds)} seeds, "
        f"{len(parts)} files, {rows} rows of {seen} tokens, top-{dump.top_k} of "
        f"{dump.vocab_size} ids{words}"
    )
