"""The command that makes a page of a dump."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from .options import (
    Baseline,
    BootstrapSeed,
    CriterionName,
    Divergence,
    Output,
    Protocol,
    Quiet,
    Run,
    Threshold,
    open_dump,
    question_of,
)
from .terminal import BAD_CONTENT, OptionError, check_output, complain, progress_bar, sink

ENDINGS: Final = (".html", ".htm")


def report(
    run: Run,
    output: Output = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    protocol: Protocol = "",
    seed: Annotated[
        list[int] | None,
        typer.Option(help="The token viewer shows only this seed; may be given several times."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="At most so many tokens in the viewer, by the largest D.")
    ] = 100_000,
    bootstrap_seed: BootstrapSeed = 0,
    quiet: Quiet = False,
) -> None:
    """Make one HTML page: tables, figures, the doctor's findings and a token viewer.

    The page needs no network. Exit status 1 where a section could not be made: the page is
    written all the same, and says which and why.
    """
    check_output(output, run)
    if output is not None and output.suffix.lower() not in ENDINGS:
        raise OptionError(
            f"a report's file must end in {' or '.join(ENDINGS)}, got {str(output)!r}"
        )
    question = question_of(threshold, divergence, criterion, baseline, protocol)
    dump = open_dump(run)
    from deltad.analysis.report import report as make

    with progress_bar(None, "rows", quiet=quiet) as bar:
        made = make(
            dump,
            question,
            seeds=seed or (),
            tokens=tokens,
            bootstrap_seed=bootstrap_seed,
            progress=bar.advance,
        )
    with sink(output) as file:
        file.write(made.html.encode())
    for title, error in made.failures:
        complain(f"section {title} could not be made: {error}")
    if made.failures:
        raise typer.Exit(BAD_CONTENT)
