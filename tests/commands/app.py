"""The command line, called in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner, Result

from deltad.cli import app

SCRIPT: Final = Path(sys.executable).with_name("deltad")
DUMPS: Final = Path(__file__).parents[2] / "data_dumps"

COUNTING: Final[dict[str, tuple[str, ...]]] = {
    "table": ("table",),
    "protocols": ("table", "--protocol", "all"),
    "sweep": ("table", "--over", "threshold", "--values", "0.1,0.2"),
    "conditions": ("table", "--by", "entropy", "--bins", "2"),
    "power": ("table", "--power", "--points", "30"),
    "compare": ("compare", "--criteria", "icepop,tis"),
    "ladder": ("ladder",),
    "calibration": ("ladder", "--calibration", "--bins", "1"),
}
"""What counts tokens outside, with few options."""


def deltad(*arguments: object) -> Result:
    """Run a command line."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def counted(name: str, run: object, *options: object) -> Result:
    """Run one of `COUNTING`."""
    command, *more = COUNTING[name]
    return deltad(command, run, *more, *options)


def as_json(*arguments: object) -> Any:
    """The JSON that a command prints."""
    done = deltad(*arguments, "--format", "json", "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return json.loads(done.stdout)


def assert_refused(result: Result, status: int, *words: str) -> None:
    """One error line on standard error that holds some words; no data and no traceback."""
    assert result.exit_code == status, (result.exit_code, result.output)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    for word in words:
        assert word in line, line
