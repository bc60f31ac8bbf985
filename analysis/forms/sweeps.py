"""A sweep in words, columns and plain objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from deltad.analysis.question import Question
from deltad.analysis.text import plain_grid as grid
from deltad.analysis.words import count, number, p_value, region, unit, with_interval

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
    from deltad.analysis.sweeps import Point, Sweep

SWEEP_COLUMNS: Final[dict[str, str]] = {
    "over": "what differs between the rows: threshold, top-k or protocol",
    "value": "its value: δ, K' or the protocol",
    "criterion": "the criterion in question",
    "baseline": "the criterion that it is compared with",
    **accuracy_columns("criterion", "tokens outside"),
    **accuracy_columns("baseline", "tokens outside"),
    **PAIR_COLUMNS,
}
"""Columns of a sweep, a row a point, and what they mean."""

NAMES: Final = {"threshold": "δ", "top-k": "K'", "protocol": "protocol"}


def sweep_columns(sweep: Sweep) -> dict[str, list[Any]]:
    """The columns of `SWEEP_COLUMNS`."""
    return stack(tuple(SWEEP_COLUMNS), [_row(sweep, point) for point in sweep.points])


def sweep_object(sweep: Sweep) -> dict[str, Any]:
    """The JSON object: the rows as in the columns, and what was refused.

    What the points do not have in common (`threshold` or `protocol`) stands in the rows alone.
    """
    found = json_object(
        sweep.question,
        sweep.bootstrap_seed,
        len(sweep.points[0].table.seeds),
        criterion=sweep.question.criterion,
        over=sweep.over,
        points=[_row(sweep, point) for point in sweep.points],
        refused=sweep.refused,
        unjudged=sweep.unjudged or None,
    )
    found.pop(sweep.over, None)
    return found


def sweep_title(sweep: Sweep) -> str:
    """What was asked, in one line."""
    question = sweep.question
    parts = [f"{question.criterion} against {question.baseline}"]
    parts.append(f"outside: {swept_region(question, sweep.over)}")
    if sweep.over != "protocol":
        parts.append(question.protocol)
    return " · ".join(parts)


def swept_region(question: Question, over: str) -> str:
    """The region, with what differs between points as a letter."""
    words = region(question)
    if over == "threshold":
        words = words.replace(f"{question.threshold:g}{unit(question)}", f"δ{unit(question)}")
    return words.replace("top-K", "top-K'") if over == "top-k" else words


def sweep_text(sweep: Sweep) -> RenderableType:
    """A row a point: counts, rates, paired comparison, signs beside the constant guess.

    Parameters
    ----------
    sweep : Sweep
        Computed.

    Returns
    -------
    RenderableType
        For a rich console; counts alone where there is no ΔD.
    """
    if sweep.unjudged:
        return _counts_text(sweep)
    found = grid(
        NAMES[sweep.over],
        "tokens\noutside",
        "in dis-\nagreement",
        "unsafe / kept\ncriterion",
        "\nbaseline",
        "unsafe keep, seed mean\ncriterion",
        "\nbaseline",
        "difference\nover paired seeds",
        "seeds\nlower / tied / higher",
        "sign\ntest p",
        "contracting\ncriterion / baseline",
    )
    signs = grid(
        NAMES[sweep.over],
        "P(ΔD > 0)\noutside",
        "constant\nguess",
        "sign of ΔD foretold, outside\ncriterion",
        "\nbaseline",
        "P(ΔD > 0)\nin disagreement",
        "constant\nguess",
        "foretold there\ncriterion / baseline",
    )
    for point in sweep.points:
        table = point.table
        ours, theirs, paired = table.criterion, table.baseline, table.paired
        label = point.value if isinstance(point.value, str) else f"{point.value:g}"
        found.add_row(
            label,
            str(table.outside.tokens),
            str(table.disagreement.tokens),
            *(f"{side.unsafe} / {side.determined}" for side in (ours, theirs)),
            *(
                with_interval(side.unsafe_keep_rate, side.unsafe_keep_rate_ci95)
                for side in (ours, theirs)
            ),
            with_interval(paired.difference, paired.difference_ci95, signed=True),
            f"{paired.lower} / {paired.tied} / {paired.higher}",
            p_value(paired.sign_test_p),
            f"{number(ours.contracting_fraction)} / {number(theirs.contracting_fraction)}",
        )
        signs.add_row(
            label,
            number(table.outside.increase_rate),
            number(table.outside.constant_guess),
            *(share_text(point.accuracy[side]) for side in ("criterion", "baseline")),
            number(table.disagreement.increase_rate),
            number(table.disagreement.constant_guess),
            " / ".join(number(table.sign_accuracy(side)) for side in ("criterion", "baseline")),
        )
    return Group(
        _heading(sweep),
        found,
        signs,
        Text(bootstrap_text(sweep.bootstrap_seed)),
        *(Text(f"{name}: {why}") for name, why in sweep.refused.items()),
    )


def _heading(sweep: Sweep) -> Text:
    """What was asked, of how many seeds."""
    seeds = count(len(sweep.points[0].table.seeds), "seed")
    return Text(f"{sweep_title(sweep)} · {seeds}", style="bold")


def _counts_text(sweep: Sweep) -> RenderableType:
    """Tokens outside and in disagreement, and who keeps them."""
    found = grid(
        NAMES[sweep.over],
        "tokens\noutside",
        "in dis-\nagreement",
        "of these kept\nby the criterion",
        "\nby the baseline",
    )
    for point in sweep.points:
        table = point.table
        found.add_row(
            point.value if isinstance(point.value, str) else f"{point.value:g}",
            *(str(base.tokens) for base in (table.outside, table.disagreement)),
            *(str(side.kept) for side in (table.criterion, table.baseline)),
        )
    return Group(
        _heading(sweep),
        found,
        Text(f"What a mask does is not judged: {sweep.unjudged}."),
        *(Text(f"{name}: {why}") for name, why in sweep.refused.items()),
    )


def _row(sweep: Sweep, point: Point) -> dict[str, Any]:
    """One point."""
    return {
        "over": sweep.over,
        "value": point.value,
        "criterion": sweep.question.criterion,
        "baseline": sweep.question.baseline,
        **{
            name: value
            for side in ("criterion", "baseline")
            for name, value in accuracy_values(side, point.accuracy[side]).items()
        },
        **pair_values(point.table, judged=not sweep.unjudged),
    }
