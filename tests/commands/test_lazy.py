"""Commands that are imported late, and options that are read without pydantic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from deltad.commands.lazy import made

ROOT = Path(__file__).parents[2]
READ: list[dict[str, Any]] = []


def command(
    place: Annotated[Path, typer.Argument()],
    more: Annotated[list[int] | None, typer.Option()] = None,
    number: Annotated[int, typer.Option(min=0, max=9)] = 3,
    share: Annotated[float | None, typer.Option()] = None,
    name: str = "",
    flag: bool = False,
) -> None:
    """Keep what it was given."""
    READ.append({key: value for key, value in locals().items()})


def by_typer(function: Callable[..., None]) -> Any:
    """The same command as typer alone makes it."""
    single = typer.Typer(add_completion=False)
    single.command()(function)
    return typer.main.get_command(single)


def outcome(command: Any, line: list[str]) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, what was said, and what the function was given."""
    READ.clear()
    app = typer.Typer()

    class Only(typer.core.TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return command

    app.add_typer(typer.Typer(cls=Only), name="it")
    app.callback()(lambda: None)
    result: Result = CliRunner().invoke(app, ["it", "command", *line])
    return result.exit_code, result.output, list(READ)


@pytest.mark.parametrize(
    "line",
    [
        ["RUN"],
        ["a/b", "--name", "x", "--flag", "--share", "1e-3"],
        ["a", "--more", "1", "--more", "-2", "--number", "0", "--share", ".5"],
        ["a", "--number", "9", "--share", "7"],
        ["a", "--number", "10"],
        ["a", "--number", "1.5"],
        ["a", "--number", "+1"],
        ["a", "--number", " 2"],
        ["a", "--number", "1_0"],
        ["a", "--number", "9" * 30],
        ["a", "--share", "nan"],
        ["a", "--share", "inf"],
        ["a", "--share", "x"],
        ["a", "--share", ""],
        ["a", "--more", "x"],
        ["a", "--name", ""],
        [""],
        [],
    ],
)
def test_values_and_errors_are_those_of_typer(line: list[str]) -> None:
    plain, typers = outcome(made("command", command), line), outcome(by_typer(command), line)
    assert repr(plain) == repr(typers)  # repr: NaN is equal to itself
