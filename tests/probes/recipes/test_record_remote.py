"""A recipe records behind a URL what it records in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltad.dumps import check_dump, read_prompts
from deltad.dumps.storage import copy_tree, place
from deltad.probes.recipes import RecipeError, record

from .micro import micro
from .test_record import contents


@pytest.fixture
def url() -> Iterator[str]:
    from fsspec.implementations.memory import MemoryFileSystem

    yield "memory://recorded/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_seed_is_recorded_to_a_url(
    cache: Path, whole_dump: Path, tmp_path: Path, url: str
) -> None:
    options: dict[str, Any] = {"workers": 0, "store": "all", "quiet": True}
    assert record(micro(), url, seeds=[1], **options) == [1]
    assert check_dump(url) == []
    copy_tree(place(url), tmp_path / "copy")
    ours, theirs = contents(tmp_path / "copy"), contents(whole_dump)
    assert set(ours) == {name for name in theirs if "seed=1" in name}
    for name, table in ours.items():
        assert table.to_pylist().__repr__() == theirs[name].to_pylist().__repr__()
    assert read_prompts(url, seed=1) == read_prompts(whole_dump, seed=1)
    with pytest.raises(RecipeError, match=f"{url} is not empty"):
        record(micro(), url, seeds=[1], **options)
    (place(url) / "arm=none" / "seed=1" / "part-0-0.parquet").unlink()
    assert record(micro(), url, seeds=[1], resume=True, **options) == [1]
    assert check_dump(url) == []
