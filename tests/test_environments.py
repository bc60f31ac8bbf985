"""The environments that integrations force apart: their requirements, locks and markers agree."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "environments" / "run.py"


def _script() -> ModuleType:
    """`environments/run.py` as a module."""
    spec = importlib.util.spec_from_file_location("environments_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RUN = _script()
NAMES = sorted(RUN.ENVIRONMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_lock_pins_everything_that_is_asked_for(name: str) -> None:
    environment = RUN.ENVIRONMENTS[name]
    pinned = dict(line.split("==") for line in environment.lock.read_text().split())
    asked = [*(ROOT / "environments" / f"{name}.in").read_text().splitlines(), *RUN.COMMON]
    for line in asked:
        wanted = line.partition("#")[0].strip()
        if wanted:
            package, _, version = wanted.partition("==")
            assert package in pinned
            assert version in ("", pinned[package])
    assert not environment.left_out & set(pinned)
    assert not [package for package in pinned if package.startswith(("nvidia-", "cuda-"))]


def test_every_environment_has_a_marker_that_the_default_run_leaves_out() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    known = {line.partition(":")[0] for line in options["markers"]}
    for environment in RUN.ENVIRONMENTS.values():
        assert environment.marker in known
        assert environment.marker in options["addopts"][-1]


@pytest.mark.parametrize("name", NAMES)
def test_marked_tests_are_among_those_that_are_run(name: str) -> None:
    environment = RUN.ENVIRONMENTS[name]
    marked = re.compile(rf"^(pytestmark =|@).*pytest\.mark\.{environment.marker}\b", re.MULTILINE)
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if marked.search(path.read_text().replace("[\n    ", ""))
    ]
    assert files
    assert all(file.startswith(environment.tests) for file in files)
    assert all(any(file.startswith(each) for file in files) for each in environment.tests)


def test_another_lock_is_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, "HERE", tmp_path)
    monkeypatch.setenv("DELTAD_ENVIRONMENTS", str(tmp_path / "cache"))
    lock = tmp_path / "some.txt"
    lock.write_text("numpy==2.0\n")
    first = RUN.Environment("some", "slow", ())
    assert re.fullmatch(r"some-[0-9a-f]{12}", first.folder.name)
    assert first.folder.parent == tmp_path / "cache"
    lock.write_text("numpy==2.1\n")
    assert RUN.Environment("some", "slow", ()).folder != first.folder


def test_unknown_name_is_refused_with_those_there_are() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "megatron"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no environment 'megatron'" in done.stderr
    assert all(name in done.stderr for name in NAMES)


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_what_cannot_be_built_is_told_loudly_and_fails_in_ci(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ci: str,
    status: int,
) -> None:
    def fail(environment: object) -> None:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(RUN, "build", fail)
    monkeypatch.setattr(sys, "argv", ["run.py", NAMES[0]])
    monkeypatch.setenv("CI", ci)
    assert RUN.main() == status
    assert "COULD NOT BE BUILT" in capfd.readouterr().out
