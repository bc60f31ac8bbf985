"""Which values a dump may hold: rules a column, vectorised, that name the row they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

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


def _interval(batch: Batch, name: str, low: float, high: float, expected: str) -> Iterator[Finding]:
    """Values that are not in [low, high]; NULL is judged apart, any other NaN is in no interval."""
    values = batch[name]
    if not len(values) or (low <= values.min() and values.max() <= high):
        return
    bad = ~((values >= low) & (values <= high))
    absent = np.isnan(values) if COLUMNS[name].nullable else batch.nulls.get(name)
    if absent is not None:
        bad &= ~absent
    yield from find(name, "range", bad, lambda row: f"{expected}, found {values[row]:.6g}")


def _any(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Any value."""
    yield from ()


def _index(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Counted from 0."""
    yield from _interval(batch, name, 0, 2**31 - 1, "must be counted from 0")


def _id(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Ids of the vocabulary."""
    high = metadata.vocab_size - 1
    yield from _interval(batch, name, 0, high, f"must be an id in [0, {high}]")


def _finite(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Any finite number; NaN stands for the NULL of a column that may have it."""
    largest = float(np.finfo(batch[name].dtype).max)
    yield from _interval(batch, name, -largest, largest, "must be finite")


def _logprob(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Log-prob of a token that was sampled."""
    tolerance, least = metadata.logprob_tolerance, -float(np.finfo(np.float32).max)
    what = f"must be a finite log-prob of at most 0 (rounding up to {tolerance:g} counts as 0)"
    yield from _interval(batch, name, least, tolerance, what)


def _bounded(low: float, high: Callable[[Metadata], float], what: str) -> Callable[..., Any]:
    """Make a rule for numbers in [low, high], with room for rounding."""

    def rule(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
        room, top = metadata.logprob_tolerance, high(metadata)
        most = top + room * max(1.0, abs(top)) if np.isfinite(top) else float(np.finfo("f8").max)
        said = f"must be {what} in [{low:g}, {top:.6g}]"
        yield from _interval(batch, name, low - room, most, said)

    return rule


def _noise(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """A bound on an error."""
    largest = float(np.finfo(np.float64).max)
    yield from _interval(batch, name, 0, largest, "must be a finite bound of at least 0")


def _weight(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Inverse of a probability."""
    largest = float(np.finfo(np.float32).max)
    what = "must be finite and at least 1, the inverse of a probability"
    yield from _interval(batch, name, 1, largest, what)


def _rank(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """Place in a list of K, or none."""
    high = metadata.top_k - 1
    what = f"must be a place in [0, {high}], -1 (not listed) or -2 (no lists)"
    yield from _interval(batch, name, -2, high, what)


def _derived_divergence(batch: Batch, metadata: Metadata, name: str) -> Iterator[Finding]:
    """D of the divergence that the metadata names."""
    family = metadata.derived_divergence
    if family is not None:
        yield from _RULES[f"divergence_{family}"](batch, metadata, name)


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
    "derived_divergence": _derived_divergence,
    "noise": _noise,
    "rank": _rank,
    "weight": _weight,
}
