"""Commands that answer a question about a dump."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from .options import (
    BOOTSTRAP,
    BY,
    COUNTING,
    PAIR,
    PROTOCOL,
    QUIET,
    RECOMPUTE,
    REGION,
    RUN_OR_SHARDS,
    SEEDS,
    Call,
    Group,
    command,
    criteria,
    option,
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
    from deltad.analysis.result import Result

FORMS: Final = ("text", "json", "csv", "tsv", "markdown", "latex", "html", "parquet")
DRAWN: Final = (*FORMS, "png", "pdf", "svg")
ALL: Final = "all"

TABLE: Final[Group] = {
    "over": option(
        str, "", "Sweep the question over that.", metavar="threshold|top-k|protocol",
        show_default=False,
    ),
    "values": option(
        str, "", "With --over: its values.", metavar="VALUE,…",
        show_default="δ from 0.02 to 1; K' from 1 to K; every protocol",
    ),
    **BY,
    "power": option(bool, False, "How many seeds it takes to see a difference."),
    "points": option(
        str, "", "With --power: by how many points the criterion is lower.", metavar="X,…",
        show_default="1,2,3,5,10",
    ),
    "goal": option(
        float | None, None, "With --power: the power asked for.", show_default="0.8"
    ),
    "level": option(
        float | None, None, "With --power: level of the two-sided tests.", show_default="0.05"
    ),
    "by_seed": option(bool, False, "In text, also one row per seed."),
}  # fmt: skip
COMPARE: Final[Group] = {
    **criteria(
        "Criteria and soft weights, or FILE.py:NAME for rules of your own.",
        "all that RUN can answer for",
    ),
    **BY,
    "agreement": option(bool, False, "In text, also who agrees with whom."),
    **REGION,
    "baseline": PAIR["baseline"],
}
LADDER: Final[Group] = {
    **criteria("Further criteria to judge."),
    "calibration": option(bool, False, "Hold every predicted first-order change against ΔD."),
    "bins": option(
        int | None, None, "With --calibration: bins by quantile.", min=1, show_default="8"
    ),
}
FIGURE: Final[Group] = {
    "output": option(
        list[Path], ..., "A .png, .pdf or .svg; may be given several times.", "-o", "--output",
        metavar="FILE",
    ),
}  # fmt: skip
TOKENS: Final[Group] = {
    **criteria("Whose decisions are listed.", "all criteria that RUN can answer for"),
    "outside": option(bool, False, "Only tokens outside."),
    "disagreement": option(bool, False, "Only tokens that exactly one criterion masks."),
    **SEEDS,
    "step": option(list[int] | None, None, "Only this step; may be given several times."),
    **RECOMPUTE,
}
VIEW: Final[Group] = {
    "output": option(
        Path | None, None, "An .html file.", "-o", "--output", metavar="FILE",
        show_default="RUN's name with .html, in this folder",
    ),
    "open": option(bool, False, "Open the page in a browser."),
    **criteria("Further rules that the viewer decides by."),
    "seed": option(
        list[int] | None, None, "The viewer shows only this seed; may be given several times."
    ),
    "tokens": option(
        int, 100_000, "At most so many tokens in the viewer, by the largest D.", min=1
    ),
    **BOOTSTRAP,
}  # fmt: skip


@command(TABLE, REGION, PAIR, PROTOCOL, COUNTING, run=RUN_OR_SHARDS, forms=DRAWN)
def table(call: Call) -> None:
    """Compare two criteria: unsafe-keep rates and contracting fractions, seed by seed.

    Files have one row per seed, with --over per point, with --by per bin and criterion, with
    --power per test and difference. --protocol all gives one row per protocol.

    Example: deltad table data_dumps/tiny --protocol own
    """
    call.only_with("over", "values")
    call.only_with("by", "bins")
    call.only_with("power", "points", "goal", "level")
    over, by, power = call.over, call.by, call.power
    if sum(map(bool, (over, by, power, call.by_seed))) > 1:
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
    with call.counting() as how:
        if over or by:
            from deltad.analysis.tables import compare

            if over:
                values = call.listed("values")
                result = compare.sweep(dump, question, over=over, values=values, **how)
            else:
                how |= call.given("bins")
                result = compare.condition_table(dump, question, call.listed("by"), **how)
        elif every:
            result = rates.protocol_table(dump, question, **how)
        else:
            result = replace(rates.rate_table(dump, question, **how), seed_rows=call.by_seed)
    if power:
        result = _power(call, result)
    if call.form != "text":
        for name, why in getattr(result, "refused", {}).items():
            note(f"{name} is left out: {why}", quiet=call.quiet)
    call.write(result)


def _power(call: Call, rates: Any) -> Result:
    """How many seeds it takes, by those that were counted."""
    from deltad.analysis.tables import power

    how = call.given("level")
    if call.goal is not None:
        how["power"] = call.goal
    if call.points:
        try:
            how["points"] = tuple(float(each) / 100 for each in call.listed("points"))
        except ValueError as error:
            raise OptionError(f"`--points` must be numbers, got {call.points!r}") from error
    result = power.power_table(rates, **how)
    with call.progress(len(result.searches), "searches") as bar:
        for test, point in result.searches:
            result.row(test, point)
            bar.advance(1)
    return result


@command(COMPARE, PROTOCOL, COUNTING, run=RUN_OR_SHARDS, forms=DRAWN)
def compare(call: Call) -> None:
    """Set criteria side by side: what each masks, and how often it was right.

    Files have one row per criterion; with --by one per bin and criterion.

    Example: deltad compare data_dumps/tiny --criteria tis,drpo
    """
    call.only_with("by", "bins")
    names, conditions = call.listed("criteria"), call.listed("by")
    question, dump = call.question, call.dump
    from deltad.analysis.tables import compare as tables

    result: Result
    with call.counting() as how:
        if conditions:
            how |= call.given("bins")
            result = tables.condition_table(dump, question, conditions, names, **how)
        else:
            result = tables.compare(dump, question, names, agreements=call.agreement, **how)
    call.write(result)


@command(LADDER, REGION, PAIR, PROTOCOL, COUNTING, run=RUN_OR_SHARDS, forms=DRAWN)
def ladder(call: Call) -> None:
    """Show where a prediction loses the sign of ΔD, from the token's own logits to the step.

    Needs a dump with the ladder's columns (`record --ladder`); of others it shows the lowest rung
    and the step. Files have one row per rung, set and criterion; with --calibration one per
    prediction and bin.

    Example: deltad ladder data_dumps/smollm2-ladder
    """
    call.only_with("calibration", "bins")
    names = call.listed("criteria")
    question, dump = call.question, call.dump
    from deltad.analysis.tables import ladder as tables

    result: Result
    with call.counting(*question.resolve(dump).arms) as how:
        if call.calibration:
            result = tables.calibrate(dump, question, **how, **call.given("bins"))
        else:
            result = tables.ladder_table(dump, question, criteria=names, **how)
    call.write(result)


@command(FIGURE, REGION, PAIR, PROTOCOL, COUNTING, QUIET, run=RUN_OR_SHARDS)
def figure4(call: Call) -> None:
    """Draw ΔD of kept disagreement tokens, and the unsafe-keep rates by seed.

    Example: deltad figure4 data_dumps/tiny -o figure4.png
    """
    from deltad.analysis.result import DRAWN as ENDINGS
    from deltad.analysis.result import form_of

    if call.shard is not None:
        raise OptionError("`--shard` goes with `deltad table`, whose shards this command takes")
    forms = {path: form_of(path, ENDINGS) for path in call.output}
    for path in forms:
        for run in call.run:
            check_output(path, run)
    question, dump = call.question, call.dump
    from deltad.analysis.tables.rates import rate_table

    with call.counting() as how:
        rates = rate_table(dump, question, **how)
    for path, form in forms.items():
        with sink(path) as file:
            file.write(rates.form(form))


@command(TOKENS, REGION, PAIR, PROTOCOL, forms=("csv", "tsv", "json", "parquet"))
def tokens(call: Call) -> None:
    """List tokens with D before and after, ΔD, r, Ḋ and every criterion's decision.

    JSON is one object per line. Under `own` the rows of the criterion's arm come first, then
    those of the baseline's.

    Example: deltad tokens data_dumps/tiny --disagreement --seed 0
    """
    names, question, dump = call.listed("criteria"), call.question, call.dump
    from deltad.analysis.tokens import TokenTable

    rows = TokenTable(
        dump, question, criteria=names, seeds=call.seed or (), steps=call.step or (),
        outside=call.outside, disagreement=call.disagreement, recompute=call.recompute,
    )  # fmt: skip
    with sink(call.output) as file, call.progress(rows.rows) as bar:
        rows.write(file, call.form, progress=bar.advance)


@command(SEEDS, forms=FORMS)
def doctor(call: Call) -> None:
    """Name the likely cause where engine and trainer disagree, with evidence, size and remedy.

    Values that `check` refuses are evidence here. Exit status 0 where nothing wrong was found, 3
    with findings, 4 where there is not enough to tell.

    Example: deltad doctor data_dumps/tiny
    """
    from deltad.analysis.doctor import examine
    from deltad.analysis.doctor.sample import chosen_arm

    dump = call.dump
    arm = chosen_arm(dump)
    for each in call.seed or ():
        if each not in dump.seeds(arm):
            raise OptionError(f"`--seed` must be one of arm {arm!r}, got {each}")
    with call.progress() as bar:
        diagnosis = examine(dump, arm=arm, seeds=call.seed, progress=bar.advance)
    call.write(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(NOT_ENOUGH if diagnosis.healthy is None else FINDINGS)


@command(VIEW, REGION, PAIR, PROTOCOL, QUIET)
def view(call: Call) -> None:
    """Write one HTML page: tables, figures, the doctor's findings and a token viewer.

    The page needs no network; its path is printed. Exit status 1 where a section could not be
    made: the page is written all the same, and says which and why.

    Example: deltad view data_dumps/tiny -o tiny.html
    """
    from deltad.analysis.result import form_of

    page = call.output or Path(f"{call.run[0].name or 'report'}.html")
    form_of(page, ("html",))
    check_output(page, call.run[0])
    names, question, dump = call.listed("criteria"), call.question, call.dump
    from deltad.analysis.report import report

    with call.progress() as bar:
        made = report(
            dump, question, criteria=names, seeds=call.seed or (), tokens=call.tokens,
            bootstrap_seed=call.bootstrap_seed, progress=bar.advance,
        )  # fmt: skip
    with sink(page) as file:
        file.write(made.html.encode())
    typer.echo(page)
    for title, error in made.failures:
        complain(f"section {title} could not be made: {error}")
    if call.open:
        typer.launch(page.resolve().as_uri())
    if made.failures:
        raise typer.Exit(BAD_CONTENT)
