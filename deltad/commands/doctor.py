"""The command that looks for what is wrong with a dump, and the trial of whoever looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    DRAWN_FORMATS,
    FORMATS,
    Output,
    Quiet,
    Run,
    format_option,
    open_dump,
    write_result,
)
from .terminal import FINDINGS, OptionError, check_output, chosen_form, progress_bar

if TYPE_CHECKING:
    from deltad.dumps import Dump


def doctor(
    run: Run,
    output: Output = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Only this seed; may be given several times.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option(
            "--trial",
            help="Put every known fault into subsets of RUN, taken for sound, and print what the "
            "doctor calls them.",
        ),
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="With `--trial`, cases a fault and strength.")
    ] = 1,
    form: Annotated[str, format_option(*FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Name the likely cause where engine and trainer disagree, with evidence, size and remedy.

    Values that `check` refuses are evidence here. Exit status 0 where nothing wrong was found,
    3 with findings.
    """
    if repeats > 1 and not trial:
        raise OptionError("`--repeats` goes with `--trial`")
    form = chosen_form(form, output, DRAWN_FORMATS if trial else FORMATS)
    check_output(output, run)
    dump = open_dump(run)
    if trial:
        if seed:
            raise OptionError("`--seed` must not be given with `--trial`, which draws seeds itself")
        from deltad.analysis.doctor.trial import planned
        from deltad.analysis.doctor.trial import trial as put_on_trial

        with progress_bar(planned(repeats=repeats), "cases", quiet=quiet) as bar:
            answer = put_on_trial(dump, repeats=repeats, progress=bar.advance)
        write_result(answer, form, output)
        return
    arm, seeds = _chosen(dump, seed or [])
    from deltad.analysis.doctor import examine

    with progress_bar(None, "rows", quiet=quiet) as bar:
        diagnosis = examine(dump, arm=arm, seeds=seeds, progress=bar.advance)
    write_result(diagnosis, form, output)
    if not diagnosis.healthy:
        raise typer.Exit(FINDINGS)


def _chosen(dump: Dump, seeds: list[int]) -> tuple[str, list[int] | None]:
    """The arm to look at, and its seeds that were asked for."""
    from deltad.analysis.doctor.sample import chosen_arm

    arm = chosen_arm(dump)
    known = dump.seeds(arm)
    for seed in seeds:
        if seed not in known:
            raise OptionError(f"`--seed` must be one of arm {arm!r}, got {seed}")
    return arm, seeds or None
