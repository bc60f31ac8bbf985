"""What the doctor says: findings, likeliest first, and what was looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from deltad.analysis.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT: Final = 1
"""Version of the JSON object."""


@dataclass(frozen=True)
class Finding:
    """One likely cause of what a dump shows.

    Attributes
    ----------
    cause : str
        Its name, one of `CAUSES`.
    confidence : float
        In [0, 1]: how often a finding with such evidence was right when causes were injected
        into clean dumps.
    tokens : int
        Tokens of the sample that show it.
    estimate : float or None
        Its size in the cause's own unit, None where it has none.
    evidence : mapping
        What gives it away, plain numbers and strings by name.
    advice : str
        The remedy.
    """

    cause: str
    confidence: float
    tokens: int
    estimate: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""

    def to_json_object(self) -> dict[str, Any]:
        """The finding as plain objects; what is not finite is None."""
        return {
            "cause": self.cause,
            "confidence": round(self.confidence, 3),
            "tokens": self.tokens,
            "estimate": _plain(self.estimate),
            "evidence": {name: _plain(value) for name, value in self.evidence.items()},
            "advice": self.advice,
        }


@dataclass(frozen=True)
class Looked:
    """What was looked at, and what could not be.

    Attributes
    ----------
    run : str
        Where the rows come from.
    arm : str
        The arm whose rows were read; all arms share what the doctor looks at but `in_loss`.
    tokens, stored, seen : int
        Tokens looked at, stored in that arm, and seen by its recorder.
    seeds, steps : int
        Repetitions and optimizer steps among the tokens looked at.
    without : tuple of str
        What could not be judged on this dump and why, a sentence each.
    """

    run: str
    arm: str
    tokens: int
    stored: int
    seen: int
    seeds: int
    steps: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis(Result):
    """The doctor's answer about one dump.

    Attributes
    ----------
    findings : tuple of Finding
        Likeliest first; empty for a dump in which nothing wrong was found.
    looked : Looked
        What the answer rests on.
    """

    findings: tuple[Finding, ...]
    looked: Looked = field(repr=False)

    @property
    def healthy(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def top(self) -> str | None:
        """The likeliest cause, None where nothing wrong was found."""
        return self.findings[0].cause if self.findings else None

    def text(self) -> RenderableType:
        """For a person: each finding with its evidence, size, confidence and remedy."""
        from .text import diagnosis_text

        return diagnosis_text(self)

    def columns(self) -> Mapping[str, Sequence[Any]]:
        """A row a finding; evidence is left to the JSON."""
        return {
            "cause": [each.cause for each in self.findings],
            "confidence": [each.confidence for each in self.findings],
            "tokens": [each.tokens for each in self.findings],
            "estimate": [
                math.nan if each.estimate is None else each.estimate for each in self.findings
            ],
            "advice": [each.advice for each in self.findings],
        }

    def to_json_object(self) -> dict[str, Any]:
        """`format`, `healthy`, `findings`: the contract."""
        return {
            "format": FORMAT,
            "healthy": self.healthy,
            "findings": [each.to_json_object() for each in self.findings],
        }


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, what is not finite as None, inside lists and mappings too."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
