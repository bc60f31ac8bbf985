"""verl on this machine's CPU, for the tests that need it."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest


def imported(name: str) -> ModuleType:
    """Import a module of verl, whose imports warn of all that is not installed."""
    pytest.importorskip("verl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
