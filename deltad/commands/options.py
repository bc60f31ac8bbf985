"""The options that commands share, and what is done with them: a question, a dump, an output."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .places import as_place
from .terminal import OptionError, sink

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltad.analysis import Question
    from deltad.analysis.result import Result
    from deltad.dumps import Dump

FORMATS: Final = ("text", "json", "csv", "markdown", "parquet")
"""The forms of a result that has no figure."""

DRAWN_FORMATS: Final = (*FORMATS, "png", "pdf", "svg")
"""The forms of a result that can be drawn."""

DEFAULT_PROTOCOL: Final = "shared:none, or the only arm"

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Folder of a dump, or its URL.",
        show_default=False,
        parser=as_place,
    ),
]
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
        show_default=DEFAULT_PROTOCOL,
    ),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no notes.")]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Compute D and Ḋ of the vectors, though recorded.")
]
BootstrapSeed = Annotated[int, typer.Option(min=0, help="Seed of the intervals' random numbers.")]


def format_option(*choices: str) -> Any:
    """The option `--format` of a command that knows some forms."""
    return typer.Option(
        "--format",
        metavar="|".join(choices),
        help="Form of the output.",
        show_default=f"by the ending of FILE, else {choices[0]}",
    )


def question_of(
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


def open_dump(run: Path) -> Dump:
    """Open a dump."""
    from deltad.dumps import Dump

    try:
        return Dump.open(run)
    except FileNotFoundError as error:
        raise OptionError(f"{run} does not exist") from error


def rows_of(dump: Dump, arms: Iterable[str]) -> int:
    """Rows of some arms."""
    return sum(part.rows for arm in arms for part in dump.files(arm))


def write_result(
    result: Result, form: str, output: Path | None, *, text: RenderableType | None = None
) -> None:
    """Write a result in the form asked for.

    Parameters
    ----------
    result : Result
        What was computed.
    form : str
        One of `DRAWN_FORMATS`.
    output : Path, optional
        A file; standard output otherwise.
    text : RenderableType, optional
        Printed in place of `result.text()`.
    """
    with sink(output) as file:
        if form == "text":
            from deltad.analysis.text import as_text

            coloured = output is None and sys.stdout.isatty()
            file.write(as_text(text or result.text(), coloured=coloured).encode())
        elif form in FORMATS:
            from deltad.analysis import export

            if form == "json":
                file.write(export.to_json(result.to_json_object()).encode())
            else:
                file.write(export.COLUMN_FORMS[form](result.columns()))
        else:
            from deltad.analysis.figures import save_figure

            save_figure(result.figure(), file, form=form)
