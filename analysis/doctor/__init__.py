"""Why trainer and engine disagree: causes told apart from the top-K log-probs of both policies."""

from __future__ import annotations

from .diagnosis import Diagnosis, examine
from .findings import Finding
from .sample import Sample, read_sample

__all__ = ["Diagnosis", "Finding", "Sample", "examine", "read_sample"]
