"""Actions that wait for an import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from deltad.probes.verl.when_imported import forget, when_imported

NAME = "waited_for_by_a_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported, and is not yet."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / f"{NAME}.py"
    path.write_text("VALUE = 3\n")
    yield path
    sys.modules.pop(NAME, None)
    forget()


def test_the_action_comes_right_after_the_import(module: Path) -> None:
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    when_imported(NAME, lambda found: setattr(found, "VALUE", found.VALUE + 1))
    assert NAME not in sys.modules
    found = importlib.import_module(NAME)
    assert seen == [found]
    assert found.VALUE == 4
    # Nothing of the finder is left on the module.
    assert "when_imported" not in type(found.__loader__).__module__
    assert found.__spec__ is not None
    assert found.__spec__.loader is found.__loader__
    importlib.reload(found)
    assert found.VALUE == 3


def test_a_module_that_is_there_is_handed_over_at_once(module: Path) -> None:
    found = importlib.import_module(NAME)
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    assert seen == [found]


def test_what_the_action_raises_the_import_raises(module: Path) -> None:
    def refuse(found: ModuleType) -> None:
        raise ValueError(f"{found.__name__} is too new")

    when_imported(NAME, refuse)
    with pytest.raises(ValueError, match=f"{NAME} is too new"):
        importlib.import_module(NAME)
    assert NAME not in sys.modules


def test_an_import_that_fails_leaves_the_action_waiting(module: Path) -> None:
    module.write_text("raise ImportError('half installed')\n")
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    with pytest.raises(ImportError, match="half installed"):
        importlib.import_module(NAME)
    module.write_text("VALUE = 5\n")
    importlib.invalidate_caches()
    assert [importlib.import_module(NAME)] == seen


def test_a_module_that_is_not_there_is_still_not_there() -> None:
    when_imported("nowhere_at_all", lambda found: None)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        importlib.import_module("nowhere_at_all")
    forget()
