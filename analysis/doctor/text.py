"""A diagnosis for a person: what is wrong, how that shows, how sure it is, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deltad.analysis.words import DASH, count

from .causes import CAUSES
from .findings import Diagnosis, Finding, Looked

_WIDTH = 92


def diagnosis_text(diagnosis: Diagnosis) -> RenderableType:
    """Findings, likeliest first, and what was looked at.

    Parameters
    ----------
    diagnosis : Diagnosis
        The doctor's answer.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    looked = diagnosis.looked
    parts: list[RenderableType] = []
    if diagnosis.healthy:
        parts.append(Text("nothing wrong found", style="bold"))
        parts.append(Text(f"looked for: {', '.join(CAUSES)}"))
    else:
        title = f"{count(len(diagnosis.findings), 'finding')}, likeliest first"
        parts.append(Text(title, style="bold"))
        parts += [_finding(each, looked) for each in diagnosis.findings]
    parts.append(Text(_scope(looked)))
    parts += [Text(f"not judged: {each}") for each in looked.without]
    return Group(*parts)


def _finding(found: Finding, looked: Looked) -> RenderableType:
    """One finding: its head, its evidence a line each, its remedy."""
    estimate = "" if found.estimate is None else f" · {_ESTIMATES.get(found.cause, 'size')} "
    estimate += "" if found.estimate is None else _value(found.estimate)
    head = Text(f"\n{found.cause}", style="bold")
    share = f"{found.tokens} of {looked.tokens} tokens"
    head.append(f" · confidence {found.confidence:.2f} · {share}{estimate}", style="")
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for name, value in _flat(found.evidence):
        grid.add_row(name.replace("_", " "), value)
    return Group(
        head,
        Text(CAUSES[found.cause].meaning),
        Padding(grid, (0, 0, 0, 2)),
        Text(f"remedy: {found.advice}"),
    )


_ESTIMATES = {
    "temperature": "τ",
    "truncation": "surviving mass",
    "shift": "d",
    "stale": "further back, in distances from μ to π,",
    "sentinel": "share of tokens",
    "vocabulary": "size",
    "topk-convention": "share of tokens",
    "recomputed": "share with r = 1",
    "other-model": "median correlation",
    "precision": "noise in nats",
    "advantage": "value",
    "concentration": "share of the masked",
    "impossible-values": "share of tokens",
}


def _flat(evidence: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Evidence as names and words, inner mappings on lines of their own."""
    found = []
    for name, value in evidence.items():
        if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
            found += _flat(value, f"{prefix}{name}: ")
        elif isinstance(value, Mapping):
            inner = ", ".join(f"{key} {_value(each)}" for key, each in value.items())
            found.append((prefix + name, inner))
        else:
            found.append((prefix + name, _value(value)))
    return found


def _value(value: Any) -> str:
    """A number to three digits, anything else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or value != value:
        return DASH
    if isinstance(value, float):
        return f"{value:.3g}".replace("-", "−")
    if isinstance(value, Mapping):
        return ", ".join(f"{key} × {each}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return str(value)


def _scope(looked: Looked) -> str:
    """What was looked at."""
    seen = f", thinned from {looked.seen}" if looked.seen > looked.stored else ""
    return (
        f"\nlooked at {looked.tokens} of {looked.stored} stored tokens{seen} of arm {looked.arm}: "
        f"{count(looked.seeds, 'seed')}, {count(looked.steps, 'step')}"
    )
