"""A comparison of criteria in words, columns and plain objects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from deltad.analysis.question import OWN
from deltad.analysis.text import plain_grid as grid
from deltad.analysis.words import DASH, count, number, p_value, region, with_interval

from .pairs import (
    PAIR_COLUMNS,
    accuracy_columns,
    accuracy_values,
    base_text,
    bootstrap_text,
    json_object,
    pair_values,
    share_text,
    stack,
)

if TYPE_CHECKING:
    from deltad.analysis.comparison import Compared, Comparison

COMPARISON_COLUMNS: Final[dict[str, str]] = {
    "criterion": "the criterion in question",
    "baseline": "the criterion that it is compared with",
    "masked": "stored tokens that it masks: the sum of the three below",
    "masked_outside": "of these, tokens with D > δ",
    "masked_inside": "of these, tokens with D ≤ δ; only those that the dump stores",
    "masked_without_vectors": "of these, rows stored without top-K vectors, whose D is unknown",
    "weight_outside": "mean weight of the tokens outside; 1 where a criterion keeps",
    **accuracy_columns("outside", "tokens outside"),
    **accuracy_columns("disagreement", "disagreement tokens"),
    **PAIR_COLUMNS,
    "holm_p": "the sign test's p corrected for the number of criteria (Holm)",
    "contracting_difference": "contracting fraction, criterion − baseline, mean over seeds "
    "in which both keep a disagreement token",
    "contracting_difference_low": "lower end of its 95 % interval",
    "contracting_difference_high": "upper end of its 95 % interval",
    "contracting_sign_test_p": "two-sided sign test of it",
}
"""Columns of a comparison, a row a criterion, and what they mean."""


def comparison_columns(comparison: Comparison) -> dict[str, list[Any]]:
    """The columns of `COMPARISON_COLUMNS`, a row a criterion."""
    rows = [
        _row(each, comparison.question.baseline, corrected, judged=not comparison.unjudged)
        for each, corrected in zip(comparison.criteria, comparison.holm_p, strict=True)
    ]
    return stack(tuple(COMPARISON_COLUMNS), rows)


def comparison_object(comparison: Comparison) -> dict[str, Any]:
    """The JSON object: a row a criterion as in the columns, and the agreement matrix."""
    columns = comparison_columns(comparison)
    table = comparison.criteria[0].table
    return json_object(
        comparison.question,
        comparison.bootstrap_seed,
        len(table.seeds),
        tokens=sum(seed.tokens for seed in table.seeds),
        rows=comparison.rows,
        rows_without_vectors=table.without_vectors,
        base={
            "outside": {
                "tokens": comparison.outside.tokens,
                "undetermined": comparison.outside.undetermined,
                "increase_rate": columns["outside_increase_rate"][0],
                "constant_guess": columns["outside_constant_guess"][0],
            }
        },
        criteria=[
            {name: values[at] for name, values in columns.items()}
            for at in range(len(comparison.criteria))
        ],
        agreement={
            "criteria": list(comparison.names),
            "tokens": comparison.outside.tokens,
            "alike": comparison.alike.tolist(),
        },
        refused=comparison.refused,
        unjudged=comparison.unjudged or None,
    )


def comparison_text(comparison: Comparison) -> RenderableType:
    """What each criterion masks and foretells, the pairs, who agrees with whom.

    Parameters
    ----------
    comparison : Comparison
        Computed.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    question, table = comparison.question, comparison.criteria[0].table
    tokens = sum(seed.tokens for seed in table.seeds)
    size = (
        f"{count(len(table.seeds), 'seed')}, {count(tokens, 'token')}, "
        f"{comparison.rows} stored, {comparison.outside.tokens} outside"
    )
    if not comparison.unjudged:
        size += f": {base_text(comparison.outside)}"
    parts: list[RenderableType] = [
        Text(
            f"criteria against {question.baseline} · outside: {region(question)} · "
            f"{question.protocol}",
            style="bold",
        ),
        Text(size),
        _signs(comparison),
        *([] if comparison.unjudged else [_pairs(comparison)]),
        _agreement(comparison),
        Text(_notes(comparison, tokens)),
    ]
    parts += [Text(f"{name} is left out: {why}") for name, why in comparison.refused.items()]
    return Group(*parts)


