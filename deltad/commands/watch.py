"""Following a run: `deltad watch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    FORMATS,
    Baseline,
    CriterionName,
    Divergence,
    Output,
    Run,
    Threshold,
    format_option,
    write_result,
)
from .terminal import OptionError, check_output, chosen_form

if TYPE_CHECKING:
    from deltad.analysis.step_files import StepFiles
    from deltad.analysis.watch import StepTable
    from deltad.steps import StepQuestion


def watch(
    run: Run,
    output: Output = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    scalar: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Show the course of this number; may be given several times.",
            show_default="the usual ones",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Arms and seeds listed in text.")] = 8,
    form: Annotated[str, format_option(*FORMATS)] = "",
) -> None:
    """Follow the optimizer steps of a running or finished recording; Ctrl-C ends it.

    Reads what a monitor writes into RUN/_steps, else the files of the dump as they become
    complete. Without a terminal, with -o or with --format it prints once. JSON holds the newest
    step of every arm and seed; CSV, Markdown and Parquet have a row a step.
    """
    following = not (once or form or output is not None) and sys.stdout.isatty()
    form = chosen_form(form, output, FORMATS)
    check_output(output, run)
    if not run.is_dir():
        raise OptionError(f"{run} {'is no folder' if run.exists() else 'does not exist'}")
    asked = (threshold, divergence, criterion, baseline) != (None, "kl", "", "ratio")
    question = _question(threshold, divergence, criterion, baseline) if asked else None
    from deltad.analysis.step_files import StepFiles
    from deltad.analysis.watch import SHOWN, StepTable

    files = StepFiles(run, question)
    shown = tuple(scalar) if scalar else SHOWN

    def look(width: int = 160, height: int = 1000) -> StepTable:
        listed = min(rows, max(1, height - len(shown) - 12))
        return StepTable.from_files(files, shown=shown, rows=listed, width=width)

    if following:
        _follow(files, look, interval)
        return
    files.refresh()
    write_result(look(), form, output)


def _question(
    threshold: float | None, divergence: str, criterion: str, baseline: str
) -> StepQuestion:
    """The question that the options ask."""
    from deltad.masks import DEFAULT_THRESHOLD
    from deltad.steps import StepQuestion

    delta = DEFAULT_THRESHOLD if threshold is None else threshold
    return StepQuestion(delta, divergence, criterion, baseline)


def _follow(files: StepFiles, look: Callable[[int, int], StepTable], interval: float) -> None:
    """Redraw whenever there is something new or the window has another size, until interrupted."""
    from rich.console import Console
    from rich.live import Live

    try:
        files.refresh()
        console = Console(highlight=False, markup=False)
        size = console.size
        text = look(*size).text()
        with Live(text, console=console, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            while True:
                time.sleep(interval)
                if files.refresh() or console.size != size:
                    size = console.size
                    live.update(look(*size).text(), refresh=True)
    except KeyboardInterrupt:
        return
