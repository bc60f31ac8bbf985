from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deltad.analysis.doctor.broken_dump import write_injected
from deltad.cli import app
from tests.dumps.factory import part_files

RECORDED = Path(__file__).parents[2] / "data_dumps" / "tiny-whole"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("doctor") / "run"
    return write_injected(RECORDED, out, "nan-row", 0.05, arms=["none"], seeds=[0])


def test_a_healthy_dump_exits_zero() -> None:
    result = CliRunner().invoke(app, ["doctor", str(RECORDED), "--seed", "1", "--format", "json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"format": 1, "healthy": True, "findings": []}


def test_findings_exit_three_and_values_that_check_refuses_are_evidence(broken: Path) -> None:
    assert CliRunner().invoke(app, ["check", str(broken)]).exit_code == 1
    result = CliRunner().invoke(app, ["doctor", str(broken), "--format", "json"])
    assert result.exit_code == 3
    answer = json.loads(result.stdout)
    assert list(answer) == ["format", "healthy", "findings"]
    assert answer["healthy"] is False
    first = answer["findings"][0]
    assert list(first) == ["cause", "confidence", "tokens", "estimate", "evidence", "advice"]
    assert first["cause"] == "sentinel"
    assert 0 <= first["confidence"] <= 1
    assert first["evidence"]["value"] == "NaN"


def test_text_says_evidence_confidence_remedy_and_what_was_looked_at(broken: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(broken)])
    assert result.exit_code == 3
    for words in ("sentinel", "confidence 0.99", "NaN", "remedy: ", "looked at 1411 of 1411"):
        assert words in result.stdout


def test_a_healthy_dump_is_said_to_be_so() -> None:
    result = CliRunner().invoke(app, ["doctor", str(RECORDED), "--seed", "1"])
    assert result.stdout.startswith("nothing wrong found")


def test_the_answer_goes_into_a_file_of_the_form_of_its_ending(
    broken: Path, tmp_path: Path
) -> None:
    target = tmp_path / "answer.json"
    result = CliRunner().invoke(app, ["doctor", str(broken), "-o", str(target)])
    assert (result.exit_code, result.stdout) == (3, "")
    assert json.loads(target.read_text())["healthy"] is False


def test_what_cannot_be_read_exits_one(tmp_path: Path, broken: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    target = run / "arm=none" / "seed=0" / "part-0-0.parquet"
    target.parent.mkdir(parents=True)
    target.write_bytes(np.random.default_rng(0).bytes(500))
    result = CliRunner().invoke(app, ["doctor", str(run)])
    assert result.exit_code == 1
    assert len(part_files(broken)) == 1


@pytest.mark.parametrize(
    "options",
    [["--seed", "99"], ["--format", "png"], ["--trial", "--seed", "0"], ["--repeats", "2"]],
)
def test_bad_options_exit_two(options: list[str]) -> None:
    assert CliRunner().invoke(app, ["doctor", str(RECORDED), *options]).exit_code == 2


def test_no_run_exits_two(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "none")]).exit_code == 2


def test_the_trial_prints_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltad.analysis.doctor import trial

    put = trial.trial
    monkeypatch.setattr(
        trial, "trial", lambda dump, **options: put(dump, injections=["untouched"], **options)
    )
    result = CliRunner().invoke(app, ["doctor", str(RECORDED), "--trial", "--format", "json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["causes"] == ["sound"]
