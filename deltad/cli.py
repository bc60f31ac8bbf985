"""The commands: options into one call of a plain function, its result onto the screen.

Data goes to standard output, everything else to standard error. Exit status: 0; 1 where a
dump's content is bad; 2 where an option's value is, or where RUN does not exist. A wing is imported
when a command runs, so that `--help` waits for nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from deltad.commands import analysis, imports, looking, record
from deltad.commands.options import Command, TextGroup
from deltad.commands.terminal import OptionError, Status, complain

COMMANDS: Final[Mapping[str, Command | record.Recipes]] = {
    "reproduce": record.reproduce,
    "record": record.RECORD,
    "train": record.TRAIN,
    "import": imports.import_,
    "table": analysis.table,
    "compare": analysis.compare,
    "ladder": analysis.ladder,
    "figure4": analysis.figure4,
    "tokens": analysis.tokens,
    "doctor": analysis.doctor,
    "view": analysis.view,
    "watch": looking.watch,
    "check": looking.check,
}
"""The commands in the order of the help."""

OBJECTS_PER_COLLECTION: Final = 50_000
"""New objects before Python looks for cycles among them: with its own 700 a fifteenth of the time
of a small command goes into looking through what is being imported."""


class Commands(TextGroup):
    """The commands, each built when asked for; what they raise becomes a line and a status."""

    def __init__(self, **options: Any) -> None:
        """Make the group with names alone, for "did you mean"."""
        super().__init__(**{**options, "commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Build a command."""
        return COMMANDS[cmd_name].build(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands, whole sentences each."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.summary) for name, each in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; see `typer.core.TyperGroup.invoke`."""
        try:
            super().invoke(ctx)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            raise typer.Exit(_status(error)) from None

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Parse the command line and run; see `typer.core.TyperGroup.main`."""
        options["standalone_mode"] = False
        try:
            status = super().main(*args, **options)
        except Exception as error:  # from the parsing before any command
            status = _status(error)
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _status(error: BaseException) -> int:
    """Print an error that is the user's, and give its exit status; raise any other."""
    if isinstance(error, OSError):
        # What standard output still holds must not be tried again at shutdown.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader has seen enough
        return Status.CLOSED_PIPE
    message, status = str(error), Status.BAD_OPTION
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        message, status = "interrupted", Status.INTERRUPTED
    elif isinstance(error, MemoryError):
        message, status = f"there is not enough memory for this ({error})", Status.BAD_CONTENT
    elif hasattr(error, "format_message"):  # what typer raises for a bad command line
        message = error.format_message()
    elif not isinstance(error, OSError | OptionError):
        from deltad.analysis.question import QuestionError
        from deltad.dumps import DumpError
        from deltad.masks import CriterionError
        from deltad.probes.recipes import RecipeError

        if isinstance(error, DumpError):
            status = Status.BAD_CONTENT
        elif not isinstance(error, QuestionError | CriterionError | RecipeError):
            raise error
    complain(message)
    return status


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
