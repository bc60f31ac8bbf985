"""The ladder as text, as plain objects and as columns."""

from __future__ import annotations

import math
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from deltad.analysis import statistics
from deltad.analysis.export import FORMAT
from deltad.analysis.grid import Grid
from deltad.analysis.ladder import RUNGS, SAMPLED, SETS, LadderTable, Share
from deltad.analysis.text import plain_grid
from deltad.analysis.words import DASH, count, number, title, with_interval

LADDER_TABLE_COLUMNS: Final[dict[str, str]] = {
    "rung": "which change of D",
    "set": "which tokens: outside the region, or those that the question's pair disagrees on",
    "criterion": "whose foretold signs",
    "tokens": "tokens that have the rung; a sampled one counts for those that it stands for",
    "right": "tokens whose sign is foretold",
    "share": "right / tokens",
    "share_low": "lower end of its 95 % interval",
    "share_high": "upper end of its 95 % interval",
    "increase_rate": "share with ΔD > 0 on the rung: the base rate",
    "constant_guess": "share on which the better constant guess is right",
    "agreement": "share whose sign is that of the realized step",
    "agreement_low": "lower end of its 95 % interval",
    "agreement_high": "upper end of its 95 % interval",
    "cost": "share less that of the rung below, over the tokens that have both",
    "cost_low": "lower end of its 95 % interval",
    "cost_high": "upper end of its 95 % interval",
    "cause": "what lies between the two rungs",
}
"""Columns of the ladder's table, a row a rung, set and criterion, and what they mean."""

_NAMES: Final = {"outside": "all tokens outside", "disagreement": "disagreement tokens"}


def ladder_text(table: LadderTable) -> RenderableType:
    """The ladder to read: shares right, costs, what is missing and how the rest was measured.

    Parameters
    ----------
    table : LadderTable
        Of one arm.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    parts: list[RenderableType] = [
        Text(f"where the sign is lost · {title(table.question)} · arm {table.arm}", style="bold"),
        Text(_size(table)),
    ]
    for within in SETS:
        parts += [Text(f"\n{_NAMES[within]}: share of signs of ΔD foretold"), _rungs(table, within)]
    parts += [Text("what it costs: share right, less that of the rung below"), _costs(table)]
    parts.append(Text(_footer(table)))
    return Group(*parts)


def ladder_object(table: LadderTable) -> dict[str, Any]:
    """The JSON object of a ladder; floats may be NaN.

    Parameters
    ----------
    table : LadderTable
        Of one arm.

    Returns
    -------
    dict
        Plain objects.
    """
    question = table.question
    return {
        "format": FORMAT,
        "threshold": question.threshold,
        "divergence": question.divergence,
        "protocol": question.protocol,
        "criterion": question.criterion,
        "baseline": question.baseline,
        "criteria": list(table.criteria),
        "seeds": len(table.seeds),
        "bootstrap": {
            "method": statistics.METHOD,
            "resamples": statistics.RESAMPLES,
            "seed": table.bootstrap_seed,
        },
        "tokens": sum(seed.tokens for seed in table.seeds),
        **{within: table.tokens(within) for within in SETS},
        "sampled": {within: table.sampled(within) for within in SETS},
        "rungs": [
            {
                "rung": rung.name,
                "label": rung.label,
                "cause": table.cause(rung.name),
                **{within: _rung_object(table, rung.name, within) for within in SETS},
            }
            for rung in table.rungs
        ],
        "missing": dict(table.missing),
        "recorded": dict(table.recorded),
    }


def ladder_columns(table: LadderTable) -> dict[str, list[Any]]:
    """The columns of `LADDER_TABLE_COLUMNS`.

    Parameters
    ----------
    table : LadderTable
        Of one arm.

    Returns
    -------
    dict of str to list
        A row a rung, set of tokens and criterion.
    """
    rows: list[list[Any]] = []
    for rung in table.rungs:
        for within in SETS:
            base = table.increase(rung.name, within).share
            same = table.agreement(rung.name, within)
            for name in table.criteria:
                right = table.right(rung.name, name, within)
                cost = table.cost(rung.name, name, within)
                rows.append(
                    [
                        rung.name, within, name, right.denominator, right.numerator, right.share,
                        *right.ci95, base, table.constant_guess(rung.name, within), same.share,
                        *same.ci95, cost.share, *cost.ci95, table.cause(rung.name),
                    ]
                )  # fmt: skip
    return {name: [row[at] for row in rows] for at, name in enumerate(LADDER_TABLE_COLUMNS)}


def _rung_object(table: LadderTable, rung: str, within: str) -> dict[str, Any]:
    """One rung over one set of tokens."""
    base, same = table.increase(rung, within), table.agreement(rung, within)
    return {
        "tokens": base.denominator,
        "increase_rate": base.share,
        "constant_guess": table.constant_guess(rung, within),
        "agreement": same.share,
        "agreement_ci95": list(same.ci95),
        "criteria": {
            name: _right_object(table.right(rung, name, within), table.cost(rung, name, within))
            for name in table.criteria
        },
    }


def _right_object(right: Share, cost: Share) -> dict[str, Any]:
    """A criterion's share on one rung, and what the rung cost it."""
    return {
        "right": right.numerator,
        "share": right.share,
        "share_ci95": list(right.ci95),
        "cost": cost.share,
        "cost_ci95": list(cost.ci95),
    }


