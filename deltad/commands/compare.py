"""Commands that ask one dump many questions: compare, sweep, calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    Recompute,
    Run,
    Threshold,
    format_option,
    open_dump,
    question_of,
    rows_of,
    write_result,
)
from .terminal import OptionError, check_output, chosen_form, note, progress_bar

if TYPE_CHECKING:
    from deltad.analysis import Comparison, ConditionTable


def compare(
    run: Run,
    output: Output = None,
    criteria: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Criteria, or neighbours' weights, to set side by side.",
            show_default="all that RUN can answer for; with --by the predictive one",
        ),
    ] = "",
    baseline: Baseline = "ratio",
    by: Annotated[
        str,
        typer.Option(
            metavar="WHAT,…",
            help="Tell the tokens outside apart by advantage, position, state, entropy, "
            "divergence, ratio, tail or token.",
            show_default="not at all",
        ),
    ] = "",
    bins: Annotated[
        int | None,
        typer.Option(min=1, help="With --by: bins by quantile.", show_default="4"),
    ] = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    protocol: Protocol = "",
    bootstrap_seed: BootstrapSeed = 0,
    recompute: Recompute = False,
    form: Annotated[str, format_option(*DRAWN_FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Set criteria side by side: what each masks, and how often it was right.

    CSV, Markdown and Parquet have a row a criterion; with --by a row a bin and criterion.
    """
    form = chosen_form(form, output, DRAWN_FORMATS)
    check_output(output, run)
    if bins is not None and not by:
        raise OptionError("`--bins` needs `--by`, which says what is binned")
    names, conditions = _listed(criteria, "--criteria"), _listed(by, "--by")
    question = question_of(threshold, divergence, "", baseline, protocol)
    dump = open_dump(run)
    from deltad import analysis
    from deltad.analysis.comparison import arms_of, comparable
    from deltad.analysis.condition_table import DEFAULT_BINS
    from deltad.analysis.question import BOTH

    asked = names or ([question.criterion] if conditions else [])
    needs = BOTH if conditions else ("pre",)
    rows = rows_of(dump, arms_of(comparable(dump, question, asked, needs=needs)[0]))
    result: Comparison | ConditionTable
    with progress_bar(rows, "rows", quiet=quiet) as bar:
        if conditions:
            result = analysis.condition_table(
                dump,
                question,
                conditions,
                asked,
                bins=DEFAULT_BINS if bins is None else bins,
                bootstrap_seed=bootstrap_seed,
                progress=bar.advance,
                recompute=recompute,
            )
        else:
            result = analysis.compare(
                dump,
                question,
                asked,
                bootstrap_seed=bootstrap_seed,
                progress=bar.advance,
                recompute=recompute,
            )
    write_result(result, form, output)


def sweep(
    run: Run,
    over: Annotated[
        str,
        typer.Option(metavar="threshold|top-k|protocol", help="What to vary.", show_default=False),
    ],
    output: Output = None,
    values: Annotated[
        str,
        typer.Option(
            metavar="VALUE,…",
            help="Its values.",
            show_default="δ from 0.02 to 1; K' from 1 to K; every protocol",
        ),
    ] = "",
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    protocol: Protocol = "",
    bootstrap_seed: BootstrapSeed = 0,
    recompute: Recompute = False,
    form: Annotated[str, format_option(*DRAWN_FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Ask one question at many thresholds, at K' ≤ K, or under every protocol.

    Points that RUN cannot answer are named with the reason. CSV, Markdown and Parquet have a row
    a point.
    """
    form = chosen_form(form, output, DRAWN_FORMATS)
    check_output(output, run)
    for name, given in (("threshold", threshold is not None), ("protocol", bool(protocol))):
        if given and over == name:
            raise OptionError(f"`--{name}` cannot be given where it is swept over: use `--values`")
    question = question_of(threshold, divergence, criterion, baseline, protocol)
    dump = open_dump(run)
    from deltad import analysis

    with progress_bar(None, "rows", quiet=quiet) as bar:
        result = analysis.sweep(
            dump,
            question,
            over=over,
            values=_listed(values, "--values"),
            bootstrap_seed=bootstrap_seed,
            progress=bar.advance,
            recompute=recompute,
        )
    if form != "text":  # the text says it itself
        for name, why in result.refused.items():
            note(f"{over} {name} is left out: {why}", quiet=quiet)
    write_result(result, form, output)


def calibration(
    run: Run,
    output: Output = None,
    bins: Annotated[int, typer.Option(min=1, help="Bins by quantile of the prediction.")] = 8,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    protocol: Annotated[
        str,
        typer.Option(
            metavar="shared:ARM",
            help="Whose update ΔD is measured under.",
            show_default="shared:none, or the only arm",
        ),
    ] = "",
    bootstrap_seed: BootstrapSeed = 0,
    recompute: Recompute = False,
    form: Annotated[str, format_option(*DRAWN_FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Hold the predicted first-order change of every direction against realized ΔD.

    CSV, Markdown and Parquet have a row a direction and bin.
    """
    form = chosen_form(form, output, DRAWN_FORMATS)
    check_output(output, run)
    question = question_of(threshold, divergence, "", "ratio", protocol)
    dump = open_dump(run)
    from deltad import analysis

    with progress_bar(rows_of(dump, question.resolve(dump).arms), "rows", quiet=quiet) as bar:
        result = analysis.calibrate(
            dump,
            question,
            bins=bins,
            bootstrap_seed=bootstrap_seed,
            progress=bar.advance,
            recompute=recompute,
        )
    write_result(result, form, output)


def _listed(text: str, option: str) -> list[str]:
    """The names in a comma-separated option."""
    if not text:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OptionError(f"`{option}` must be names with single commas between them, got {text!r}")
    return names
