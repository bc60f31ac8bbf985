"""Which values a dump may hold: rules a column, vectorised, that name the row they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .batch import Batch
from .columns import COLUMNS
from .errors import DumpError
from .finding import Finding, find
from .lists import ids, logprobs, logprobs_or_zero
from .metadata import Metadata


def check_batch(batch: Batch, metadata: Metadata, columns: Iterable[str] | None = None) -> None:
    """Refuse values that the contract does not allow.

    Parameters
    ----------
    batch : Batch
        Rows of one file.
    metadata : Metadata
        Of that file.
    columns : iterable of str, optional
        The columns to look at, by default all of the batch.

    Raises
    ------
    DumpError
        Names the first offending row, its column, what was expected and what was found.
    """
    worst: Finding | None = None
    for finding in findings(batch, metadata, columns):
        if worst is None or finding.rows[0] < worst.rows[0]:
            worst = finding
    if worst is not None:
        row = int(worst.rows[0])
        raise DumpError(
            batch.path,
            worst.describe(row),
            row=batch.first_row + row,
            column=worst.column,
            kind=worst.kind,
        )


def findings(
    batch: Batch, metadata: Metadata, columns: Iterable[str] | None = None
) -> Iterator[Finding]:
    """Find the rules that are broken.

    Parameters
    ----------
    batch, metadata, columns
        As `check_batch`.

    Yields
    ------
    Finding
        One a column and rule that is broken anywhere in the batch.
    """
    wanted = [name for name in (batch.columns if columns is None else columns) if name in COLUMNS]
    with np.errstate(invalid="ignore", over="ignore"):
        for name in wanted:
            if name in batch.nulls:
                yield Finding(name, "null", np.flatnonzero(batch.nulls[name]), _null(name))
            yield from _RULES[COLUMNS[name].rule](batch, metadata, name)


def _null(name: str) -> Callable[[int], str]:
    """What is said of NULL."""
    if COLUMNS[name].is_vector:
        return lambda row: "must be NULL in all vector columns or in none, and hold no NULL"
    return lambda row: "must not be NULL"


def _interval(
    name: str,
    values: NDArray[Any],
    skip: NDArray[np.bool_] | None,
    low: float,
    high: float,
    expected: str,
) -> Iterator[Finding]:
    """Values that are not in [low, high]; NaN is in no interval."""
    if not len(values) or (low <= values.min() and values.max() <= high):
        return
    bad = ~((values >= low) & (values <= high))
    if skip is not None:
        bad &= ~skip
    yield from find(name, "range", bad, lambda row: f"{expected}, found {values[row]:.6g}")


def _any(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Any value."""
    yield from ()


def _index(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Counted from 0."""
    values = batch[name]
    yield from _interval(name, values, None, 0, 2**31 - 1, "must be counted from 0")


def _id(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Ids of the vocabulary."""
    high = metadata.vocab_size - 1
    yield from _interval(
        name, batch[name], batch.nulls.get(name), 0, high, f"must be an id in [0, {high}]"
    )


def _finite(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Any finite number; NaN stands for the NULL of a column that may have it."""
    values, skip = batch[name], batch.nulls.get(name)
    largest = float(np.finfo(values.dtype).max)
    if COLUMNS[name].nullable:
        skip = np.isnan(values)
    yield from _interval(name, values, skip, -largest, largest, "must be finite")


def _logprob(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Log-prob of a token that was sampled."""
    tolerance = metadata.logprob_tolerance
    yield from _interval(
        name,
        batch[name],
        batch.nulls.get(name),
        -float(np.finfo(np.float32).max),
        tolerance,
        f"must be a finite log-prob of at most 0 (rounding up to {tolerance:g} counts as 0)",
    )


def _bounded(low: float, high: Callable[[Metadata], float], what: str) -> Callable[..., Any]:
    """Make a rule for numbers in [low, high], with room for rounding."""

    def rule(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
        room = metadata.logprob_tolerance
        top = high(metadata)
        yield from _interval(
            name,
            batch[name],
            batch.nulls.get(name),
            low - room,
            top + room * max(1.0, abs(top)) if np.isfinite(top) else float(np.finfo("f8").max),
            f"must be {what} in [{low:g}, {top:.6g}]",
        )

    return rule


_RULES: Final[dict[str, Callable[[Batch, Metadata, str], Iterator[Finding]]]] = {
    "any": _any,
    "index": _index,
    "id": _id,
    "finite": _finite,
    "logprob": _logprob,
    "ids": ids,
    "logprobs": logprobs,
    "logprobs_or_zero": logprobs_or_zero,
    "collision": _bounded(0.0, lambda metadata: 1.0, "a collision"),
    "entropy": _bounded(0.0, lambda metadata: float(np.log(metadata.vocab_size)), "an entropy"),
    "divergence_kl": _bounded(0.0, lambda metadata: np.inf, "a divergence"),
    "divergence_tv": _bounded(0.0, lambda metadata: 1.0, "a divergence"),
}
