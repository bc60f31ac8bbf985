"""Dumps from scoring files that another framework wrote: `deltad import`.

Everything but `score` needs NumPy and pyarrow only.
"""

from __future__ import annotations

from .engine_files import EngineFiles
from .faults import Fault, OfflineError
from .files import ScoringFiles
from .importing import Imported, Source, import_dump
from .requests import scoring_requests, write_requests
from .scoring import read_requests, score, write_scores
from .trainers import NemoRL, PrimeRL

__all__ = [
    "EngineFiles",
    "Fault",
    "Imported",
    "NemoRL",
    "OfflineError",
    "PrimeRL",
    "ScoringFiles",
    "Source",
    "import_dump",
    "read_requests",
    "score",
    "scoring_requests",
    "write_requests",
    "write_scores",
]
