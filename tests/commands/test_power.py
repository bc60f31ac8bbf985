"""`deltad power` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deltad.cli import app
from tests.dumps.factory import make_dump


def power(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["power", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose pairs disagree."""
    return make_dump(
        tmp_path_factory.mktemp("power") / "run", rows=300, drift=1.5, top_k=3, vocab_size=30,
        seeds=tuple(range(6)), ranks=1, parts=1, optional=(), arms=("none", "ratio"),
    )  # fmt: skip


def test_seeds_needed_are_printed_and_written(run: Path, tmp_path: Path) -> None:
    result = power(run, "--points", "20,30", "--power", "0.7", "--bootstrap-seed", "3", "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "20 points" in result.stdout
    assert "random seed 3" in result.stdout
    found = json.loads(power(run, "--points", "30", "--format", "json", "--quiet").stdout)
    assert (found["power"], found["level"], found["protocol"]) == (0.8, 0.05, "shared:none")
    assert {row["difference"] for row in found["rows"]} == {0.3}
    file = tmp_path / "power.csv"
    assert power(run, "--points", "30", "-o", file, "--quiet").exit_code == 0
    assert file.read_text().startswith("test,difference,seeds,power,")
    figure = tmp_path / "power.svg"
    assert power(run, "--points", "30", "-o", figure, "--quiet").exit_code == 0
    assert "lower by 30 points" in figure.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--points", "1,x"], "`--points` takes numbers"),
        (["--points", "0"], "`points`"),
        (["--points", "1e-300"], "`points`"),
        (["--level", "1e-300"], "`level`"),
        (["--points", "1,,2"], "''"),
        (["--power", "2"], "`power`"),
        (["--level", "-1"], "`level`"),
        (["--criterion", "nobody"], "nobody"),
    ],
)
def test_bad_options_are_told_in_one_line(run: Path, options: list[str], words: str) -> None:
    result = power(run, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_a_run_that_does_not_exist_is_told(tmp_path: Path) -> None:
    assert power(tmp_path / "nowhere").exit_code == 2
