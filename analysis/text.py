"""Tables for a person at a terminal, as renderables.

A rate never stands alone: beside it are its interval, its counts, the base rate with the
constant guess, and what the paper reports where its pair of criteria is asked for.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from . import paper, statistics
from .grid import Grid, Line, Stack, plain_text
from .question import OWN
from .rates import BaseRate, RateTable
from .tables import ProtocolTable
from .words import DASH, count, number, p_value, title, with_interval

if TYPE_CHECKING:
    from rich.console import RenderableType


def rate_text(table: RateTable, *, per_seed: bool = False) -> RenderableType:
    """A rate table to read: both criteria, the paired comparison, base rates.

    Parameters
    ----------
    table : RateTable
        Counts by seed.
    per_seed : bool
        Add a row a seed.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    parts: list[Line | Grid | Stack] = [
        Line(f"{title(table.question)} · {table.question.protocol}", style="bold"),
        _criteria(table),
        _comparison(table),
        _base_rates(table),
        Line(_footer(table)),
    ]
    if per_seed:
        parts.append(_seeds(table))
    return Stack(parts)


def protocol_text(protocols: ProtocolTable) -> RenderableType:
    """A row a protocol: rates, who is lower, sign test, contracting fractions, base rate.

    Parameters
    ----------
    protocols : ProtocolTable
        At least one protocol.

    Returns
    -------
    RenderableType
        For a rich console.
    """
    first = protocols.tables[0]
    question = first.question
    grid = plain_grid(
        "protocol",
        "unsafe keep, seed mean\ncriterion / baseline",
        "seeds\nlower / tied / higher",
        "sign\ntest p",
        "contracting, pooled\ncriterion / baseline",
        "P(ΔD > 0)\noutside / disagreement",
        "a constant\nguess is right",
    )
    for table in protocols.tables:
        ours, theirs, paired = table.criterion, table.baseline, table.paired
        grid.add_row(
            table.question.protocol,
            f"{number(ours.unsafe_keep_rate)} / {number(theirs.unsafe_keep_rate)}",
            f"{paired.lower} / {paired.tied} / {paired.higher}",
            p_value(paired.sign_test_p),
            f"{number(ours.contracting_fraction)} / {number(theirs.contracting_fraction)}",
            *(
                f"{number(getattr(table.outside, share))} / "
                f"{number(getattr(table.disagreement, share))}"
                for share in ("increase_rate", "constant_guess")
            ),
        )
    if paper.compares_with_paper(question.criterion, question.baseline):
        grid.add_row(
            f"the paper ({paper.FIGURE})",
            f"{paper.PREDICTIVE_UNSAFE_KEEP_RATE.value:.3f} / "
            f"{paper.RATIO_UNSAFE_KEEP_RATE.value:.3f}",
            f"{paper.SEEDS_LOWER.value} of {paper.SEEDS.value} lower",
            "",
            f"{paper.PREDICTIVE_CONTRACTING_FRACTION.value:.3f} / "
            f"{paper.RATIO_CONTRACTING_FRACTION.value:.3f}",
            style="dim",
        )
    size = (
        f"{count(len(first.seeds), 'seed')}, a seed: {first.per_seed('tokens'):.0f} tokens, "
        f"{first.per_seed('outside'):.1f} outside, {first.per_seed('disagreement'):.1f} in "
        "disagreement"
    )
    refused = [Line(f"{name}: {reason}") for name, reason in protocols.refused.items()]
    return Stack([Line(title(question), style="bold"), Line(size), grid, *refused])


def plain_grid(*headers: str) -> Grid:
    """An unboxed table: the first column to the left, the others to the right, never folded."""
    return Grid(headers)


