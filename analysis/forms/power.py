"""Power tables, and the paper's headline, to read at a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltad.analysis import paper
from deltad.analysis.statistics.power import TESTS
from deltad.analysis.words import DASH, count, number, p_value, points, title

if TYPE_CHECKING:
    from deltad.analysis.headline import Headline
    from deltad.analysis.power import PowerTable


def power_text(table: PowerTable) -> RenderableType:
    """Seeds needed by test and difference, and what this dump's number of seeds can see.

    Parameters
    ----------
    table : PowerTable
        Its rows are computed here, if they were not before.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    question = table.question
    parts: list[RenderableType] = [
        Text(f"{title(question)} · {question.protocol}", style="bold"),
        Text(_dump(table)),
    ]
    if not table.rows:
        parts.append(
            Text(
                "Fewer than two seeds have both rates: this dump says nothing about how many "
                "seeds it takes."
            )
        )
        return Group(*parts)
    return Group(*parts, _needed(table), _seen(table), Text(_method(table)))


def headline_text(found: Headline) -> RenderableType:
    """The paper's headline: sign test with ties, interval of the share, what spreads imply.

    Parameters
    ----------
    found : Headline
        The reported numbers.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    low, high = found.share_ci95
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(
        (
            "spread of a seed's difference, assumed",
            "points",
            "p of the\npaired t-test",
            "power to see\nthe difference",
            f"{found.seeds} seeds\nsee",
            "seeds\nneeded",
            "lower though\nrates are equal",
            "p of the count\nagainst that",
        )
    ):
        grid.add_column(name, justify="right" if at else "left", no_wrap=True)
    for each in found.spreads:
        grid.add_row(
            each.assumption,
            f"{100 * each.spread:.1f}",
            p_value(each.p),
            number(each.power),
            f"{100 * each.detectable:.1f} points",
            str(each.seeds),
            number(each.lower_if_equal),
            p_value(each.sign_p),
        )
    ties = ", ".join(f"{count} → {p_value(p)}" for count, p in found.with_ties.items())
    return Group(
        Text(
            f"{paper.FIGURE}, {paper.PAPER}: {100 * found.criterion:.1f} against "
            f"{100 * found.baseline:.1f} %, lower in {found.lower} of {found.seeds} seeds",
            style="bold",
        ),
        Text(
            f"share of seeds lower {number(found.lower / found.seeds)} [{number(low)}, "
            f"{number(high)}] (Clopper–Pearson, 95 %)"
        ),
        Text(f"sign test p by how many of the other {found.seeds - found.lower} are tied: {ties}"),
        grid,
        Text("Level 0.05, power 0.8. Suggestive, not settled."),
    )


def _dump(table: PowerTable) -> str:
    """What the seeds at hand are like."""
    paired = table.table.paired
    rates = table.paired_rates
    return (
        f"{count(table.seeds, 'seed')}, {paired.seeds} with both rates, {paired.tied} of them "
        f"tied. Mean unsafe-keep rates over these: criterion {number(rates['criterion'])}, "
        f"baseline {number(rates['baseline'])}; the difference has standard deviation "
        f"{number(table.spread)} over seeds."
    )


def _needed(table: PowerTable) -> Table:
    """A row a difference, two columns a test."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("criterion lower by")
    for test in TESTS:
        grid.add_column(f"{test}\nseeds needed", justify="right")
        grid.add_column("\nrejects equal rates", justify="right")
    for point in table.points:
        cells = [points(point)]
        for test in TESTS:
            row = table.row(test, point)
            cells += [
                DASH if row.seeds is None else str(row.seeds),
                number(row.rejects_equal),
            ]
        grid.add_row(*cells)
    return grid


def _seen(table: PowerTable) -> Table:
    """What as many seeds as this dump has can see."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column(f"with {count(table.seeds, 'seed')}")
    for test in TESTS:
        grid.add_column(test, justify="right")
    detectable = [table.detectable_here[test] for test in TESTS]
    grid.add_row(
        f"sees with power {table.goal:g} a difference of",
        *(DASH if math.isnan(each) else f"{100 * each:.1f} points" for each in detectable),
    )
    for point in table.points:
        shares = table.dumps.shares(point, table.seeds)
        grid.add_row(f"power at {points(point)}", *(number(shares[test]) for test in TESTS))
    equal = table.rejects_equal_here
    grid.add_row("rejects equal mean rates", *(number(equal[test]) for test in TESTS))
    return grid


def _method(table: PowerTable) -> str:
    """How it was computed, and when a test is not one of the mean."""
    lines = [
        f"Two-sided tests at level {table.level:g}, power {table.goal:g}; each share from "
        f"{table.times} dumps simulated by drawing these seeds anew (random seed "
        f"{table.table.bootstrap_seed}), ± {table.dumps.error(table.goal):.3f} near "
        f"{table.goal:g}.",
        "Seeds without a rate are counted as seeds. The permutation test of the mean rejects as "
        "the paired t-test does.",
    ]
    limit = 1.5 * table.level + 3 * table.dumps.error(table.level)
    over = [
        test
        for test in TESTS
        if any(
            share > limit
            for share in (
                table.rejects_equal_here[test],
                *(row.rejects_equal for row in table.rows if row.test == test),
            )
        )
    ]
    if over:
        lines.append(
            f"{' and '.join(over)}: where equal mean rates are rejected more often than the level "
            "says, this is no test of the mean.\nRates over few tokens are skewed, so that most "
            "seeds can be lower though the means are equal."
        )
    return "\n".join(lines)
