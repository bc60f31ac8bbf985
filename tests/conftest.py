"""What every test stands on: no hub, no display, one thread, repeatable examples."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("deltad", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deltad"))


def _one_thread() -> None:
    """In a forked child OpenMP's threads are gone: a product on two would wait for ever."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread)


# What collection imports stays: looking for garbage there takes a third of its time.
gc.disable()
atexit.register(gc.unfreeze)  # some libraries expect to be collected at the end


def pytest_collection_finish() -> None:
    """Look for garbage from now on, among what the tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; without it tests are skipped, but fail in CI on Linux, where it can be had."""
    found = shutil.which("chromium")
    if found is None:
        message = "there is no chromium on the PATH"
        if sys.platform == "linux" and os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(message)
        pytest.skip(message)
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()
