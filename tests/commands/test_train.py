"""The command `train`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.curves import log_path, read_lines, read_options
from deltad.probes.training import Training
from deltad.probes.training.options import own_fields, world_fields
from tests.analysis.trainings import write_training
from tests.commands.app import SCRIPT, deltad
from tests.probes.trainings.micro import MICRO, contents, micro


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAD_CACHE", str(folder))
        patch.setenv("COLUMNS", "200")
        yield folder


def options(**overrides: object) -> list[str]:
    return [
        text
        for name, value in (MICRO | overrides).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_help_shows_every_field() -> None:
    for recipe in ("tiny", "smollm2"):
        shown = re.sub(r"\s", "", deltad("train", recipe, "--help").stdout)
        for field in (*own_fields(), *world_fields(recipe)):
            assert f"--{field.name.replace('_', '-')}" in shown
            assert "".join(field.metadata["help"].split()) in shown


def test_training_shown_watched_and_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = [*options(threshold=0.05), "--masks", "none,ratio", "--seeds", 1, "--workers", 0]
    result = deltad("train", "tiny", run, *given, "--watch")
    assert result.exit_code == 0, result.output
    assert "2 runs trained" in result.stderr
    assert "tiny, fp32, δ = 0.05" in result.stdout
    found = read_options(run)["options"]
    assert found == json.loads(json.dumps(micro(threshold=0.05).to_json()))
    watched = json.loads(deltad("watch", run, "--format", "json").stdout)
    assert [(each["arm"], each["step"]) for each in watched["newest"]] == [
        ("none", 5),
        ("ratio", 5),
    ]
    shown = json.loads(deltad("train", "tiny", run, "--format", "json").stdout)
    last = list(read_lines(log_path(run, "none", 0)))[-1]
    assert shown["rows"][0]["final_accuracy"] == last.values()["accuracy"]
    image = tmp_path / "curves.png"
    assert deltad("train", "tiny", run, "-o", image).exit_code == 0
    assert image.read_bytes()[:4] == b"\x89PNG"
    table = deltad("train", "tiny", run, "--by-batch", "--format", "csv").stdout.splitlines()
    assert len(table) == 1 + 2 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--masks", "best"], "there is no criterion 'best'"),
        (["--masks", "none,none"], "`masks` must be distinct"),
        (["--precision", "int4"], "`--precision` must be one of"),
        (["--lr", "-1"], "`lr` must be at least 0"),
    ],
)
def test_senseless_options_end_with_a_sentence(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = deltad("train", "tiny", tmp_path / "run", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "run").exists()


def test_curves_refuse_what_they_cannot_show(tmp_path: Path) -> None:
    run = write_training(tmp_path / "run", {"ratio": [[0.1, 0.2, 0.3]]})
    for arguments, status, words in (
        ([run, "--against", tmp_path / "no"], 2, "does not exist"),
        ([run, "--against", tmp_path], 1, "holds no training"),
        ([run, "--baseline", "none"], 2, "`baseline` must be a mask"),
        ([run, "--by-batch", "--format", "png"], 2, "`--by-batch` is for tables"),
    ):
        result = deltad("train", "tiny", *arguments)
        assert (result.exit_code, words in result.stderr) == (status, True), result.stderr
    assert "ratio" in deltad("train", "tiny", run).stdout


@pytest.mark.slow
def test_interrupted_training_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    given = [*options(batches=30, checkpoint_every=2), "--masks", "ratio", "--seeds", "2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([SCRIPT, "train", "tiny", whole, *given, "--quiet"], check=True)
    command = [str(SCRIPT), "train", "tiny", str(broken), *given, "--workers", "2"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A job in the background of a shell would ignore the signal, and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = log_path(broken, "ratio", 0)
    deadline = time.monotonic() + 300
    while not log.exists() or len(log.read_bytes().splitlines()) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "give --resume to go on" in errors
    assert "Traceback" not in errors
    subprocess.run([*command, "--resume", "--quiet"], check=True)
    assert contents(broken) == contents(whole)


def test_smollm2_has_its_own_defaults() -> None:
    shown = re.sub(r"\s", "", deltad("train", "smollm2", "--help").stdout)
    longest = Training.of("smollm2").max_new_tokens
    assert longest != Training.of("tiny").max_new_tokens
    assert re.search(rf"--max-new-tokens[^[]*\[default:\({longest}\)\]", shown)
