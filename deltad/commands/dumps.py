"""Commands about a dump's rows: list them, check them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .options import (
    Baseline,
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
)
from .terminal import (
    BAD_CONTENT,
    OptionError,
    check_output,
    chosen_form,
    complain,
    progress_bar,
    sink,
)

if TYPE_CHECKING:
    from deltad.dumps import Dump

TOKEN_FORMATS: Final = ("csv", "json", "parquet")


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
    form: Annotated[str, format_option(*TOKEN_FORMATS)] = "",
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
    question = question_of(threshold, divergence, criterion, baseline, protocol)
    dump = open_dump(run)
    from deltad.analysis import TokenTable

    listed = TokenTable(
        dump, question, seeds=seed or (), outside=outside, disagreement=disagreement
    )
    with sink(output) as file, progress_bar(listed.rows, "rows", quiet=quiet) as bar:
        listed.write(file, form, progress=bar.advance)


def check(
    run: Run,
    form: Annotated[str, format_option("text", "json")] = "",
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
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    elif problems:
        for problem in problems:
            complain(str(problem))
    else:
        typer.echo(_contents(open_dump(run)))
    if problems:
        raise typer.Exit(BAD_CONTENT)


def _contents(dump: Dump) -> str:
    """What a dump in order holds, in one line."""
    parts = [part for arm in dump.arms for part in dump.files(arm)]
    seeds = {part.seed for part in parts}
    rows = sum(part.rows for part in parts)
    seen = sum(part.metadata.rows_seen for part in parts)
    return (
        f"in order: {dump.path} has arms {', '.join(dump.arms)}; {len(seeds)} seeds, "
        f"{len(parts)} files, {rows} rows of {seen} tokens, top-{dump.top_k} of "
        f"{dump.vocab_size} ids{_unread(dump)}"
    )


def _unread(dump: Dump) -> str:
    """Which readings of the policy some arms are without."""
    words = ""
    for reading, when in (("pre", "before"), ("post", "after")):
        arms = [arm for arm in dump.arms if reading not in dump.readings(arm)]
        if arms:
            words += f"; the policy {when} the update was not read in arm {', '.join(arms)}"
    return words