def _criteria(table: RateTable) -> Grid:
    """Both criteria with intervals and counts, and the paper's numbers where they compare."""
    question = table.question
    reported = paper.compares_with_paper(question.criterion, question.baseline)
    grid = plain_grid(
        "of the kept disagreement tokens",
        question.criterion,
        question.baseline,
        *([f"paper ({paper.FIGURE})"] if reported else []),
    )

    def row(label: str, *cells: str, beside: str = "") -> None:
        grid.add_row(label, *cells, *([beside] if reported else []))

    sides = (table.criterion, table.baseline)
    row(
        "unsafe-keep rate, mean over seeds",
        *(with_interval(side.unsafe_keep_rate, side.unsafe_keep_rate_ci95) for side in sides),
        beside=f"{paper.PREDICTIVE_UNSAFE_KEEP_RATE.value:.3f} / "
        f"{paper.RATIO_UNSAFE_KEEP_RATE.value:.3f}",
    )
    row("  seeds with a rate", *(f"{side.seeds} of {len(table.seeds)}" for side in sides))
    row("  unsafe / kept, all seeds", *(f"{side.unsafe} / {side.determined}" for side in sides))
    row(
        "contracting fraction, pooled",
        *(
            with_interval(side.contracting_fraction, side.contracting_fraction_ci95)
            for side in sides
        ),
        beside=f"{paper.PREDICTIVE_CONTRACTING_FRACTION.value:.3f} / "
        f"{paper.RATIO_CONTRACTING_FRACTION.value:.3f}",
    )
    row(
        "  contracting / kept, all seeds",
        *(f"{side.contracting} / {side.determined}" for side in sides),
    )
    if table.bounded:
        row("undetermined, in neither", *(f"{side.undetermined} of {side.kept}" for side in sides))
    if question.protocol != OWN:
        row(
            "sign of ΔD foretold, all disagreement tokens",
            *(number(table.sign_accuracy(side)) for side in ("criterion", "baseline")),
        )
        guess = number(table.disagreement.constant_guess)
        row("  a constant guess", guess, guess)
    return grid


def _comparison(table: RateTable) -> Grid:
    """The paired comparison, a line a fact."""
    question, paired = table.question, table.paired
    grid = Grid()
    lower = f"{paired.lower} / {paired.tied} / {paired.higher} of {paired.seeds} seeds"
    if paper.compares_with_paper(question.criterion, question.baseline):
        lower += f" (paper: {paper.SEEDS_LOWER.value} of {paper.SEEDS.value} lower)"
    grid.add_row("criterion lower / tied / higher", lower)
    grid.add_row(
        "criterion − baseline, mean over these",
        with_interval(paired.difference, paired.difference_ci95, signed=True),
    )
    grid.add_row(
        "two-sided p",
        f"sign test {p_value(paired.sign_test_p)}, Wilcoxon {p_value(paired.wilcoxon_p)}, "
        f"permutation of the mean {p_value(paired.permutation_p)}",
    )
    for label, pooled in (
        ("unsafe keep", table.pooled_unsafe),
        ("contracting", table.pooled_contracting),
    ):
        grid.add_row(
            f"{label} pooled, criterion − baseline",
            with_interval(pooled.difference, pooled.difference_ci95, signed=True),
        )
    for name, side in ((question.criterion, table.criterion), (question.baseline, table.baseline)):
        empty = len(table.seeds) - side.seeds
        if empty:
            grid.add_row(
                f"seeds without a rate of {name}",
                f"{empty} (no disagreement token kept; no part in its mean or in the pairs)",
            )
    return grid


def _base_rates(table: RateTable) -> Grid:
    """How many tokens there are, and how often ΔD > 0 whatever a criterion says."""
    reported = paper.compares_with_paper(table.question.criterion, table.question.baseline)
    grid = plain_grid(
        "tokens",
        "all seeds",
        "a seed",
        "P(ΔD > 0)",
        "constant guess right",
        *(["undetermined"] if table.bounded else []),
        *([f"paper ({paper.FIGURE}), a seed"] if reported else []),
    )
    tokens = sum(seed.tokens for seed in table.seeds)
    rows: list[tuple[str, str, int, BaseRate | None, str]] = [
        ("all", "tokens", tokens, None, ""),
        (
            "outside",
            "outside",
            table.outside.tokens,
            table.outside,
            f"about {paper.OUTSIDE_PER_SEED.value}",
        ),
        (
            "in disagreement",
            "disagreement",
            table.disagreement.tokens,
            table.disagreement,
            f"{paper.DISAGREEMENT_PER_SEED.value}",
        ),
    ]
    for label, name, total, base, beside in rows:
        shares: tuple[str, ...] = (
            ("", "") if base is None else (_rate(base), number(base.constant_guess))
        )
        if table.bounded:
            shares += ("" if base is None or base.increase is None else str(base.undetermined),)
        each = table.per_seed(name)
        grid.add_row(
            label,
            str(total),
            DASH if math.isnan(each) else f"{each:.1f}",
            *shares,
            *([beside] if reported else []),
        )
    return grid


