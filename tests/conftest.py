"""What every test stands on: no hub, no display, one thread, repeatable examples."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("deltad", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deltad"))


def pytest_collection_finish() -> None:
    """Keep the imported modules out of garbage collection, which took a tenth of the time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let them be collected at the end, as some libraries expect."""
    gc.unfreeze()
