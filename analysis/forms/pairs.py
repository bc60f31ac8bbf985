"""Pieces of results that compare pairs of criteria: the same columns and words in each.

A row of such a result is a pair of criteria on some tokens; `PAIR_COLUMNS` says what stands in
it, in files and in JSON alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deltad.analysis import statistics
from deltad.analysis.export import FORMAT, without_nan
from deltad.analysis.question import Question
from deltad.analysis.rates import SIDES, BaseRate, RateTable
from deltad.analysis.shares import Share
from deltad.analysis.words import number, with_interval

PAIR_COLUMNS: Final[dict[str, str]] = {
    "outside": "tokens with D > δ before the update, all seeds",
    "outside_increase_rate": "share of them with ΔD > 0: the base rate",
    "outside_constant_guess": "share of them on which the better constant guess is right",
    "outside_undetermined": "of these, those whose ΔD is below the bound on its error",
    "disagreement": "tokens outside that exactly one of the two criteria masks",
    "disagreement_increase_rate": "share of them with ΔD > 0",
    "disagreement_constant_guess": "share of them on which the better constant guess is right",
    "disagreement_undetermined": "of these, those whose ΔD is below the bound on its error",
    **{
        f"{side}_{name}": meaning.format(side)
        for side in reversed(SIDES)
        for name, meaning in (
            ("kept", "disagreement tokens that the {} keeps"),
            ("unsafe", "of these, those with ΔD > 0"),
            ("contracting", "of these, those with ΔD < 0"),
            ("undetermined", "of these, those whose ΔD is below the bound on its error"),
            ("unsafe_keep_rate", "mean over seeds of unsafe / (kept − undetermined) of the {}"),
            ("unsafe_keep_rate_low", "lower end of its 95 % interval"),
            ("unsafe_keep_rate_high", "upper end of its 95 % interval"),
            (
                "contracting_fraction",
                "Σ contracting / Σ (kept − undetermined) of the {}, pooled over seeds",
            ),
            ("contracting_fraction_low", "lower end of its 95 % interval"),
            ("contracting_fraction_high", "upper end of its 95 % interval"),
        )
    },
    "paired_seeds": "seeds in which both have an unsafe-keep rate",
    "lower": "paired seeds in which the criterion's rate is below the baseline's",
    "tied": "paired seeds in which they are equal",
    "higher": "paired seeds in which it is above",
    "difference": "criterion − baseline, mean over the paired seeds",
    "difference_low": "lower end of its 95 % interval",
    "difference_high": "upper end of its 95 % interval",
    "sign_test_p": "two-sided; ties left out",
}
"""What a pair of criteria says about some tokens, and what it means."""


WITHOUT_DELTA: Final = frozenset({"outside", "disagreement", "criterion_kept", "baseline_kept"})
"""Of `PAIR_COLUMNS`, what needs no ΔD."""


def pair_values(table: RateTable, *, judged: bool = True) -> dict[str, Any]:
    """The values of `PAIR_COLUMNS`; NaN for what needs ΔD where that is not known."""
    row: list[Any] = []
    for base in (table.outside, table.disagreement):
        row += [base.tokens, base.increase_rate, base.constant_guess, base.undetermined]
    for side in (table.criterion, table.baseline):
        row += [side.kept, side.unsafe, side.contracting, side.undetermined]
        row += [side.unsafe_keep_rate, *side.unsafe_keep_rate_ci95]
        row += [side.contracting_fraction, *side.contracting_fraction_ci95]
    paired = table.paired
    row += [paired.seeds, paired.lower, paired.tied, paired.higher, paired.difference]
    row += [*paired.difference_ci95, paired.sign_test_p]
    return {
        name: value if judged or name in WITHOUT_DELTA else math.nan
        for name, value in zip(PAIR_COLUMNS, row, strict=True)
    }


def accuracy_columns(prefix: str, what: str) -> dict[str, str]:
    """Names and meanings of a share of signs that were foretold."""
    return {
        f"{prefix}_right": f"{what} whose sign of ΔD it foretold (kept: ΔD ≤ 0; masked: ΔD > 0)",
        f"{prefix}_judged": f"{what} that it is judged by; 0 under `own`",
        f"{prefix}_accuracy": "right / judged, pooled over seeds",
        f"{prefix}_accuracy_low": "lower end of its 95 % interval",
        f"{prefix}_accuracy_high": "upper end of its 95 % interval",
    }


def accuracy_values(prefix: str, share: Share) -> dict[str, Any]:
    """The values of `accuracy_columns`."""
    values = (int(share.part), int(share.whole), share.rate, *share.ci95)
    return dict(zip(accuracy_columns(prefix, ""), values, strict=True))


def stack(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns of equal length, in the order of the names."""
    return {name: [row[name] for row in rows] for name in names}


def json_object(
    question: Question, bootstrap_seed: int, seeds: int, **parts: Any
) -> dict[str, Any]:
    """A result's JSON object: what was asked first, NaN as None."""
    known: dict[str, Any] = without_nan(
        {
            "format": FORMAT,
            "threshold": question.threshold,
            "divergence": question.divergence,
            "protocol": question.protocol,
            "baseline": question.baseline,
            "seeds": seeds,
            "bootstrap": {
                "method": statistics.METHOD,
                "resamples": statistics.RESAMPLES,
                "seed": bootstrap_seed,
            },
            **parts,
        }
    )
    return known


def share_text(share: Share) -> str:
    """A share with its interval and counts."""
    counts = f" {share.part:.0f}/{share.whole:.0f}" if share.whole else ""
    return with_interval(share.rate, share.ci95) + counts


def base_text(base: BaseRate) -> str:
    """A base rate with its counts and what a constant guess gets right."""
    words = (
        f"P(ΔD > 0) = {number(base.increase_rate)} ({base.increase} / {base.determined}), "
        f"a constant guess is right on {number(base.constant_guess)}"
    )
    if base.undetermined:
        words += f"; ΔD of {base.undetermined} is undetermined"
    return words


def bootstrap_text(bootstrap_seed: int) -> str:
    """How intervals were made."""
    return (
        f"Intervals: 95 %, bootstrap over seeds ({statistics.METHOD}, "
        f"{statistics.RESAMPLES} resamples, random seed {bootstrap_seed})."
    )
