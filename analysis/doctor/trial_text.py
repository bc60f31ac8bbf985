"""A trial for a person at a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltad.analysis.words import count, number, with_interval

if TYPE_CHECKING:
    from .trial import Share, Trial


def trial_text(result: Trial) -> RenderableType:
    """The matrix, the shares with their intervals, and every failure.

    Parameters
    ----------
    result : Trial
        What was tried.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    faults, sound = result.right, result.false_alarms
    return Group(
        Text(f"The doctor on trial · {result.run}", style="bold"),
        Text(f"right cause named first: {_share(faults)} · alarms on sound dumps: {_share(sound)}"),
        _matrix(result),
        Text(
            "Rows: what was put in. Columns: what was named first. Shares with Clopper and "
            "Pearson's exact 95 % intervals; they hold for these faults at these strengths, each "
            f"tried {count(result.repeats, 'time')} on seeds of this dump "
            f"(random seed {result.seed})."
        ),
        *_estimates(result),
        *_failures(result),
        *_not_broken(result),
    )


def _share(share: Share) -> str:
    """Numerator, denominator, share and interval."""
    return f"{share.count} of {share.cases} = {with_interval(share.share, share.ci95)}"


def _matrix(result: Trial) -> Table:
    """Counts by cause and name, with the share of right ones."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("put in", no_wrap=True)
    for name in result.named:
        # A hyphen may end a line, so that fourteen columns fit a terminal.
        grid.add_column(name.replace("-", "-\n"), justify="right", no_wrap=True)
    grid.add_column("right", justify="right", no_wrap=True)
    shares = result.right_by_cause()
    for cause, row in zip(result.causes, result.matrix, strict=True):
        low, high = shares[cause].ci95
        grid.add_row(
            cause,
            *(str(cases) if cases else "·" for cases in row),
            f"{number(shares[cause].share)} [{number(low)}, {number(high)}]",
        )
    return grid


def _estimates(result: Trial) -> list[RenderableType]:
    """How far estimates lie from what was put in."""
    return [
        Text(
            f"{name}: the estimate is off by {sum(map(abs, misses)) / len(misses):.3g} on average, "
            f"{max(map(abs, misses)):.3g} at most, in {count(len(misses), 'case')}"
        )
        for name, misses in result.misses_by_injection().items()
    ]


def _failures(result: Trial) -> list[RenderableType]:
    """What was said instead, one line a fault, strength and answer."""
    if not result.failures:
        return [Text("No failures.")]
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("put in", "strength", "should be", "was called", "confidence", "cases"):
        grid.add_column(name, no_wrap=True)
    tried: dict[tuple[str, float], int] = {}
    for case in result.cases:
        key = case.injection, case.strength
        tried[key] = tried.get(key, 0) + 1
    alike: dict[tuple[str, float, str, str], list[float]] = {}
    for case in result.failures:
        what = (case.injection, case.strength, case.cause, ", ".join(case.said) or case.named)
        alike.setdefault(what, []).append(case.confidence)
    for (name, strength, cause, said), confidences in alike.items():
        known = [each for each in confidences if not math.isnan(each)]
        grid.add_row(
            name,
            f"{strength:g}",
            cause,
            said,
            number(sum(known) / len(known)) if known else "",
            f"{len(confidences)} of {tried[name, strength]}",
        )
    return [Text("Failures", style="bold"), grid]


def _not_broken(result: Trial) -> list[RenderableType]:
    """What could not be tried."""
    if not result.not_broken:
        return []
    names = ", ".join(f"{name} {strength:g}" for name, strength in result.not_broken)
    return [Text(f"Found nothing to break: {names}")]
