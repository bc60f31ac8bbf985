"""The house as installed: its packages, its import law, what it imports when."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _fresh(code: str, cwd: Path | None = None) -> str:
    """Standard output of `code` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd
    )
    return done.stdout


def test_package_list_equals_the_folders_with_an_init() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = {"deltad": "deltad", "analysis": "deltad.analysis", "probes": "deltad.probes"}
    found = set()
    for folder, package in homes.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            if folder == "deltad" and parts and parts[0] in ("analysis", "probes"):
                continue  # the links that editors and type checkers follow
            found.add(".".join((package, *parts)))
    assert found == set(tool["packages"])


@pytest.mark.parametrize("wing", ["analysis", "probes"])
def test_wing_refuses_its_folder_name_and_tells_the_right_one(wing: str) -> None:
    code = f"""
try:
    import {wing}
except ImportError as error:
    print(error)
"""
    said = _fresh(code, cwd=ROOT)
    assert f"`deltad.{wing}`" in said
    assert "pip install -e" in said


def test_arrows_point_one_way() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", ["deltad.analysis", "deltad.dumps", "deltad.probes"])
def test_every_lazy_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = module.nothing_of_this_name
