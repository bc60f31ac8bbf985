"""The command `ladder`, and `record --ladder`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from deltad.analysis import LADDER_TABLE_COLUMNS, ladder_table
from deltad.cli import app
from deltad.dumps import Dump
from tests.dumps.factory import OPTIONAL, make_dump
from tests.probes.recipes.micro import MICRO


def deltad(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dump(tmp_path_factory.mktemp("ladder") / "run", drift=1.5, ranks=1, parts=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_text_is_the_tables(run: Path) -> None:
    result = deltad("ladder", run)
    assert result.exit_code == 0, result.output
    assert result.stdout == str(ladder_table(Dump.open(run)))
    assert result.stderr == ""


def test_every_form_holds_the_table(run: Path, tmp_path: Path) -> None:
    expected = ladder_table(Dump.open(run), criteria=["clip-higher"], bootstrap_seed=3)
    options = ("--criteria", "clip-higher", "--bootstrap-seed", 3)
    found = json.loads(deltad("ladder", run, *options, "--format", "json").stdout)
    assert found == json.loads(json.dumps(expected.to_json_object()))
    rows = list(csv.reader(io.StringIO(deltad("ladder", run, *options, "--format", "csv").stdout)))
    assert rows[0] == list(LADDER_TABLE_COLUMNS)
    target = tmp_path / "ladder.parquet"
    assert deltad("ladder", run, *options, "-o", target).exit_code == 0
    pd.testing.assert_frame_equal(pd.read_parquet(target), expected.to_frame())
    for ending, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml"), ("md", b"| r")):
        target = tmp_path / f"ladder.{ending}"
        assert deltad("ladder", run, *options, "-o", target).exit_code == 0
        assert target.read_bytes().startswith(start)


def test_missing_rungs_are_noted_beside_a_form_that_cannot_say_so(tmp_path: Path) -> None:
    optional = [name for name in OPTIONAL if "linear" not in name]
    run = make_dump(tmp_path / "run", drift=1.5, optional=optional)
    result = deltad("ladder", run, "--format", "csv")
    assert "own (column `linear_delta_own` is missing)" in result.stderr
    assert deltad("ladder", run, "--format", "csv", "--quiet").stderr == ""
    assert "Missing: its own gradient" in deltad("ladder", run).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--protocol", "own"], "the ladder follows one update"),
        (["--protocol", "shared:nobody"], "there is no arm 'nobody'"),
        (["--criteria", "magic"], "there is no criterion 'magic'"),
        (["--format", "xlsx"], "`--format` must be one of text, json"),
    ],
)
def test_bad_options_are_refused(run: Path, arguments: list[str], words: str) -> None:
    result = deltad("ladder", run, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.usefixtures("cache")
def test_record_takes_the_ladder_as_an_option_and_keeps_to_it(tmp_path: Path) -> None:
    options: list[Any] = [
        text for name, value in MICRO.items() for text in (f"--{name.replace('_', '-')}", value)
    ]
    run = tmp_path / "run"
    first = deltad(
        "record", "tiny", run, *options, "--seeds", 1, "--workers", 0, "--ladder-tokens", 5
    )
    assert first.exit_code == 0, first.output
    assert Dump.open(run).metadata("none").extra["ladder"]["tokens"] == 5
    assert deltad("ladder", run, "--threshold", 0.05).exit_code == 0
    assert deltad("check", run).exit_code == 0
    other = deltad(
        "record", "tiny", run, *options, "--seeds", 1, "--workers", 0, "--ladder", "--resume"
    )
    assert other.exit_code == 2
    assert "ladder_tokens is 5 there and 64 now" in other.stderr
    again = [*options, "--seeds", 1, "--workers", 0, "--ladder-tokens", 5, "--resume"]
    assert deltad("record", "tiny", run, *again).exit_code == 0


def test_a_criterion_beside_itself_disagrees_nowhere(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", rows=60, seeds=(0,), ranks=1, parts=1)
    result = CliRunner().invoke(app, ["ladder", str(run), "--criterion", "ratio"])
    assert result.exit_code == 0, result.output
    assert "0 in disagreement" in result.stdout
