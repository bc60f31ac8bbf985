"""Commands that count: the table of rates, and Figure 4."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .engines import Address, EngineName, ShareText, engine_of
from .merge import write_share
from .options import (
    DEFAULT_PROTOCOL,
    FORMATS,
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
from .terminal import OptionError, check_output, chosen_form, note, progress_bar, sink

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltad.analysis import ProtocolTable, Question, RateTable
    from deltad.dumps import Dump

ALL_PROTOCOLS: Final = "all"


def table(
    run: Run,
    output: Output = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    protocol: Annotated[
        str,
        typer.Option(
            metavar="shared:ARM|own|all",
            help="Whose update a kept token is judged by; `all`: each that the dump can answer.",
            show_default=DEFAULT_PROTOCOL,
        ),
    ] = "",
    by_seed: Annotated[bool, typer.Option("--by-seed", help="In text, a row a seed too.")] = False,
    bootstrap_seed: BootstrapSeed = 0,
    recompute: Recompute = False,
    engine: EngineName = "local",
    address: Address = None,
    share: ShareText = None,
    form: Annotated[str, format_option(*FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Compare two criteria: unsafe-keep rates and contracting fractions, seed by seed.

    CSV, Markdown and Parquet have a row a seed, or a row a protocol with `--protocol all`.
    """
    if share is not None and (form or by_seed):
        raise OptionError("`--share` writes counts, no table: give its form to `deltad merge`")
    form = chosen_form(form, None if share else output, FORMATS)
    check_output(output, run)
    every = protocol == ALL_PROTOCOLS
    question = question_of(threshold, divergence, criterion, baseline, "" if every else protocol)
    dump = open_dump(run)
    with engine_of(engine, address) as opened:
        where: dict[str, Any] = {"engine": opened, "recompute": recompute}
        if share is not None:
            write_share(dump, question, share, output, every=every, quiet=quiet, **where)
            return
        if every:
            from deltad.analysis import protocol_table

            rows = rows_of(dump, (arm for arm in dump.arms if arm != "zero-step"))
            with progress_bar(rows, "rows", quiet=quiet) as bar:
                protocols = protocol_table(
                    dump, question, bootstrap_seed=bootstrap_seed, progress=bar.advance, **where
                )
            note_vectors(protocols, quiet)
            write_result(protocols, form, output)
            return
        rates = counted(dump, question, bootstrap_seed, quiet, **where)
    write_rates(rates, form, output, by_seed=by_seed)


def write_rates(rates: RateTable, form: str, output: Path | None, *, by_seed: bool) -> None:
    """Write a table of rates; in text with `by_seed` a row a seed too."""
    text = _by_seed(rates) if by_seed and form == "text" else None
    write_result(rates, form, output, text=text)


def figure4(
    run: Run,
    output: Annotated[
        list[Path],
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="A .png, .pdf or .svg; may be given several times.",
        ),
    ],
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    protocol: Protocol = "",
    bootstrap_seed: BootstrapSeed = 0,
    recompute: Recompute = False,
    quiet: Quiet = False,
) -> None:
    """Draw ΔD of kept disagreement tokens and the unsafe-keep rates by seed."""
    question = question_of(threshold, divergence, criterion, baseline, protocol)
    from deltad import analysis
    from deltad.analysis.figures import figure_format

    forms = [figure_format(path) for path in output]
    for path in output:
        check_output(path, run)
    rates = counted(open_dump(run), question, bootstrap_seed, quiet, recompute=recompute)
    figure = analysis.figure4(rates)
    for path, form in zip(output, forms, strict=True):
        with sink(path) as file:
            analysis.save_figure(figure, file, form=form)


def counted(
    dump: Dump, question: Question, bootstrap_seed: int, quiet: bool, **where: Any
) -> RateTable:
    """Count a dump under a progress bar, and say which rows could not take part.

    `where` goes to `rate_table`.
    """
    from deltad.analysis import rate_table

    rows = rows_of(dump, question.resolve(dump, disagreement_only=True).arms)
    with progress_bar(rows, "rows", quiet=quiet) as bar:
        rates = rate_table(
            dump, question, bootstrap_seed=bootstrap_seed, progress=bar.advance, **where
        )
    note_vectors(rates, quiet)
    return rates


def note_vectors(table: RateTable | ProtocolTable, quiet: bool) -> None:
    """Say how many rows have an unknown D, of several protocols in the first."""
    from deltad.analysis import RateTable

    unknown = (table if isinstance(table, RateTable) else table.tables[0]).without_vectors
    if unknown:
        note(
            "rows without top-K vectors count as tokens and are never outside; there are "
            f"{unknown}",
            quiet=quiet,
        )


def _by_seed(rates: RateTable) -> RenderableType:
    """The text with a row a seed."""
    from deltad.analysis import rate_text

    return rate_text(rates, per_seed=True)
