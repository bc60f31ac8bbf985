"""Findings, and the registry of the causes that may be found.

A cause is a function of the evidence with the decorator `Cause`, in the module of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deltad.analysis.result import without_nan

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
        plain: dict[str, Any] = without_nan({**vars(self), "confidence": round(self.confidence, 3)})
        return plain


def finding(confidence: Any, tokens: Any, estimate: Any = None, **evidence: Any) -> Finding:
    """What a cause found, in Python's own numbers; its name and advice are added to it later."""
    plain = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in evidence.items()
    }
    size = None if estimate is None else float(estimate)
    return Finding("", float(confidence), int(tokens), size, plain)


Detect = Callable[[Evidence], Finding | None]


@dataclass
class Cause:
    """One reason why engine and trainer disagree, as a decorator of the function that finds it.

    Causes explain each other away in their `order`: one with a lower number has seen its fault in
    single values, or in a relation that the others only suffer from. `explains` names those whose
    signs it shows too; `size` says what an estimate is. To be judged it `needs` "arms", "rows",
    "tokens", "lists" or "neighbors", or only single values.
    """

    name: str
    order: int
    size: str
    advice: str
    explains: frozenset[str] = frozenset()
    needs: str = ""
    detect: Detect = field(init=False)

    def __call__(self, detect: Detect) -> Detect:
        """Enter the cause into `CAUSES`; the function's docstring says what went wrong."""
        self.detect = detect
        CAUSES[self.name] = self
        return detect


CAUSES: Final[dict[str, Cause]] = {}
"""Every cause by name, as the families' modules enter them."""

DISTANCE: Final = frozenset({"temperature", "stale", "other-model", "precision"})
"""Causes that are seen by the distance of the policies."""
