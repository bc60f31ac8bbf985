"""Findings, and the registry of the causes that may be found.

A cause is a function of the evidence with the decorator `cause`, in the module of its family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .evidence import Evidence


@dataclass(frozen=True)
class Finding:
    """One likely cause of what a dump shows.

    Attributes
    ----------
    cause : str
        Its name.
    confidence : float
        In [0, 1]: how often a finding with such evidence was right when causes were put into
        sound dumps.
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


Detect = Callable[[Evidence], Finding | None]


@dataclass(frozen=True)
class Cause:
    """One reason why engine and trainer disagree.

    Causes explain each other away in their `order`: one with a lower number has seen its fault in
    single values, or in a relation that the others only suffer from. `explains` names those whose
    signs it shows too. `meaning` and `size` say what went wrong and what an estimate is. It
    `needs` "arms", "tokens", "lists" or "neighbors" to be judged, or nothing but single values.
    """

    name: str
    order: int
    detect: Detect
    meaning: str
    size: str
    advice: str
    explains: frozenset[str]
    needs: str


CAUSES: Final[dict[str, Cause]] = {}
"""Every cause by name, as the families' modules enter them."""

DISTANCE: Final = frozenset({"temperature", "stale", "other-model", "precision"})
"""Causes that are seen by the distance of the policies."""


def cause(
    name: str,
    order: int,
    *,
    size: str,
    advice: str,
    explains: frozenset[str] = frozenset(),
    needs: str = "",
) -> Callable[[Detect], Detect]:
    """Enter a function of the evidence into `CAUSES`; its docstring is the cause's meaning."""

    def enter(detect: Detect) -> Detect:
        meaning = (detect.__doc__ or "").partition("\n")[0]
        CAUSES[name] = Cause(name, order, detect, meaning, size, advice, explains, needs)
        return detect

    return enter


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
