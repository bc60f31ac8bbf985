"""The commands: options into one call of a plain function, its result onto the screen.

Data goes to standard output, everything else to standard error. Exit status: 0; 1 where a
dump's content is bad; 2 where an option's value is, or where RUN does not exist. A wing is
imported when its command runs, so that `deltad --help` waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from deltad._recipe_commands import Quiet, RecipeCommands, Resume, Seeds, Workers, record_dump
from deltad._terminal import (
    OptionError,
    check_output,
    chosen_form,
    complain,
    note,
    progress_bar,
    sink,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltad.analysis import Question, RateTable
    from deltad.dumps import Dump

BAD_CONTENT: Final = 1
BAD_OPTION: Final = 2
INTERRUPTED: Final = 130
CLOSED_PIPE: Final = 141
"""What a shell reports of a program that ended because nobody read on (SIGPIPE)."""

ALL_PROTOCOLS: Final = "all"
FORMATS: Final = ("text", "json", "csv", "markdown", "parquet")
TOKEN_FORMATS: Final = ("csv", "json", "parquet")


class Commands(TyperGroup):
    """The commands; whatever they raise becomes one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; see `typer.core.TyperGroup.invoke`."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except OSError as error:
            # What standard output still holds must not be tried again at shutdown.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # the reader has seen enough
                raise typer.Exit(CLOSED_PIPE) from None
            complain(str(error))
            raise typer.Exit(BAD_OPTION) from None
        except (KeyboardInterrupt, typer.Abort):
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit:
            raise
        except Exception as error:
            raise typer.Exit(_report(error)) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse the command line and run; see `typer.core.TyperGroup.main`."""
        try:
            status = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except Exception as error:  # from the parsing before any command
            status = _report(error)
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _report(error: Exception) -> int:
    """Print an error that is the user's and give its exit status; raise any other."""
    if hasattr(error, "format_message"):  # what typer raises for a bad command line
        complain(str(error.format_message()))
        return BAD_OPTION
    from deltad.analysis import QuestionError
    from deltad.dumps import DumpError
    from deltad.masks import CriterionError
    from deltad.probes.recipes import RecipeError

    bad_options = (OptionError, QuestionError, CriterionError, RecipeError)
    if not isinstance(error, (*bad_options, DumpError)):
        raise error
    complain(str(error))
    return BAD_CONTENT if isinstance(error, DumpError) else BAD_OPTION


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Token-level diagnostics for trust-region masks: what a mask drops, and was it right."""
    if version:
        from deltad import __version__

        typer.echo(f"deltad {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_DEFAULT_PROTOCOL: Final = "shared:none, or the only arm"

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a dump.", show_default=False)]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="δ ≥ 0 of the region: nats for KL, a probability for TV.", show_default="0.15"
    ),
]
Divergence = Annotated[str, typer.Option(metavar="kl|tv", help="Divergence of the region.")]
CriterionName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Criterion in question.",
        show_default="predictive-<divergence>-aggregated",
    ),
]
Baseline = Annotated[str, typer.Option(metavar="NAME", help="Criterion that it is compared with.")]
Protocol = Annotated[
    str,
    typer.Option(
        metavar="shared:ARM|own",
        help="Whose update a kept token is judged by.",
        show_default=_DEFAULT_PROTOCOL,
    ),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there.")]
BootstrapSeed = Annotated[int, typer.Option(min=0, help="Seed of the intervals' random numbers.")]


def _format_option(*choices: str) -> Any:
    """The option `--format` of a command that knows some forms."""
    return typer.Option(
        "--format",
        metavar="|".join(choices),
        help="Form of the output.",
        show_default=f"by the ending of FILE, else {choices[0]}",
    )


def _question(
    threshold: float | None, divergence: str, criterion: str, baseline: str, protocol: str
) -> Question:
    """The question that the common options ask."""
    from deltad.analysis import Question
    from deltad.masks import DEFAULT_THRESHOLD

    return Question(
        threshold=DEFAULT_THRESHOLD if threshold is None else threshold,
        divergence=divergence,
        criterion=criterion,
        baseline=baseline,
        protocol=protocol,
    )


def _open(run: Path) -> Dump:
    """Open a dump."""
    from deltad.dumps import Dump

    try:
        return Dump.open(run)
    except FileNotFoundError as error:
        raise OptionError(f"{run} does not exist") from error


def _rows(dump: Dump, arms: Iterable[str]) -> int:
    """Rows of some arms."""
    return sum(part.rows for arm in arms for part in dump.files(arm))


def _rates(dump: Dump, question: Question, bootstrap_seed: int, quiet: bool) -> RateTable:
    """Count a dump under a progress bar, and say which rows could not take part."""
    from deltad.analysis import rate_table

    rows = _rows(dump, question.resolve(dump).arms)
    with progress_bar(rows, "rows", quiet=quiet) as bar:
        rates = rate_table(dump, question, bootstrap_seed=bootstrap_seed, progress=bar.advance)
    _note_vectors(rates, quiet)
    return rates


def _note_vectors(rates: RateTable, quiet: bool) -> None:
    """Say how many rows have an unknown D."""
    if rates.without_vectors:
        note(
            "rows without top-K vectors count as tokens and are never outside; there are "
            f"{rates.without_vectors}",
            quiet=quiet,
        )


def _write(
    form: str,
    output: Path | None,
    *,
    text: Callable[[], RenderableType] | None = None,
    json_object: Callable[[], Any] | None = None,
    columns: Callable[[], Mapping[str, Sequence[Any]]] | None = None,
) -> None:
    """Write one result in the form asked for, from the one of the three that it is made of."""
    from deltad.analysis import export

    with sink(output) as file:
        if form == "text" and text is not None:
            from deltad.analysis.text import as_text

            coloured = output is None and sys.stdout.isatty()
            file.write(as_text(text(), coloured=coloured).encode())
        elif form == "json" and json_object is not None:
            file.write(export.to_json(json_object()).encode())
        elif columns is not None:
            file.write(export.COLUMN_FORMS[form](columns()))


def _contents(dump: Dump) -> str:
    """What a dump in order holds, in one line."""
    parts = [part for arm in dump.arms for part in dump.files(arm)]
    seeds = {part.seed for part in parts}
    rows = sum(part.rows for part in parts)
    seen = sum(part.metadata.rows_seen for part in parts)
    return (
        f"in order: {dump.path} has arms {', '.join(dump.arms)}; {len(seeds)} seeds, "
        f"{len(parts)} files, {rows} rows of {seen} tokens, top-{dump.top_k} of "
        f"{dump.vocab_size} ids"
    )


@app.command()
def tokens(
    run: Run,
    output: Output = None,
    threshold: Threshold = None,
    divergence: Divergence = "kl",
    criterion: CriterionName = "",
    baseline: Baseline = "ratio",
    protocol: Protocol = "",
    outside: Annotated[bool, typer.Option("--outside", help="Only tokens outside.")] = False,
    disagreement: Annotated[
        bool, typer.Option("--disagreement", help="Only tokens that exactly one criterion masks.")
    ] = False,
    seed: Annotated[
        list[int] | None, typer.Option(help="Only this seed; may be given several times.")
    ] = None,
    form: Annotated[str, _format_option(*TOKEN_FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """List tokens with D before and after, ΔD, r, Ḋ and every criterion's decision.

    JSON is one object a line. Under `own` the rows of the criterion's arm come first, then
    those of the baseline's.
    """
    form = chosen_form(form, output, TOKEN_FORMATS)
    check_output(output, run)
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise OptionError("Parquet is not for a terminal: name a file by -o")
    question = _question(threshold, divergence, criterion, baseline, protocol)
    dump = _open(run)
    from deltad.analysis import TokenTable

    listed = TokenTable(
        dump, question, seeds=seed or (), outside=outside, disagreement=disagreement
    )
    with sink(output) as file, progress_bar(listed.rows, "rows", quiet=quiet) as bar:
        listed.write(file, form, progress=bar.advance)


@app.command()
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
            show_default=_DEFAULT_PROTOCOL,
        ),
    ] = "",
    by_seed: Annotated[bool, typer.Option("--by-seed", help="In text, a row a seed too.")] = False,
    bootstrap_seed: BootstrapSeed = 0,
    form: Annotated[str, _format_option(*FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Compare two criteria: unsafe-keep rates and contracting fractions, seed by seed.

    CSV, Markdown and Parquet have a row a seed, or a row a protocol with `--protocol all`.
    """
    form = chosen_form(form, output, FORMATS)
    check_output(output, run)
    every = protocol == ALL_PROTOCOLS
    question = _question(threshold, divergence, criterion, baseline, "" if every else protocol)
    dump = _open(run)
    from deltad import analysis
    from deltad.analysis import export

    if every:
        rows = _rows(dump, (arm for arm in dump.arms if arm != "zero-step"))
        with progress_bar(rows, "rows", quiet=quiet) as bar:
            protocols = analysis.protocol_table(
                dump, question, bootstrap_seed=bootstrap_seed, progress=bar.advance
            )
        _note_vectors(protocols.tables[0], quiet)
        _write(
            form,
            output,
            text=lambda: analysis.protocol_text(protocols),
            json_object=protocols.to_json_object,
            columns=lambda: export.protocol_columns(protocols),
        )
        return
    rates = _rates(dump, question, bootstrap_seed, quiet)
    _write(
        form,
        output,
        text=lambda: analysis.rate_text(rates, per_seed=by_seed),
        json_object=rates.to_json_object,
        columns=lambda: export.rate_columns(rates),
    )


