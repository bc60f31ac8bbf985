"""Shares of a table: `deltad table --share` writes one, `deltad merge` makes the table of all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import FORMATS, BootstrapSeed, Output, Quiet, format_option, write_result
from .places import as_place, is_url
from .terminal import OptionError, check_output, chosen_form, note, progress_bar, sink

if TYPE_CHECKING:
    from deltad.analysis import Question
    from deltad.analysis.engine import Engine
    from deltad.dumps import Dump


def merge(
    partials: Annotated[
        list[Path],
        typer.Argument(
            metavar="PARTIAL",
            help="What `deltad table RUN --share I/N -o PARTIAL` wrote, all N shares.",
            show_default=False,
            parser=as_place,
        ),
    ],
    output: Output = None,
    by_seed: Annotated[bool, typer.Option("--by-seed", help="In text, a row a seed too.")] = False,
    bootstrap_seed: BootstrapSeed = 0,
    form: Annotated[str, format_option(*FORMATS)] = "",
    quiet: Quiet = False,
) -> None:
    """Print the table of a dump that several machines have counted a share of each.

    It is the table that one machine makes, to the bit. Refused are shares that are missing, given
    twice, or of another question or dump.
    """
    form = chosen_form(form, output, FORMATS)
    for partial in partials:
        if output is not None and not is_url(partial) and output.resolve() == partial.resolve():
            raise OptionError(f"{output} is one of the partials: name another file")
        check_output(output, partial)
    from deltad.analysis import ProtocolTable
    from deltad.analysis.partials import merge_partials

    from .rates import note_vectors, write_rates

    table = merge_partials(partials, bootstrap_seed=bootstrap_seed)
    note_vectors(table, quiet)
    if isinstance(table, ProtocolTable):
        write_result(table, form, output)
    else:
        write_rates(table, form, output, by_seed=by_seed)


def write_share(
    dump: Dump,
    question: Question,
    text: str,
    output: Path | None,
    *,
    every: bool,
    engine: Engine | None,
    recompute: bool,
    quiet: bool,
) -> None:
    """Count a share of a dump into a file.

    Parameters
    ----------
    dump, question, every, engine, recompute
        As of `deltad.analysis.partials.write_partial`.
    text : str
        Which share, as the option says it.
    output : Path
        The file.
    quiet : bool
        No progress bar and no note.

    Raises
    ------
    OptionError
        No file is given.
    """
    if output is None:
        raise OptionError("`--share` writes a file for `deltad merge`: give `-o FILE`")
    from deltad.analysis.partial_files import Share
    from deltad.analysis.partials import write_partial

    share = Share.parse(text)
    rows = sum(part.rows for part in dump.parts) // share.total
    with progress_bar(rows, "rows", quiet=quiet) as bar, sink(output) as file:
        plan = write_partial(
            dump,
            question,
            share,
            file,
            every=every,
            engine=engine,
            recompute=recompute,
            progress=bar.advance,
        )
    note(f"share {share} of {plan.spans} spans is in {output}", quiet=quiet)