def _size(table: LadderTable) -> str:
    """Seeds and tokens in one line."""
    text = (
        f"{count(len(table.seeds), 'seed')}, {count(table.tokens(), 'token')} outside, "
        f"{table.tokens('disagreement')} in disagreement"
    )
    if any(rung.name in SAMPLED for rung in table.rungs):
        text += (
            f"; own and sequence's gradient of {table.sampled()} and "
            f"{table.sampled('disagreement')} of them"
        )
    return text


def _rungs(table: LadderTable, within: str) -> Grid:
    """A row a rung."""
    grid = plain_grid(
        "ΔD along", *table.criteria, "tokens", "P(ΔD > 0)", "constant\nguess", "sign is\nthe step's"
    )
    for rung in table.rungs:
        base = table.increase(rung.name, within)
        same = table.agreement(rung.name, within)
        grid.add_row(
            rung.label,
            *(
                with_interval(right.share, right.ci95)
                for right in (table.right(rung.name, name, within) for name in table.criteria)
            ),
            f"{base.denominator:.0f}",
            number(base.share),
            number(table.constant_guess(rung.name, within)),
            DASH if rung.name == "realized" else with_interval(same.share, same.ci95),
        )
    return grid


def _costs(table: LadderTable) -> Grid:
    """A row a step between two rungs."""
    headers = [f"{name}\n{_NAMES[within]}" for within in SETS for name in table.criteria]
    grid = plain_grid("added", *headers)
    for rung in table.rungs:
        cause = table.cause(rung.name)
        grid.add_row(
            "all that lies between" if cause.count("+") > 2 else cause,
            *(
                with_interval(cost.share, cost.ci95, signed=True)
                for cost in (
                    table.cost(rung.name, name, within)
                    for within in SETS
                    for name in table.criteria
                )
            ),
        )
    return grid


def _footer(table: LadderTable) -> str:
    """Intervals, methods, and what is missing."""
    lines = [
        f"Pooled over seeds; intervals: 95 %, bootstrap over seeds ({statistics.METHOD}, "
        f"{statistics.RESAMPLES} resamples, random seed {table.bootstrap_seed}).",
        "A criterion foretells ΔD > 0 where it masks; Â times the exact Ḋ is the lowest rung.",
    ]
    methods = table.recorded.get("methods")
    if isinstance(methods, dict):
        said = "; ".join(f"{rung} by {how}" for rung, how in methods.items() if how != "none")
        lines.append(f"Measured: {said}.")
    if any(not math.isclose(table.sampled(each), table.tokens(each)) for each in SETS) and any(
        rung.name in SAMPLED for rung in table.rungs
    ):
        lines.append(
            "Not every token has its own and its sequence's gradient: disagreement tokens were "
            "sampled first, and a sampled token counts for those of its kind that were not."
        )
    lines += [
        f"Missing: {rung.label} ({table.missing[rung.name]})."
        for rung in RUNGS
        if rung.name in table.missing
    ]
    if any(rung.column and rung.name in table.missing for rung in RUNGS):
        lines.append(
            "Record the ladder with `deltad record … --ladder`, or give "
            "`UpdateProbe(..., ladder=Ladder())` in your own loop."
        )
    return "\n".join(lines)
