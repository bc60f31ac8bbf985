"""Conditional rates in words, columns and plain objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from deltad.analysis.conditions import Condition
from deltad.analysis.question import OWN
from deltad.analysis.text import plain_grid as grid
from deltad.analysis.words import count, number, region, with_interval

from .pairs import (
    PAIR_COLUMNS,
    accuracy_columns,
    accuracy_values,
    bootstrap_text,
    json_object,
    pair_values,
    share_text,
    stack,
)

if TYPE_CHECKING:
    from deltad.analysis.condition_table import ConditionTable, Part

CONDITION_COLUMNS: Final[dict[str, str]] = {
    "condition": "what tokens are told apart by",
    "bin": "the bin in words; `unknown` where a token has no value",
    "low": "lower end of a bin of numbers, not in it but in the first",
    "high": "upper end of a bin of numbers, in it",
    "criterion": "whose decisions",
    "baseline": "the criterion that it is compared with",
    **accuracy_columns("outside", "tokens outside in the bin"),
    **PAIR_COLUMNS,
}
"""Columns of a condition table, a row a bin and criterion, and what they mean."""


def condition_columns(table: ConditionTable) -> dict[str, list[Any]]:
    """The columns of `CONDITION_COLUMNS`."""
    rows = [_row(part, table.question.baseline) for part in table.parts]
    return stack(tuple(CONDITION_COLUMNS), rows)


def condition_object(table: ConditionTable) -> dict[str, Any]:
    """The JSON object: the rows as in the columns."""
    seeds = len(table.parts[0].table.seeds) if table.parts else 0
    return json_object(
        table.question,
        table.bootstrap_seed,
        seeds,
        bins_asked=table.bins,
        conditions={each.name: each.meaning for each in table.conditions},
        rows=[_row(part, table.question.baseline) for part in table.parts],
    )


def condition_text(table: ConditionTable) -> RenderableType:
    """A grid a condition, a row a bin and criterion.

    Parameters
    ----------
    table : ConditionTable
        Computed.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    question = table.question
    parts: list[RenderableType] = [
        Text(
            f"{', '.join(table.criteria[1:]) or question.baseline} against {question.baseline} · "
            f"outside: {region(question)} · {question.protocol}",
            style="bold",
        )
    ]
    for condition in table.conditions:
        parts += [Text(f"by {condition.name}: {condition.meaning}"), _bins(table, condition)]
    words = f"{bootstrap_text(table.bootstrap_seed)} Kept foretells ΔD ≤ 0, masked ΔD > 0."
    if question.protocol == OWN:
        words += (
            "\nUnder `own` a masked token has no update of its own, so no sign is judged: "
            "ask for `shared:` and an arm."
        )
    parts.append(Text(words))
    parts += [Text(note) for note in _notes(table)]
    return Group(*parts)


def _row(part: Part, baseline: str) -> dict[str, Any]:
    """One bin and criterion."""
    return {
        "condition": part.condition,
        "bin": part.label,
        "low": part.low,
        "high": part.high,
        "criterion": part.criterion,
        "baseline": baseline,
        **accuracy_values("outside", part.accuracy),
        **pair_values(part.table),
    }


def _bins(table: ConditionTable, condition: Condition) -> RenderableType:
    """A row a bin and criterion; what is the same for all criteria of a bin, once."""
    found = grid(
        condition.name,
        "tokens\noutside",
        "P(ΔD > 0)",
        "constant\nguess",
        "",
        "sign of ΔD foretold\nof tokens outside",
        "in dis-\nagreement",
        "unsafe / kept\ncriterion",
        "\nbaseline",
        "unsafe keep, seed mean\ncriterion",
        "\nbaseline",
        "contracting, pooled\ncriterion / baseline",
    )
    last = None
    for part in table.parts:
        if part.condition != condition.name:
            continue
        pair = part.table
        ours, theirs = pair.criterion, pair.baseline
        shared = (
            part.label,
            str(pair.outside.tokens),
            number(pair.outside.increase_rate),
            number(pair.outside.constant_guess),
        )
        against = part.criterion != table.question.baseline
        found.add_row(
            *(shared if part.label != last else [""] * len(shared)),
            part.criterion,
            share_text(part.accuracy),
            *(
                (
                    str(pair.disagreement.tokens),
                    *(f"{side.unsafe} / {side.determined}" for side in (ours, theirs)),
                    *(
                        with_interval(side.unsafe_keep_rate, side.unsafe_keep_rate_ci95)
                        for side in (ours, theirs)
                    ),
                    f"{number(ours.contracting_fraction)} / {number(theirs.contracting_fraction)}",
                )
                if against
                else [""] * 6
            ),
        )
        last = part.label
    return found


def _notes(table: ConditionTable) -> list[str]:
    """Where bins are fewer than asked for, and what is unknown."""
    notes = []
    for condition in table.conditions:
        parts = table.of(condition.name, table.criteria[0])
        numbers = [part for part in parts if part.low <= part.high]
        if not condition.names and len(numbers) < table.bins:
            notes.append(
                f"{condition.name}: {count(len(numbers), 'bin')} of the {table.bins} asked for, "
                "since tied numbers lie in one"
            )
        for part in parts:
            if part.label == "unknown" and condition.responses:
                notes.append(
                    f"{condition.name}: unknown behind the first position where the dump does "
                    f"not hold whole responses ({count(part.table.outside.tokens, 'token')})"
                )
    return notes
