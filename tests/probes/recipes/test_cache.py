"""The user's cache: where it is, and that its folders appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltad.probes.recipes import RecipeError
from deltad.probes.recipes.cache import cache_root, cached_folder


@pytest.fixture(autouse=True)
def nowhere_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache/deltad"), ("darwin", "Library/Caches/deltad")],
)
def test_cache_lies_where_the_platform_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, platform: str, expected: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    assert cache_root() == Path.home() / expected


def test_environment_names_another_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "deltad"
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"


def test_folder_is_built_once_for_each_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path))
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "content").write_text(str(len(built)))

    first = cached_folder("kind", {"b": 1, "a": 2}, build)
    assert cached_folder("kind", {"a": 2, "b": 1}, build) == first
    other = cached_folder("kind", {"a": 3}, build)
    assert (first / "content").read_text() == "1"
    assert (other / "content").read_text() == "2"
    assert json.loads((first / "key.json").read_text()) == {"a": 2, "b": 1}
    assert sorted((tmp_path / "kind").iterdir()) == sorted([first, other])


def test_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_folder("kind", {}, fail)
    assert list((tmp_path / "kind").iterdir()) == []


def test_who_comes_second_takes_what_the_first_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path))

    def win(folder: Path) -> None:
        (folder / "content").write_text("first")

    def build(folder: Path) -> None:
        cached_folder("kind", {}, win)
        (folder / "content").write_text("second")

    assert (cached_folder("kind", {}, build) / "content").read_text() == "first"


def test_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(RecipeError, match=r"file cannot be written .*DELTAD_CACHE"):
        cached_folder("tiny", {}, lambda folder: None)
