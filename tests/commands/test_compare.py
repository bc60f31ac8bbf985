"""compare, sweep and calibration through the app."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from deltad.analysis import (
    CALIBRATION_COLUMNS,
    COMPARISON_COLUMNS,
    CONDITION_COLUMNS,
    SWEEP_COLUMNS,
    Question,
    compare,
)
from deltad.cli import app
from deltad.dumps import Dump
from tests.dumps.factory import edit_value, make_dump, part_files


def deltad(*arguments: object) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose criteria disagree, with rows without vectors."""
    return make_dump(
        tmp_path_factory.mktemp("compare") / "run", rows=60, drift=1.5, seeds=(0, 1), ranks=1,
        parts=1, null_vectors=0.1,
    )  # fmt: skip


FEW = ("--criteria", "icepop")
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "compare": (FEW, COMPARISON_COLUMNS),
    "conditions": ((*FEW, "--by", "entropy", "--bins", "2"), CONDITION_COLUMNS),
    "sweep": (("--over", "threshold", "--values", "0.1"), SWEEP_COLUMNS),
    "calibration": (("--bins", "1"), CALIBRATION_COLUMNS),
}


def invoke(run: Path, name: str, *options: object) -> Result:
    """One of the commands with its few options."""
    command = "compare" if name == "conditions" else name
    return deltad(command, run, *COMMANDS[name][0], *options)


def plain(value: Any) -> Any:
    """A CSV or JSON value as the other form has it."""
    return "" if value is None else str(value)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_form_holds_the_same_rows(run: Path, tmp_path: Path, name: str) -> None:
    columns = list(COMMANDS[name][1])
    text = invoke(run, name, "--format", "csv")
    assert text.exit_code == 0, text.stderr
    rows = list(csv.DictReader(io.StringIO(text.stdout)))
    assert list(rows[0]) == columns
    found = json.loads(invoke(run, name, "--format", "json").stdout)
    assert next(iter(found)) == "format"
    if name == "calibration":
        listed = [
            {**{key: each[key] for key in each if key not in ("bins", "formula")}, **part}
            for each in found["directions"]
            for part in each["bins"]
        ]
    else:
        listed = found[{"compare": "criteria", "conditions": "rows", "sweep": "points"}[name]]
    assert [{key: plain(value) for key, value in row.items()} for row in listed] == rows
    if name != "compare":
        return  # the other forms are made of the same columns
    file = tmp_path / "result.parquet"
    assert invoke(run, name, "-o", file).exit_code == 0
    frame = pd.read_parquet(file)
    assert list(frame.columns) == columns
    assert len(frame) == len(rows)
    markdown = invoke(run, name, "--format", "markdown").stdout.splitlines()
    assert markdown[0] == "| " + " | ".join(columns) + " |"
    assert len(markdown) == len(rows) + 2


@pytest.mark.parametrize("name", list(COMMANDS))
def test_text_and_figure(run: Path, tmp_path: Path, name: str) -> None:
    text = invoke(run, name)
    assert text.exit_code == 0, text.stderr
    assert "top-K KL > " in text.stdout
    assert "shared:none" in text.stdout
    assert "bootstrap over seeds" in text.stdout
    if name != "calibration":
        return  # drawn by the tests of the figures
    file = tmp_path / "figure.png"
    assert invoke(run, name, "-o", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_compare_is_one_call_of_the_function(run: Path) -> None:
    found = deltad(
        "compare", run, "--criteria", "binary-kl,drpo", "--baseline", "clip-higher", "--threshold",
        "0.2", "--bootstrap-seed", "4", "--format", "json",
    )  # fmt: skip
    expected = compare(
        Dump.open(run),
        Question(threshold=0.2, baseline="clip-higher"),
        ["binary-kl", "drpo"],
        bootstrap_seed=4,
    )
    assert json.loads(found.stdout) == expected.to_json_object()
    assert [row["criterion"] for row in json.loads(found.stdout)["criteria"]] == [
        "clip-higher", "binary-kl", "drpo",
    ]  # fmt: skip


def test_by_default_all_criteria_of_the_divergence_are_compared(run: Path) -> None:
    for divergence, other in (("kl", "tv"), ("tv", "kl")):
        found = deltad("compare", run, "--divergence", divergence, "--format", "json")
        names = [row["criterion"] for row in json.loads(found.stdout)["criteria"]]
        assert names[0] == "ratio"
        assert {f"predictive-{divergence}-full", "icepop", "binary-kl", "binary-tv"} <= {*names}
        assert not any(name.startswith(f"predictive-{other}") for name in names)


def test_points_that_cannot_be_answered_are_noted(tmp_path: Path) -> None:
    thin = make_dump(tmp_path / "run", arms=("none",), stored=("kl", 0.1), rows=20)
    asked = ("sweep", thin, "--over", "threshold", "--values", "0.05,0.2")
    found = deltad(*asked, "--format", "csv")
    assert found.exit_code == 0
    assert len(found.stdout.splitlines()) == 2
    assert "note: threshold 0.05 is left out: " in found.stderr
    assert deltad(*asked, "--format", "csv", "--quiet").stderr == ""
    assert "0.05: " in deltad(*asked).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--criteria", "ratio,ppo"), "no criterion 'ppo'"),
        (("compare", "--criteria", "ratio,,icepop"), "`--criteria` must be names"),
        (("compare", "--by", "colour"), "no condition 'colour'; choose one of advantage"),
        (("compare", "--bins", "3"), "`--bins` needs `--by`"),
        (("compare", "--by", "ratio", "--bins", "0"), "--bins"),
        (("compare", "--protocol", "shared:x"), "no arm 'x'"),
        (("compare", "--criteria", "predictive-tv-exact"), "predictive-kl-exact"),
        (("compare", "--format", "xml"), "`--format` must be one of"),
        (("sweep",), "--over"),
        (("sweep", "--over", "time"), "must be one of threshold, top-k, protocol"),
        (("sweep", "--over", "top-k", "--values", "99"), "the dump's K = 4, got '99'"),
        (("sweep", "--over", "threshold", "--threshold", "0.1"), "use `--values`"),
        (("sweep", "--over", "protocol", "--protocol", "own"), "use `--values`"),
        (("calibration", "--protocol", "own"), "one update that judges all tokens"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    run: Path, arguments: tuple[str, ...], words: str
) -> None:
    command, *options = arguments
    found = deltad(command, run, *options)
    assert found.exit_code == 2
    assert found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), rows=10, optional=())
    found = deltad("compare", run, "--by", "token")
    assert found.exit_code == 2
    assert "needs the column `token`" in found.stderr


@pytest.mark.parametrize("name", list(COMMANDS))
def test_bad_content_is_status_1(tmp_path: Path, name: str) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), rows=10, ranks=1, parts=1)
    edit_value(part_files(run)[0], "advantage", 3, float("nan"))
    found = invoke(run, name)
    assert found.exit_code == 1
    assert "advantage" in found.stderr


def test_nothing_is_written_into_the_dump(run: Path) -> None:
    for name in COMMANDS:
        assert invoke(run, name, "-o", run / "x.png").exit_code == 2
    assert deltad("compare", run.parent / "nowhere").exit_code == 2
