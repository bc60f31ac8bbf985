"""The commands: options into one call of a plain function, its result onto the screen.

Data goes to standard output, everything else to standard error. Exit status: 0; 1 where a
dump's content is bad; 2 where an option's value is, or where RUN does not exist. A command is
imported when it is asked for, and a wing when the command runs, so that `deltad --help` waits for
nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from deltad.commands.lazy import LazyCommands, Place
from deltad.commands.terminal import (
    BAD_CONTENT,
    BAD_OPTION,
    CLOSED_PIPE,
    INTERRUPTED,
    OptionError,
    complain,
)

PLACES: Final[Mapping[str, Place]] = {
    "reproduce": Place("record:reproduce",
        "Record the recipe tiny, print its table for all protocols and draw Figure 4: minutes."),
    "record": Place("record:RecordCommands",
        "Record a dump of real updates by a recipe: RUN, then the recipe's fields as options."),
    "train": Place("record:TrainCommands",
        "Train by GRPO with masks, by a recipe, and compare them; or show a finished training."),
    "import": Place("imports:import_",
        "Make a dump of what another framework wrote: responses, and how the policy scores them."),
    "table": Place("analysis:table",
        "Compare two criteria: unsafe-keep rates and contracting fractions, seed by seed."),
    "compare": Place("analysis:compare",
        "Set criteria side by side: what each masks, and how often it was right."),
    "ladder": Place("analysis:ladder",
        "Show where a prediction loses the sign of ΔD, from the token's own logits to the step."),
    "figure4": Place("analysis:figure4",
        "Draw ΔD of kept disagreement tokens, and the unsafe-keep rates by seed."),
    "tokens": Place("analysis:tokens",
        "List tokens with D before and after, ΔD, r, Ḋ and every criterion's decision."),
    "doctor": Place("analysis:doctor",
        "Name the likely cause where engine and trainer disagree, with evidence, size and remedy."),
    "view": Place("analysis:view",
        "Write one HTML page: tables, figures, the doctor's findings and a token viewer."),
    "watch": Place("looking:watch",
        "Follow the optimizer steps of a running or finished recording; Ctrl-C ends it."),
    "check": Place("looking:check",
        "Check every row of a dump against the contract."),
}  # fmt: skip
"""The commands in the order of the help."""

OBJECTS_PER_COLLECTION: Final = 50_000
"""New objects before Python looks for cycles among them: with its own 700 a fifteenth of the time
of a small command goes into looking through what is being imported."""


class Commands(LazyCommands):
    """The commands; whatever they raise becomes one line and an exit status."""

    places = PLACES

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
    if isinstance(error, OptionError):
        complain(str(error))
        return BAD_OPTION
    if isinstance(error, MemoryError):
        complain(f"there is not enough memory for this ({error})")
        return BAD_CONTENT
    from deltad.analysis.question import QuestionError
    from deltad.dumps import DumpError
    from deltad.masks import CriterionError
    from deltad.probes.recipes import RecipeError

    if not isinstance(error, QuestionError | CriterionError | RecipeError | DumpError):
        raise error
    complain(str(error))
    return BAD_CONTENT if isinstance(error, DumpError) else BAD_OPTION


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """Run the command line."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
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
