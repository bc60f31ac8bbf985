"""Commands that answer a question about a dump: table, compare, ladder, figure4, tokens, view."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from .options import (
    BOOTSTRAP_SEED,
    COUNTING,
    CRITERION,
    QUESTION,
    QUIET,
    RECOMPUTE,
    RUN,
    SHARDS,
    Call,
    Option,
    command,
    names,
    numbers,
    switch,
)
from .terminal import OptionError, Status, check_output, complain, sink

if TYPE_CHECKING:
    from deltad.analysis.result import Result

FORMS: Final = ("text", "json", "csv", "tsv", "markdown", "latex", "html", "parquet")
DRAWN: Final = (*FORMS, "png", "pdf", "svg")
BY: Final = Option("--by", names, "Tell the tokens outside apart by advantage, position, state, "
                   "entropy, divergence, ratio, tail or token.", metavar="WHAT,…")  # fmt: skip
BINS: Final = Option("--bins", int, "bins by quantile.", needs="--by", shown="4", min=1)
SEED: Final = Option("--seed", [int], "Only this seed; may be given several times.")


@command(
    SHARDS,
    Option("--over", ("threshold", "top-k", "protocol"), "Sweep the question over that."),
    Option("--values", names, "its values.", needs="--over", metavar="VALUE,…",
           shown="δ from 0.02 to 1; K' from 1 to K; every protocol"),
    BY, BINS,
    switch("--power", "How many seeds it takes to see a difference."),
    Option("--points", numbers, "by how many points the criterion is lower.", needs="--power",
           shown="1,2,3,5,10"),
    Option("--goal", float, "the power asked for.", needs="--power", shown="0.8"),
    Option("--level", float, "level of the two-sided tests.", needs="--power", shown="0.05"),
    switch("--by-seed", "In text, also one row per seed."),
    *QUESTION, *COUNTING, forms=DRAWN,
)  # fmt: skip
def table(call: Call) -> None:
    """Compare two criteria: unsafe-keep rates and contracting fractions, seed by seed.

    Files have one row per seed, with --over per point, with --by per bin and criterion, with
    --power per test and difference. --protocol all gives one row per protocol.

    Example: deltad table data_dumps/tiny --protocol own
    """
    over, by, power, every = call.over, call.by, call.power, call.protocol == "all"
    if sum(map(bool, (over, by, power, call.by_seed))) > 1:
        raise OptionError("give one of `--over`, `--by`, `--power` and `--by-seed`")
    if over and vars(call).get(over) is not None:
        raise OptionError(f"`--{over}` cannot be given where it is swept over: use `--values`")
    if every:
        if over or by or power:
            raise OptionError("`--protocol all` goes with none of `--over`, `--by` and `--power`")
        call.protocol = None
    question, dump = call.question, call.dump
    from deltad.analysis.tables import rates

    result: Result
    with call.counting() as how:
        if over or by:
            from deltad.analysis.tables import compare as pairs

            if over:
                result = pairs.sweep(dump, question, over=over, values=call.values, **how)
            else:
                how |= call.given([BINS])
                result = pairs.condition_table(dump, question, by, **how)
        elif every:
            result = rates.protocol_table(dump, question, **how)
        else:
            result = replace(rates.rate_table(dump, question, **how), seed_rows=call.by_seed)
    if power:
        result = _power(call, result)
    if call.form != "text":
        for name, why in getattr(result, "refused", {}).items():
            call.note(f"{name} is left out: {why}")
    call.write(result)


def _power(call: Call, rates: Any) -> Result:
    """How many seeds it takes, by those that were counted."""
    from deltad.analysis.tables import power

    result = power.power_table(
        rates,
        points=[each / 100 for each in call.points] or power.POINTS,
        power=power.POWER if call.goal is None else call.goal,
        level=power.LEVEL if call.level is None else call.level,
    )
    with call.progress(len(result.searches), "searches") as bar:
        for test, point in result.searches:
            result.row(test, point)
            bar.advance(1)
    return result


@command(
    SHARDS,
    Option("--criteria", names, "Criteria and soft weights, or FILE.py:NAME for rules of your own.",
           shown="all that RUN can answer for"),
    BY, BINS,
    switch("--agreement", "In text, also who agrees with whom."),
    *(each for each in QUESTION if each is not CRITERION), *COUNTING, forms=DRAWN,
)  # fmt: skip
def compare(call: Call) -> None:
    """Set criteria side by side: what each masks, and how often it was right.

    Files have one row per criterion; with --by one per bin and criterion.

    Example: deltad compare data_dumps/tiny --criteria tis,drpo
    """
    question, dump, criteria = call.question, call.dump, call.criteria
    from deltad.analysis.tables import compare as tables

    result: Result
    with call.counting() as how:
        if call.by:
            how |= call.given([BINS])
            result = tables.condition_table(dump, question, call.by, criteria, **how)
        else:
            result = tables.compare(dump, question, criteria, agreements=call.agreement, **how)
    call.write(result)


@command(
    SHARDS,
    Option("--criteria", names, "Further criteria to judge."),
    switch("--calibration", "Hold every predicted first-order change against ΔD."),
    BINS._replace(needs="--calibration", shown="8"),
    *QUESTION, *COUNTING, forms=DRAWN,
)  # fmt: skip
def ladder(call: Call) -> None:
    """Show where a prediction loses the sign of ΔD, from the token's own logits to the step.

    Needs a dump with the ladder's columns (`record --ladder`); of others it shows the lowest rung
    and the step. Files have one row per rung, set and criterion; with --calibration one per
    prediction and bin.

    Example: deltad ladder data_dumps/smollm2-ladder
    """
    question, dump = call.question, call.dump
    from deltad.analysis.tables import ladder as tables

    result: Result
    with call.counting(question.resolve(dump).arms) as how:
        if call.calibration:
            result = tables.calibrate(dump, question, **call.given([BINS]), **how)
        else:
            result = tables.ladder_table(dump, question, criteria=call.criteria, **how)
    call.write(result)


@command(
    SHARDS,
    Option("-o --output", [Path], "A .png, .pdf or .svg; may be given several times.", ...),
    *QUESTION, *COUNTING, QUIET,
)  # fmt: skip
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
        check_output(path, call.runs)
    question, dump = call.question, call.dump
    from deltad.analysis.tables.rates import rate_table

    with call.counting() as how:
        rates = rate_table(dump, question, **how)
    for path, form in forms.items():
        with sink(path) as file:
            file.write(rates.form(form))


@command(
    RUN,
    Option("--criteria", names, "Whose decisions are listed.",
           shown="all criteria that RUN can answer for"),
    switch("--outside", "Only tokens outside."),
    switch("--disagreement", "Only tokens that exactly one criterion masks."),
    SEED,
    Option("--step", [int], "Only this step; may be given several times."),
    RECOMPUTE, *QUESTION, forms=("csv", "tsv", "json", "parquet"),
)  # fmt: skip
def tokens(call: Call) -> None:
    """List tokens with D before and after, ΔD, r, Ḋ and every criterion's decision.

    JSON is one object per line. Under `own` the rows of the criterion's arm come first, then
    those of the baseline's.

    Example: deltad tokens data_dumps/tiny --disagreement --seed 0
    """
    question, dump = call.question, call.dump
    from deltad.analysis.tokens import TokenTable

    rows = TokenTable(
        dump, question, criteria=call.criteria, seeds=call.seed, steps=call.step,
        outside=call.outside, disagreement=call.disagreement, recompute=call.recompute,
    )  # fmt: skip
    with sink(call.output) as file, call.progress(rows.rows) as bar:
        rows.write(file, call.form, progress=bar.advance)


@command(RUN, SEED, forms=FORMS)
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
    for seed in call.seed:
        if seed not in dump.seeds(arm):
            raise OptionError(f"`--seed` must be one of arm {arm!r}, got {seed}")
    with call.progress() as bar:
        diagnosis = examine(dump, arm=arm, seeds=call.seed or None, progress=bar.advance)
    call.write(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(Status.NOT_ENOUGH if diagnosis.healthy is None else Status.FINDINGS)


@command(
    RUN,
    Option("-o --output", Path, "An .html file.", shown="RUN's name with .html, in this folder"),
    switch("--open", "Open the page in a browser."),
    Option("--criteria", names, "Further rules that the viewer decides by."),
    Option("--seed", [int], "The viewer shows only this seed; may be given several times."),
    Option("--tokens", int, "At most so many tokens in the viewer, by the largest D.", 100_000,
           min=1),
    BOOTSTRAP_SEED, *QUESTION, QUIET,
)  # fmt: skip
def view(call: Call) -> None:
    """Write one HTML page: tables, figures, the doctor's findings and a token viewer.

    The page needs no network; its path is printed. Exit status 1 where a section could not be
    made: the page is written all the same, and says which and why.

    Example: deltad view data_dumps/tiny -o tiny.html
    """
    from deltad.analysis.result import form_of

    page = call.output or Path(f"{call.run.name or 'report'}.html")
    form_of(page, ("html",))
    check_output(page, call.runs)
    question, dump = call.question, call.dump
    from deltad.analysis.report import report

    with call.progress() as bar:
        made = report(
            dump, question, criteria=call.criteria, seeds=call.seed, tokens=call.tokens,
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
        raise typer.Exit(Status.BAD_CONTENT)
