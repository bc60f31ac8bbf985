"""transformers as we use it: imported when needed, and quiet."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars off a screen that shows ours."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
