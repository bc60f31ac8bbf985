"""How many seeds it takes: `deltad power`."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    DRAWN_FORMATS,
    Baseline,
    BootstrapSeed,
    CriterionName,
    Divergence,
    Output,
    Protocol,
    Quiet,
    Run,
    Threshold,
    format_option,
    open_dump,
    question_of,
    write_result,
)
from .rates import counted
from .terminal import OptionError, check_output, chosen_form, progress_bar


def power(
    run: Run,
    output: Output = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    protocol: Protocol = "",
    points: Annotated[
        str,
        typer.Option(
            metavar="X,X,…", help="By how many points the criterion's unsafe-keep rate is lower."
        ),
    ] = "1,2,3,5,10",
    goal: Annotated[float, typer.Option("--power", help="Power asked for.")] = 0.8,
    level: Annotated[float, typer.Option(help="Level of the two-sided tests.")] = 0.05,
    bootstrap_seed: BootstrapSeed = 0,
    form: Annotated[str, format_option(*DRAWN_FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Seeds needed to see a difference in unsafe-keep rates, by this dump's own seeds.

    And what as many seeds as this dump has can see.
    """
    form = chosen_form(form, output, DRAWN_FORMATS)
    check_output(output, run)
    question = question_of(threshold, divergence, criterion, baseline, protocol)
    shares = [_point(text) for text in points.split(",")]
    from deltad.analysis.power import check_options, power_table

    check_options(shares, goal, level)
    rates = counted(open_dump(run), question, bootstrap_seed, quiet)
    result = power_table(rates, points=shares, power=goal, level=level)
    with progress_bar(len(result.searches), "searches", quiet=quiet) as bar:
        for test, point in result.searches:
            result.row(test, point)
            bar.advance(1)
    write_result(result, form, output)


def _point(text: str) -> float:
    """One difference in points, as a share."""
    try:
        return float(text) / 100
    except ValueError as error:
        raise OptionError(f"`--points` takes numbers with commas between, got {text!r}") from error
