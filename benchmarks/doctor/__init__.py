"""The doctor's test bench: known faults put into sound dumps, and what the doctor calls them."""

from __future__ import annotations

from . import distributions, values  # these modules enter the faults
from .broken import write_injected
from .fault import FAULTS, Fault
from .rows import NothingToBreakError
from .trial import Case, every_case, summary, trial

__all__ = [
    "FAULTS",
    "Case",
    "Fault",
    "NothingToBreakError",
    "distributions",
    "every_case",
    "summary",
    "trial",
    "values",
    "write_injected",
]
