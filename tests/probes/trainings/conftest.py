"""One cache of pre-trained weights, and one trained run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltad.probes.training import train

from .micro import micro


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the tests' own, also for worker processes."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two masks of one seed, undisturbed, every second step recorded."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(micro(probe_every=2), run, masks=("ratio", "clip-higher"), seeds=1, workers=0, quiet=True)
    return run
