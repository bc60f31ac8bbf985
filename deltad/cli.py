"""The commands: options into one call of a plain function, its result onto the screen.

Data goes to standard output, everything else to standard error. Exit status: 0; 1 where a
dump's content is bad; 2 where an option's value is, or where RUN does not exist. A wing is
imported when its command runs, so that `deltad --help` waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deltad.commands import compare, dumps, imports, power, rates, recipes
from deltad.commands.doctor import doctor
from deltad.commands.ladder import ladder
from deltad.commands.report import report
from deltad.commands.terminal import (
    BAD_CONTENT,
    BAD_OPTION,
    CLOSED_PIPE,
    INTERRUPTED,
    OptionError,
    complain,
)
from deltad.commands.train import TrainCommands, curves
from deltad.commands.watch import watch


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


for command in (
    rates.table,
    rates.figure4,
    compare.compare,
    compare.sweep,
    compare.calibration,
    power.power,
    ladder,
    dumps.tokens,
    dumps.check,
    doctor,
    report,
    watch,
    curves,
):
    app.command()(command)
app.add_typer(
    typer.Typer(cls=recipes.RecipeCommands),
    name="record",
    help="Record a dump of real updates by a recipe: RUN, then the recipe's fields as options.",
)
app.add_typer(
    typer.Typer(cls=TrainCommands),
    name="train",
    help="Train by GRPO with masks, by a recipe: RUN, then the training's options.",
)
app.command()(recipes.reproduce)
app.command("import")(imports.import_)