def _rate(base: BaseRate) -> str:
    """A base rate with its counts, or a dash where not all tokens were stored."""
    if base.increase is None:
        return DASH
    return f"{number(base.increase_rate)} ({base.increase} / {base.determined})"


def _footer(table: RateTable) -> str:
    """How intervals were made and where the paper's numbers stand."""
    paired, seed = table.paired, f"random seed {table.bootstrap_seed}"
    lines = [
        f"Intervals: 95 %, bootstrap over seeds ({statistics.METHOD}, {statistics.RESAMPLES} "
        f"resamples, {seed}); of pooled differences {statistics.CLUSTER_METHOD}."
    ]
    if not math.isnan(paired.permutation_p):
        tried = (
            f"all {paired.permutation_flips}"
            if paired.permutation_exact
            else (f"{paired.permutation_flips} random")
        )
        drawn = "" if paired.permutation_exact else f", {seed}"
        lines.append(f"Permutation test: {tried} flips of the differences' signs{drawn}.")
    lines.append(_undetermined(table))
    if table.outside.increase is None:
        lines.append("Only the disagreement tokens were stored: of those outside, their number.")
    if table.share < 1:
        lines.append(
            f"Counts are of a random {table.share:.3g} of the sequences, all that was recorded."
        )
    if table.weighted:
        lines.append("Rates weigh each token by the number of tokens that it stands for.")
    if paper.compares_with_paper(table.question.criterion, table.question.baseline):
        lines.append(f"Paper: {paper.PAPER}, predictive / ratio.")
    return "\n".join(lines)


def _undetermined(table: RateTable) -> str:
    """How many tokens have a ΔD below the bound on its error, or that none is known."""
    base = table.disagreement
    if not base.tokens:
        return "Undetermined: none, for no token is in disagreement."
    if not table.bounded:
        return "Undetermined: not known, for no bound on the error of ΔD was recorded."
    words = (
        f"Undetermined: {base.undetermined} of {count(base.tokens, 'disagreement token')} have a "
        "ΔD below the bound on its error; rates are of the others."
    )
    if table.bounded < base.tokens:
        words += f" {base.tokens - table.bounded} have no such bound."
    return words


def _seeds(table: RateTable) -> Grid:
    """A row a seed."""
    question = table.question
    grid = plain_grid(
        "seed",
        "tokens",
        "outside",
        "disagreement",
        f"unsafe / kept\n{question.criterion}",
        "rate",
        f"unsafe / kept\n{question.baseline}",
        "rate",
        "difference",
    )
    for seed in table.seeds:
        ours, theirs = seed.criterion, seed.baseline
        grid.add_row(
            str(seed.seed),
            str(seed.tokens),
            str(seed.outside),
            str(seed.disagreement),
            f"{ours.unsafe} / {ours.determined}",
            number(ours.unsafe_keep_rate),
            f"{theirs.unsafe} / {theirs.determined}",
            number(theirs.unsafe_keep_rate),
            number(ours.unsafe_keep_rate - theirs.unsafe_keep_rate, signed=True),
        )
    return grid


def as_text(renderable: RenderableType, *, coloured: bool = False) -> str:
    """Render as text, as wide as it needs to be, so that nothing is folded or cut off.

    Parameters
    ----------
    renderable : RenderableType
        What a result's `text` returns.
    coloured : bool
        With a terminal's colours.

    Returns
    -------
    str
        Lines, each ended.
    """
    if not coloured and (plain := plain_text(renderable)) is not None:
        return plain
    from rich.console import Console
    from rich.measure import Measurement

    buffer = io.StringIO()
    console = Console(
        file=buffer, width=10_000, highlight=False, markup=False, force_jupyter=False,
        force_terminal=coloured, color_system="auto",
    )  # fmt: skip
    console.width = max(80, Measurement.get(console, console.options, renderable).maximum)
    console.print(renderable)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())
