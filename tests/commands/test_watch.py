"""`deltad watch`: once, in every form, and following a run at a terminal until Ctrl-C."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from deltad.probes.sinks import JsonLines
from deltad.steps import StepScalars, steps_path
from tests.commands.app import DUMPS, SCRIPT, deltad
from tests.dumps.factory import make_dump


def watch(*arguments: object) -> Result:
    """Run the command."""
    return deltad("watch", *arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dump(tmp_path_factory.mktemp("watch") / "run", rows=40, ranks=1, parts=1)


def test_once_prints_text_or_any_form(run: Path, tmp_path: Path) -> None:
    text = watch(run, "--once")
    assert text.exit_code == 0, text.output
    assert "newest step" in text.stdout
    assert watch(run).stdout == text.stdout  # standard output is no terminal
    found = json.loads(watch(run, "--format", "json").stdout)
    assert len(found["newest"]) == 6
    rows = list(csv.DictReader(io.StringIO(watch(run, "--format", "csv").stdout)))
    assert {row["arm"] for row in rows} == {"none", "ratio", "predictive-kl-aggregated"}
    assert all(float(row["tokens"]) > 0 for row in rows)
    file = tmp_path / "steps.md"
    assert watch(run, "-o", file).exit_code == 0
    assert file.read_text().startswith("| arm |")


def test_options_ask_another_question_and_choose_what_is_shown(run: Path) -> None:
    usual = json.loads(watch(run, "--format", "json").stdout)
    wide = json.loads(watch(run, "--threshold", 0.01, "--format", "json").stdout)
    outside = [sum(t["outside"] for t in each["totals"]) for each in (usual, wide)]
    assert outside[0] < outside[1]
    text = watch(run, "--once", "--scalar", "k2_kl", "--rows", 1).stdout
    assert "k2_kl" in text
    assert "chi2_token" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such", "--once"), "does not exist"),
        ((__file__, "--once"), "is no folder"),
        ((DUMPS / "tiny", "--divergence", "js"), "divergence"),
        ((DUMPS / "tiny", "--threshold", "-1"), "threshold"),
        ((DUMPS / "tiny", "--format", "png"), "--format"),
        ((DUMPS / "tiny", "--interval", "0"), "--interval"),
    ],
)
def test_bad_options_exit_2(arguments: tuple[object, ...], words: str) -> None:
    result = watch(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "COLUMNS": "160", "LINES": "50", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [str(SCRIPT), *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            # A job in the background of a shell would ignore the signal, and hand that down.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, words: str, seconds: float = 60) -> None:
        """Read until some words were shown since the last call."""
        start = len(self.shown)
        end = time.monotonic() + seconds
        while words not in self.shown[start:]:
            assert time.monotonic() < end, self.shown[start:]
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert words in self.shown[start:], self.shown
                    return


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    started = Terminal("watch", tmp_path, "--interval", "0.05")
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.process.wait()
    os.close(started.master)


@pytest.mark.process
def test_a_running_training_is_followed_until_interrupted(
    terminal: Terminal, tmp_path: Path
) -> None:
    def step(number: int, outside: int) -> StepScalars:
        counts = {"tokens": 1000, "outside": outside}
        return StepScalars("actual", 3, number, counts=counts)

    terminal.wait_for("no step is complete yet")
    sink = JsonLines(tmp_path)
    sink.log_step(step(0, 111))
    terminal.wait_for("111")
    line = json.dumps(step(1, 222).to_json_object()).encode() + b"\n"
    path = steps_path(tmp_path, "actual", 3, 0)
    with path.open("ab", buffering=0) as file:
        file.write(line[:50])
        time.sleep(0.3)
        file.write(line[50:])
    terminal.wait_for("222")
    assert "passed over" not in terminal.shown
    make_dump(tmp_path, arms=("none",), seeds=(5,), rows=30, ranks=1, parts=1)
    terminal.wait_for("seed 5, newest step")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(30) == 0
    assert "Traceback" not in terminal.shown
