"""One cache and one small dump for all tests of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.probes.recipes import record

from .micro import micro


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the tests' own, also for worker processes."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def whole_dump(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole seeds of the micro recipe, recorded in this process."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert record(micro(), run, seeds=2, workers=0, store="all", quiet=True) == [0, 1]
    return run
