"""Commands that answer a question about a dump: table, compare, ladder, figure4, tokens, view."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import (
    COUNTING,
    PAIR,
    PROTOCOL,
    QUIET,
    REGION,
    RUN_OR_SHARDS,
    Call,
    command,
    listed,
    rows_of,
)
from .terminal import (
    BAD_CONTENT,
    FINDINGS,
    NOT_ENOUGH,
    OptionError,
    check_output,
    complain,
    note,
    sink,
)

if TYPE_CHECKING:
    from deltad.analysis.question import Question
    from deltad.analysis.result import Result
    from deltad.dumps import Dump

FORMS: Final = ("text", "json", "csv", "tsv", "markdown", "latex", "html", "parquet")
DRAWN: Final = (*FORMS, "png", "pdf", "svg")
ALL: Final = "all"


@command(REGION, PAIR, PROTOCOL, COUNTING, run=RUN_OR_SHARDS, forms=DRAWN)
def table(
    call: Call,
    *,
    over: Annotated[
        str,
        typer.Option(metavar="threshold|top-k|protocol", help="Sweep the question over that.",
                     show_default=False),
    ] = "",
    values: Annotated[
        str,
        typer.Option(metavar="VALUE,…", help="With --over: its values.",
                     show_default="δ from 0.02 to 1; K' from 1 to K; every protocol"),
    ] = "",
    by: Annotated[
        str,
        typer.Option(metavar="WHAT,…", show_default=False,
                     help="Tell the tokens outside apart by advantage, position, state, entropy, "
                     "divergence, ratio, tail or token."),
    ] = "",
    bins: Annotated[
        int | None, typer.Option(min=1, help="With --by: bins by quantile.", show_default="4")
    ] = None,
    power: Annotated[
        bool, typer.Option("--power", help="How many seeds it takes to see a difference.")
    ] = False,
    points: Annotated[
        str,
        typer.Option(metavar="X,…", help="With --power: by how many points the criterion is lower.",
                     show_default="1,2,3,5,10"),
    ] = "",
    goal: Annotated[
        float | None, typer.Option(help="With --power: the power asked for.", show_default="0.8")
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(help="With --power: level of the two-sided tests.", show_default="0.05"),
    ] = None,
    by_seed: Annotated[
        bool, typer.Option("--by-seed", help="In text, also one row per seed.")
    ] = False,
) -> None:  # fmt: skip
    """Compare two criteria: unsafe-keep rates and contracting fractions, seed by seed.

    Files have one row per seed, with --over per point, with --by per bin and criterion, with
    --power per test and difference. --protocol all gives one row per protocol.

    Example: deltad table data_dumps/tiny --protocol own
    """
    _only_with("--over", over, {"--values": values})
    _only_with("--by", by, {"--bins": bins})
    _only_with("--power", power, {"--points": points, "--goal": goal, "--level": level})
    if sum(map(bool, (over, by, power, by_seed))) > 1:
        raise OptionError("give one of `--over`, `--by`, `--power` and `--by-seed`")
    if over in ("threshold", "protocol") and call.values[over]:
        raise OptionError(f"`--{over}` cannot be given where it is swept over: use `--values`")
    every = call.protocol == ALL
    if every:
        call.values["protocol"] = ""
        if over or by or power:
            raise OptionError("`--protocol all` goes with none of `--over`, `--by` and `--power`")
    question, dump = call.question, call.dump
    from deltad.analysis.tables import rates

    result: Result
    with call.progress(rows_of(dump, dump.arms)) as bar:
        how: dict[str, Any] = {**call.counting, "progress": bar.advance}
        if over or by:
            result = _many(dump, question, over, listed(values, "--values"), by, bins, how)
        elif every:
            result = rates.protocol_table(dump, question, **how)
        else:
            result = replace(rates.rate_table(dump, question, **how), seed_rows=by_seed)
    if power:
        result = _power(call, result, points, goal, level)
    if call.form != "text":
        for name, why in getattr(result, "refused", {}).items():
            note(f"{name} is left out: {why}", quiet=call.quiet)
    call.write(result)


@command(REGION, {"baseline": PAIR["baseline"]}, PROTOCOL, COUNTING, run=RUN_OR_SHARDS, forms=DRAWN)
def compare(
    call: Call,
    *,
    criteria: Annotated[
        str,
        typer.Option(metavar="RULE,…", show_default="all that RUN can answer for",
                     help="Criteria and soft weights, or FILE.py:NAME for rules of your own."),
    ] = "",
    by: Annotated[
        str,
        typer.Option(metavar="WHAT,…", show_default=False,
                     help="Tell the tokens outside apart, as `deltad table --by` does."),
    ] = "",
    bins: Annotated[
        int | None, typer.Option(min=1, help="With --by: bins by quantile.", show_default="4")
    ] = None,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="In text, also who agrees with whom.")
    ] = False,
) -> None:  # fmt: skip
    """Set criteria side by side: what each masks, and how often it was right.

    Files have one row per criterion; with --by one per bin and criterion.

    Example: deltad compare data_dumps/tiny --criteria tis,drpo
    """
    _only_with("--by", by, {"--bins": bins})
    names, conditions = listed(criteria, "--criteria"), listed(by, "--by")
    question, dump = call.question, call.dump
    from deltad.analysis.tables import compare as tables

    with call.progress(rows_of(dump, dump.arms)) as bar:
        how: dict[str, Any] = {**call.counting, "progress": bar.advance}
        if conditions:
            result: Result = tables.condition_table(
                dump, question, conditions, names, bins=bins or tables.DEFAULT_BINS, **how
            )
        else:
            result = tables.compare(dump, question, names, agreements=agreement, **how)
    call.write(result)


@command(REGION, PAIR, PROTOCOL, COUNTING, run=RUN_OR_SHARDS, forms=DRAWN)
def ladder(
    call: Call,
    *,
    criteria: Annotated[
        str,
        typer.Option(metavar="RULE,…", help="Further criteria to judge.", show_default=False),
    ] = "",
    calibration: Annotated[
        bool,
        typer.Option("--calibration", help="Hold every predicted first-order change against ΔD."),
    ] = False,
    bins: Annotated[
        int | None,
        typer.Option(min=1, help="With --calibration: bins by quantile.", show_default="8"),
    ] = None,
) -> None:  # fmt: skip
    """Show where a prediction loses the sign of ΔD, from the token's own logits to the step.

    Needs a dump with the ladder's columns (`record --ladder`); of others it shows the lowest rung
    and the step. Files have one row per rung, set and criterion; with --calibration one per
    prediction and bin.

    Example: deltad ladder data_dumps/smollm2-ladder
    """
    _only_with("--calibration", calibration, {"--bins": bins})
    question, dump = call.question, call.dump
    from deltad.analysis.tables import ladder as tables

    with call.progress(rows_of(dump, question.resolve(dump).arms)) as bar:
        how: dict[str, Any] = {**call.counting, "progress": bar.advance}
        if calibration:
            result: Result = tables.calibrate(
                dump, question, bins=bins or tables.DEFAULT_BINS, **how
            )
        else:
            names = listed(criteria, "--criteria")
            result = tables.ladder_table(dump, question, criteria=names, **how)
    call.write(result)


@command(REGION, PAIR, PROTOCOL, COUNTING, QUIET, run=RUN_OR_SHARDS)
def figure4(
    call: Call,
    *,
    output: Annotated[
        list[Path],
        typer.Option("-o", "--output", metavar="FILE",
                     help="A .png, .pdf or .svg; may be given several times."),
    ],
) -> None:  # fmt: skip
    """Draw ΔD of kept disagreement tokens, and the unsafe-keep rates by seed.

    Example: deltad figure4 data_dumps/tiny -o figure4.png
    """
    from deltad.analysis.result import DRAWN as ENDINGS
    from deltad.analysis.result import form_of

    if call.shard is not None:
        raise OptionError("`--shard` goes with `deltad table`, whose shards this command takes")
    forms = [form_of(path, ENDINGS) for path in output]
    for path in output:
        for run in call.run:
            check_output(path, run)
    question, dump = call.question, call.dump
    from deltad.analysis.tables.rates import rate_table

    with call.progress(rows_of(dump, dump.arms)) as bar:
        rates = rate_table(dump, question, progress=bar.advance, **call.counting)
    for path, form in zip(output, forms, strict=True):
        with sink(path) as file:
            file.write(rates.form(form))


@command(REGION, PAIR, PROTOCOL, forms=("csv", "tsv", "json", "parquet"))
def tokens(
    call: Call,
    *,
    criteria: Annotated[
        str,
        typer.Option(metavar="RULE,…", help="Whose decisions are listed.",
                     show_default="all criteria that RUN can answer for"),
    ] = "",
    outside: Annotated[bool, typer.Option("--outside", help="Only tokens outside.")] = False,
    disagreement: Annotated[
        bool, typer.Option("--disagreement", help="Only tokens that exactly one criterion masks.")
    ] = False,
    seed: Annotated[
        list[int] | None, typer.Option(help="Only this seed; may be given several times.")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="Only this step; may be given several times.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute D and Ḋ from the stored log-probs.")
    ] = False,
) -> None:  # fmt: skip
    """List tokens with D before and after, ΔD, r, Ḋ and every criterion's decision.

    JSON is one object per line. Under `own` the rows of the criterion's arm come first, then
    those of the baseline's.

    Example: deltad tokens data_dumps/tiny --disagreement --seed 0
    """
    if call.form == "parquet" and call.output is None and sys.stdout.isatty():
        raise OptionError("Parquet is not for a terminal: name a file by -o")
    question, dump = call.question, call.dump
    from deltad.analysis.tokens import TokenTable

    rows = TokenTable(
        dump, question, criteria=listed(criteria, "--criteria"), seeds=seed or (),
        steps=step or (), outside=outside, disagreement=disagreement, recompute=recompute,
    )  # fmt: skip
    with sink(call.output) as file, call.progress(rows.rows) as bar:
        rows.write(file, call.form, progress=bar.advance)


@command(forms=FORMS)
def doctor(
    call: Call,
    *,
    seed: Annotated[
        list[int] | None, typer.Option(help="Only this seed; may be given several times.")
    ] = None,
) -> None:
    """Name the likely cause where engine and trainer disagree, with evidence, size and remedy.

    Values that `check` refuses are evidence here. Exit status 0 where nothing wrong was found, 3
    with findings, 4 where there is not enough to tell.

    Example: deltad doctor data_dumps/tiny
    """
    from deltad.analysis.doctor import examine

    dump = call.dump
    from deltad.analysis.doctor.sample import chosen_arm

    arm = chosen_arm(dump)
    for each in seed or ():
        if each not in dump.seeds(arm):
            raise OptionError(f"`--seed` must be one of arm {arm!r}, got {each}")
    with call.progress() as bar:
        diagnosis = examine(dump, arm=arm, seeds=seed, progress=bar.advance)
    call.write(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(NOT_ENOUGH if diagnosis.healthy is None else FINDINGS)


@command(REGION, PAIR, PROTOCOL, QUIET)
def view(
    call: Call,
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="An .html file.",
                     show_default="RUN's name with .html, in this folder"),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    criteria: Annotated[
        str,
        typer.Option(metavar="RULE,…", help="Further rules that the viewer decides by.",
                     show_default=False),
    ] = "",
    seed: Annotated[
        list[int] | None,
        typer.Option(help="The viewer shows only this seed; may be given several times."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="At most so many tokens in the viewer, by the largest D.")
    ] = 100_000,
    bootstrap_seed: Annotated[
        int, typer.Option(min=0, help="Seed of the intervals' random numbers.")
    ] = 0,
) -> None:  # fmt: skip
    """Write one HTML page: tables, figures, the doctor's findings and a token viewer.

    The page needs no network; its path is printed. Exit status 1 where a section could not be
    made: the page is written all the same, and says which and why.

    Example: deltad view data_dumps/tiny -o tiny.html
    """
    from deltad.analysis.result import form_of

    page = output or Path(f"{call.run[0].name or 'report'}.html")
    form_of(page, ("html",))
    check_output(page, call.run[0])
    question, dump = call.question, call.dump
    from deltad.analysis.report import report

    with call.progress() as bar:
        made = report(
            dump, question, criteria=listed(criteria, "--criteria"), seeds=seed or (),
            tokens=tokens, bootstrap_seed=bootstrap_seed, progress=bar.advance,
        )  # fmt: skip
    with sink(page) as file:
        file.write(made.html.encode())
    typer.echo(page)
    for title, error in made.failures:
        complain(f"section {title} could not be made: {error}")
    if show:
        typer.launch(page.resolve().as_uri())
    if made.failures:
        raise typer.Exit(BAD_CONTENT)


def _many(
    dump: Dump,
    question: Question,
    over: str,
    values: list[str],
    by: str,
    bins: int | None,
    how: dict[str, Any],
) -> Result:
    """A table of many pairs: along a sweep, or by conditions."""
    from deltad.analysis.tables import compare

    if over:
        return compare.sweep(dump, question, over=over, values=values, **how)
    conditions = listed(by, "--by")
    return compare.condition_table(
        dump, question, conditions, bins=bins or compare.DEFAULT_BINS, **how
    )


def _power(call: Call, rates: Any, points: str, goal: float | None, level: float | None) -> Result:
    """How many seeds it takes, by those that were counted."""
    from deltad.analysis.tables import power

    shares: tuple[float, ...] = power.POINTS
    if points:
        try:
            shares = tuple(float(each) / 100 for each in listed(points, "--points"))
        except ValueError as error:
            raise OptionError(f"`--points` must be numbers, got {points!r}") from error
    result = power.power_table(
        rates, points=shares, power=power.POWER if goal is None else goal,
        level=power.LEVEL if level is None else level,
    )  # fmt: skip
    with call.progress(len(result.searches), "searches") as bar:
        for test, point in result.searches:
            result.row(test, point)
            bar.advance(1)
    return result


def _only_with(option: str, given: Any, others: dict[str, Any]) -> None:
    """Refuse options that mean nothing without another one."""
    for name, value in others.items():
        if value not in (None, "") and not given:
            raise OptionError(f"`{name}` goes with `{option}`")