@app.command()
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
    quiet: Quiet = False,
) -> None:
    """Draw ΔD of kept disagreement tokens and the unsafe-keep rates by seed."""
    question = _question(threshold, divergence, criterion, baseline, protocol)
    from deltad import analysis
    from deltad.analysis.figures import figure_format

    forms = [figure_format(path) for path in output]
    for path in output:
        check_output(path, run)
    rates = _rates(_open(run), question, bootstrap_seed, quiet)
    figure = analysis.figure4(rates)
    for path, form in zip(output, forms, strict=True):
        with sink(path) as file:
            analysis.save_figure(figure, file, form=form)


@app.command()
def check(
    run: Run,
    form: Annotated[str, _format_option("text", "json")] = "",
    quiet: Quiet = False,
) -> None:
    """Check every row of a dump against the contract; a line a problem, and status 1 if any."""
    form = chosen_form(form, None, ("text", "json"))
    from deltad.dumps.validate import check_dump

    with progress_bar(None, "files", quiet=quiet) as bar:
        try:
            problems = check_dump(run, strict=False, progress=bar.at)
        except FileNotFoundError as error:
            raise OptionError(f"{run} does not exist") from error
    if form == "json":
        found = {"format": 1, "ok": not problems, "problems": [vars(each) for each in problems]}
        _write("json", None, json_object=lambda: found)
    elif problems:
        for problem in problems:
            complain(str(problem))
    else:
        _write("text", None, text=lambda: _contents(_open(run)))
    if problems:
        raise typer.Exit(BAD_CONTENT)


app.add_typer(
    typer.Typer(cls=RecipeCommands),
    name="record",
    help="Record a dump of real updates by a recipe: RUN, then the recipe's fields as options.",
)


@app.command()
def reproduce(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where everything goes.")
    ] = Path("deltad-figure4"),
    seeds: Seeds = None,
    workers: Workers = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Record the recipe tiny, print its table for all protocols and draw Figure 4: minutes.

    DIR gets dump/, table.txt, table.json, figure4.png and figure4.pdf. Without --seeds 61.
    """
    from deltad.probes.recipes import TinyRecipe

    run = output / "dump"
    record_dump(
        TinyRecipe(), run, seeds=seeds, workers=workers, resume=resume, store="above", quiet=quiet
    )
    for file, form in ((None, "text"), (output / "table.txt", ""), (output / "table.json", "")):
        table(run, file, protocol=ALL_PROTOCOLS, form=form, quiet=True)
    figure4(run, [output / "figure4.png", output / "figure4.pdf"], quiet=quiet)
    note(f"the dump, tables and figures are in {output}", quiet=quiet)
