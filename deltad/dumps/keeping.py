"""Checking that a file holds what its rules say: rows, vectors, derived values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.masks import CriterionError
from deltad.support import LOGPROB_TOLERANCE

from .batch import Batch
from .content import kept_vectors, pair_decisions
from .derived import arithmetic, derive, rounded_down
from .finding import Finding, find
from .footers import PartFile
from .metadata import Metadata
from .rules import Near, Pair
from .tokens import batch_support

_OTHER_ARITHMETIC: Final = 1e-6
"""Difference that last bits of exponentials make: large only where a tail is nearly empty."""


def rule_findings(part: PartFile, batch: Batch) -> Iterator[Finding]:
    """Find rows that are not as the metadata's `stored`, `derived` and `vectors` say.

    Parameters
    ----------
    part : PartFile
        Of which the batch is.
    batch : Batch
        All columns of the file. Rows with impossible values give findings without meaning.

    Yields
    ------
    Finding
        One a rule and column.
    """
    metadata = part.metadata
    if metadata.stored_pair is not None:
        yield from _pair(batch, metadata, metadata.stored_pair)
    elif metadata.stored_above is not None:
        yield from _above(batch, metadata, *metadata.stored_above)
    if metadata.derived_divergence is not None:
        yield from _derived(batch, metadata, metadata.derived_divergence)
    if metadata.near is not None:
        yield from _near(part, batch, metadata.near)


def _above(
    batch: Batch, metadata: Metadata, divergence: str, threshold: float
) -> Iterator[Finding]:
    """Rows stored above a threshold lie there, but for rounding by whoever decided."""
    values = np.full(len(batch), np.inf)
    values[batch.vectors] = DIVERGENCES[divergence].value(batch_support(batch, metadata))
    yield from find(
        "topk_pre_logprobs",
        "stored above",
        values <= threshold - LOGPROB_TOLERANCE,
        lambda row: (
            f"`stored` says that only tokens with {divergence.upper()} > {threshold:g} are here, "
            f"found {values[row]:.6g}"
        ),
    )


def _pair(batch: Batch, metadata: Metadata, pair: Pair) -> Iterator[Finding]:
    """Rows stored for a disagreement are outside, and exactly one criterion masks them."""
    bad = ~batch.vectors
    known = _with_vectors(batch)
    with contextlib.suppress(CriterionError):  # a column is missing: said of the file's columns
        bad[batch.vectors] = ~pair_decisions(known, metadata)[1]
    yield from find(
        "topk_pre_logprobs",
        "stored disagreement",
        bad,
        lambda row: (
            f"`stored` says that only tokens with {pair.divergence.upper()} > "
            f"{pair.threshold:g} are here that exactly one of {pair.criterion} and "
            f"{pair.baseline} masks, found "
            + ("another" if batch.vectors[row] else "one without vectors")
        ),
    )


def _derived(batch: Batch, metadata: Metadata, divergence: str) -> Iterator[Finding]:
    """Derived columns are what their definitions give, to the bit where this machine can tell."""
    same = (metadata.derived or {}).get("arithmetic") == arithmetic()
    for name, expected in derive(batch, metadata, divergence=divergence).items():
        if name not in batch.columns:
            continue
        found = batch[name]
        gap = np.abs(found - expected)
        bad = batch.vectors & ~(gap <= (0.0 if same else _OTHER_ARITHMETIC))
        yield from find(name, "derived", bad, _unlike(found, expected, same=same))
        if name in ("d_pre", "d_post"):
            rest = ~batch.vectors & (found != rounded_down(found))
            if metadata.near is None:
                rest &= ~np.isnan(found)
            yield from find(name, "derived", rest, _unrounded(found))


def _unlike(found: NDArray[Any], expected: NDArray[Any], *, same: bool) -> Callable[[int], str]:
    """What is said of a derived value that is another."""
    room = "" if same else f" within {_OTHER_ARITHMETIC:g}"
    return lambda row: (
        f"must be what the row's vectors give, {expected[row]:.17g}{room}, found {found[row]:.17g}"
    )


def _unrounded(found: NDArray[Any]) -> Callable[[int], str]:
    """What is said of a divergence whose vectors are gone."""
    return lambda row: (
        f"must be a float32, rounded down, in a row without vectors, found {found[row]:.17g}"
    )


def _near(part: PartFile, batch: Batch, near: Near) -> Iterator[Finding]:
    """Vectors are there near the region and in the sample of the rest, and nowhere else."""
    if "d_pre" not in batch.columns:
        return
    d_pre = batch["d_pre"]
    wanted = kept_vectors(d_pre, batch.columns, near, part.seed)
    yield from find(
        "topk_ids",
        "vectors near",
        wanted != batch.vectors,
        lambda row: (
            f"must {'' if wanted[row] else 'not '}be there: `vectors` says that rows with "
            f"{near.divergence.upper()} of at least {near.threshold:g}, and a sample of "
            f"{near.sample:g} of the others, have vectors; D is {d_pre[row]:.6g}"
        ),
    )


def _with_vectors(batch: Batch) -> Batch:
    """The rows that have vectors."""
    if batch.vectors.all():
        return batch
    columns = {name: values[batch.vectors] for name, values in batch.columns.items()}
    return Batch(batch.path, batch.first_row, columns, batch.vectors[batch.vectors])
