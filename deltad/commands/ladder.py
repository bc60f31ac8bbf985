"""The command that follows the sign of ΔD up the ladder."""

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
    Quiet,
    Run,
    Threshold,
    format_option,
    open_dump,
    question_of,
    rows_of,
    write_result,
)
from .terminal import check_output, chosen_form, note, progress_bar


def ladder(
    run: Run,
    output: Output = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    criteria: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Further criteria to judge.", show_default="none"),
    ] = "",
    protocol: Annotated[
        str,
        typer.Option(
            metavar="shared:ARM",
            help="Whose update the upper rungs follow.",
            show_default="shared:none, or the only arm",
        ),
    ] = "",
    bootstrap_seed: BootstrapSeed = 0,
    form: Annotated[str, format_option(*DRAWN_FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Show where the sign of ΔD is lost, from a token's own logits to the realized step.

    Needs a dump with the ladder's columns (`record --ladder`); of others it shows the lowest rung
    and the step.
    """
    form = chosen_form(form, output, DRAWN_FORMATS)
    check_output(output, run)
    question = question_of(threshold, divergence, criterion, baseline, protocol)
    dump = open_dump(run)
    from deltad.analysis import ladder_table

    others = [name.strip() for name in criteria.split(",") if name.strip()]
    resolved = question.resolve(dump)
    with progress_bar(rows_of(dump, resolved.arms), "rows", quiet=quiet) as bar:
        table = ladder_table(
            dump,
            question,
            criteria=others,
            bootstrap_seed=bootstrap_seed,
            progress=bar.advance,
        )
    if table.missing and form != "text":
        note(
            "rungs that the dump does not have: "
            + "; ".join(f"{rung} ({why})" for rung, why in table.missing.items()),
            quiet=quiet,
        )
    write_result(table, form, output)
