"""The registry of causes: a new cause is a function that looks at the evidence, and a line here.

The order is that in which causes explain each other away: whoever stands above has the first
word, and `examination` weakens what stands below and is explained by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from .evidence import Evidence
from .findings import Finding


@dataclass(frozen=True)
class Cause:
    """One reason why engine and trainer disagree.

    Attributes
    ----------
    name : str
        As in the JSON.
    meaning : str
        What went wrong, in a sentence.
    detect : callable
        Looks at the evidence and gives a finding, or None where nothing speaks for this cause.
    advice : str
        The remedy.
    """

    name: str
    meaning: str
    detect: Callable[[Evidence], Finding | None]
    advice: str


_ALL: Final[tuple[Cause, ...]] = ()

CAUSES: Final = MappingProxyType({cause.name: cause for cause in _ALL})
"""Every cause by name."""


def detected(evidence: Evidence) -> Iterator[Finding]:
    """What every cause finds on its own."""
    for cause in _ALL:
        found = cause.detect(evidence)
        if found is not None:
            yield found