def _row(each: Compared, baseline: str, corrected: float, *, judged: bool) -> dict[str, Any]:
    """One criterion; without ΔD what it decides is NaN."""
    contracting = each.contracting
    row = {
        "criterion": each.name,
        "baseline": baseline,
        "masked": sum(each.masked.values()),
        **{f"masked_{place}": number_of for place, number_of in each.masked.items()},
        "weight_outside": each.weight.rate,
        **accuracy_values("outside", each.outside),
        **accuracy_values("disagreement", each.disagreement),
        **pair_values(each.table, judged=judged),
        "holm_p": corrected,
        "contracting_difference": contracting.difference,
        "contracting_difference_low": contracting.difference_ci95[0],
        "contracting_difference_high": contracting.difference_ci95[1],
        "contracting_sign_test_p": contracting.sign_test_p,
    }
    unknown = () if judged else ("holm_p", *(name for name in row if name.startswith("contr")))
    return row | dict.fromkeys(unknown, math.nan)


def _signs(comparison: Comparison) -> RenderableType:
    """What each criterion masks, and how often it foretells the sign of ΔD."""
    bare = comparison.criteria[0].table.without_vectors
    found = grid(
        "",
        "masks\nall",
        "\noutside",
        "\ninside",
        *(["\nD unknown"] if bare else []),
        "mean weight\noutside",
        *(
            [
                "sign of ΔD foretold\nof tokens outside",
                "of those in disagreement\nwith the baseline",
                "a constant\nguess there",
            ]
            if not comparison.unjudged
            else ["disagrees with\nthe baseline"]
        ),
    )
    for each in comparison.criteria:
        places = [each.masked[place] for place in ("outside", "inside")]
        found.add_row(
            each.name,
            str(sum(each.masked.values())),
            *map(str, places),
            *([str(each.masked["without_vectors"])] if bare else []),
            number(each.weight.rate),
            *(
                [
                    share_text(each.outside),
                    share_text(each.disagreement),
                    number(each.table.disagreement.constant_guess),
                ]
                if not comparison.unjudged
                else [str(each.table.disagreement.tokens)]
            ),
        )
    return found


def _pairs(comparison: Comparison) -> RenderableType:
    """Every criterion against the baseline."""
    found = grid(
        "of the disagreement tokens that each keeps",
        "unsafe / kept\ncriterion",
        "\nbaseline",
        "unsafe keep, seed mean\ncriterion",
        "\nbaseline",
        "difference\nover paired seeds",
        "seeds\nlower / tied / higher",
        "sign test\np",
        "\nHolm p",
        "contracting, pooled\ncriterion / baseline",
        "difference\nover paired seeds",
        "sign test\np",
    )
    for each, corrected in zip(comparison.criteria, comparison.holm_p, strict=True):
        if each.name == comparison.question.baseline:
            continue
        ours, theirs, paired = each.table.criterion, each.table.baseline, each.table.paired
        contracting = each.contracting
        found.add_row(
            each.name,
            *(f"{side.unsafe} / {side.determined}" for side in (ours, theirs)),
            *(
                with_interval(side.unsafe_keep_rate, side.unsafe_keep_rate_ci95)
                for side in (ours, theirs)
            ),
            with_interval(paired.difference, paired.difference_ci95, signed=True),
            f"{paired.lower} / {paired.tied} / {paired.higher}",
            p_value(paired.sign_test_p),
            p_value(corrected),
            f"{number(ours.contracting_fraction)} / {number(theirs.contracting_fraction)}",
            with_interval(contracting.difference, contracting.difference_ci95, signed=True),
            p_value(contracting.sign_test_p),
        )
    return found


def _agreement(comparison: Comparison) -> RenderableType:
    """Share of the tokens outside that two criteria decide alike, and their number."""
    found = grid(
        f"decided alike, of {count(comparison.outside.tokens, 'token')} outside",
        *(f"{place}" for place in range(1, len(comparison.names) + 1)),
    )
    for at, name in enumerate(comparison.names):
        cells = [
            f"{number(float(share))}\n{alike}" if other != at else DASH
            for other, (share, alike) in enumerate(
                zip(comparison.agreement[at], comparison.alike[at], strict=True)
            )
        ]
        found.add_row(f"{at + 1} {name}", *cells)
    return found


def _notes(comparison: Comparison, tokens: int) -> str:
    """How intervals were made, and what was not counted."""
    words = [
        bootstrap_text(comparison.bootstrap_seed),
        "Kept foretells ΔD ≤ 0, masked ΔD > 0. Holm p: over the criteria of this table.",
    ]
    if comparison.unjudged:
        words = [f"What a mask does is not judged: {comparison.unjudged}."]
    elif comparison.question.protocol == OWN:
        words.append(
            "Under `own` a masked token has no update of its own, so no sign is judged: "
            "ask for `shared:` and an arm."
        )
    if comparison.rows < tokens:
        words.append(
            f"Inside: of the {comparison.rows} tokens that the dump stores, not of all {tokens}."
        )
    return "\n".join(words)
