"""A file and the folders that it is the first in appear at once, or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deltad.dumps import DumpError
from deltad.dumps.aside import aside_path, publish, remove_leftovers


def everything(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def made(run: Path, text: str = "x") -> Path:
    aside = aside_path(run, "arm=a.seed=0.part-0-0")
    aside.write_text(text)
    return aside


def test_folders_appear_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment does a folder without a file lie where readers look."""
    seen = []
    for name in ("replace", "rename"):
        real = getattr(os, name)

        def watched(source: Any, target: Any, real: Any = real) -> None:
            real(source, target)
            seen.append([p for p in everything(tmp_path) if not p.startswith("_")])

        monkeypatch.setattr(os, name, watched)
    for arm, seed in (("a", 0), ("a", 1), ("b", 0)):
        publish(made(tmp_path), tmp_path / f"arm={arm}" / f"seed={seed}" / "part-0-0.parquet")
    publish(made(tmp_path), tmp_path / "arm=a" / "seed=0" / "part-0-1.parquet")
    final = everything(tmp_path)
    assert final == [
        "arm=a", "arm=a/seed=0", "arm=a/seed=0/part-0-0.parquet", "arm=a/seed=0/part-0-1.parquet",
        "arm=a/seed=1", "arm=a/seed=1/part-0-0.parquet",
        "arm=b", "arm=b/seed=0", "arm=b/seed=0/part-0-0.parquet",
    ]  # fmt: skip
    assert len(seen) == 7
    for state in seen:
        folders = [path for path in state if "=" in path.rsplit("/", 1)[-1]]
        files = [path for path in state if path.endswith(".parquet")]
        assert all(any(file.startswith(f"{folder}/") for file in files) for folder in folders)


@pytest.mark.parametrize("failing", ["replace", "rename", "fsync"])
def test_a_failure_leaves_the_place_empty_and_the_file_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    aside, real, calls = made(tmp_path), getattr(os, failing), []

    def fail_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, failing, fail_once)
    with pytest.raises(OSError, match="No space left"):
        publish(aside, tmp_path / "arm=a" / "seed=0" / "part-0-0.parquet")
    assert everything(tmp_path) == [aside.name]
    publish(aside, tmp_path / "arm=a" / "seed=0" / "part-0-0.parquet")
    assert len(everything(tmp_path)) == 3


def test_writers_of_one_new_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        for seed in range(10):
            target = tmp_path / "arm=a" / f"seed={seed}" / f"part-{rank}-0.parquet"
            publish(made(tmp_path, str(rank)), target)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 80
    assert all(path.name == f"part-{path.read_text()}-0.parquet" for path in files)
    assert os.listdir(tmp_path) == ["arm=a"]


def test_a_place_that_is_taken_is_refused_unless_asked(tmp_path: Path) -> None:
    target = tmp_path / "arm=a" / "seed=0" / "part-0-0.parquet"
    publish(made(tmp_path, "old"), target)
    aside = made(tmp_path, "new")
    with pytest.raises(DumpError, match=r"part-0-0.parquet: exists already"):
        publish(aside, target)
    assert target.read_text() == "old"
    publish(aside, target, replace=True)
    assert target.read_text() == "new"
    with pytest.raises(DumpError, match="another writer of this part removed it"):
        publish(aside, tmp_path / "arm=a" / "seed=0" / "part-0-1.parquet")


def test_leftovers_are_removed_by_name(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "_writing.arm=a.seed=0.part-0-0.1.folder.tmp" / "seed=0").mkdir(parents=True)
    other = aside_path(tmp_path, "arm=a.seed=0.part-00-0")
    other.write_text("")
    remove_leftovers(tmp_path, "arm=a.seed=0.part-0-")
    assert everything(tmp_path) == [other.name]
