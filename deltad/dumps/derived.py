"""Derived columns: what analysis computes from a row's vectors, written once at record time.

They are made as analysis makes them, of the float32 values that are stored, so that a row's
derived values and those computed anew from its vectors are the same to the bit.
The last bits of exponential and logarithm differ between processors and between versions of
NumPy; `arithmetic` tells which are at work, and files say with which they were written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.support import Support

from .batch import Batch
from .columns import COLUMNS, derived_names
from .kernel import kl_values
from .metadata import Metadata
from .rules import DERIVED_VERSION
from .tokens import batch_support

BLOCK: Final = 1_024
"""Rows computed at once, so that their float64 lists stay in a core's cache; fewer where K > 64."""

NO_LISTS: Final = -2
"""`sampled_rank` of a row whose lists were never there."""

_TAILS: Final = {
    "d_dot_aggregated": "aggregated",
    "d_dot_uniform": "uniform",
    "d_dot_exact": "exact",
}


def derive(batch: Batch, metadata: Metadata, *, divergence: str = "kl") -> dict[str, NDArray[Any]]:
    """Compute the derived columns of rows.

    Parameters
    ----------
    batch : Batch
        Checked rows with `token_columns()`, and with those after the step and `pre_collision`
        where these are to enter.
    metadata : Metadata
        Of their file.
    divergence : {"kl", "tv"}
        Of which D and Ḋ.

    Returns
    -------
    dict of str to array
        `derived_names` of the batch, each of shape (token,): float64 in nats (a probability for
        TV), NaN in rows without vectors; `sampled_rank` of int16.

    Notes
    -----
    D is and Ḋ are `deltad.divergence`'s on the support that `batch_tokens`
    makes; a row's values do not depend on the rows beside it.
    """
    names = derived_names(batch.columns.keys())
    found: dict[str, NDArray[Any]] = {
        name: np.full(len(batch), np.nan if COLUMNS[name].dtype.kind == "f" else NO_LISTS).astype(
            COLUMNS[name].dtype
        )
        for name in names
    }
    if not names:
        return found
    for rows, block in _blocks(batch):
        if divergence == "kl":
            values = kl_values(block, metadata.vocab_size)
        else:
            values = reference_values(block, metadata, divergence=divergence)
        for name in names:
            found[name][rows] = values[name]
    return found


def derived_metadata(divergence: str) -> dict[str, Any]:
    """What the metadata's `derived` says of columns that `derive` fills here and now.

    Parameters
    ----------
    divergence : {"kl", "tv"}
        As given to `derive`.
    """
    return {"version": DERIVED_VERSION, "divergence": divergence, "arithmetic": arithmetic()}


@cache
def arithmetic() -> str:
    """Fingerprint of this machine's exponential, logarithm and sum, as NumPy has them.

    Returns
    -------
    str
        Eight hexadecimal digits; the same wherever `derive` gives the same bits.
    """
    steps = np.arange(1, 2_101, dtype=np.float64)
    tables = [np.exp(-steps / 97), np.log(steps / 2_111), np.log(np.exp(-steps / 71))]
    tables += [
        np.exp(-steps / 53)[: width * 16].reshape(16, width).sum(axis=-1)
        for width in (2, 5, 21, 129)
    ]
    return f"{zlib.crc32(b''.join(table.astype('<f8').tobytes() for table in tables)):08x}"


def rounded_down(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to the next float32 below or at each value, in float64.

    A row without vectors keeps its D so: a third of the bytes, and never across a threshold
    that the row lies below.

    Parameters
    ----------
    values : array of float64, shape (token,)
        NaN stays.
    """
    with np.errstate(over="ignore", under="ignore"):
        nearest = values.astype(np.float32)
    above = nearest > values
    nearest[above] = np.nextafter(nearest[above], np.float32(-np.inf))
    return nearest.astype(np.float64)


def _blocks(batch: Batch) -> Iterator[tuple[NDArray[np.intp] | slice, Batch]]:
    """Blocks of the rows that have vectors, with where they come from."""
    known = None if batch.vectors.all() else np.flatnonzero(batch.vectors)
    count = len(batch) if known is None else len(known)
    size = max(1, min(BLOCK, 64 * BLOCK // batch["topk_ids"].shape[1]))
    for start in range(0, count, size):
        rows: Any = slice(start, min(start + size, count))
        if known is not None:
            rows = known[rows]
        columns = {name: values[rows] for name, values in batch.columns.items()}
        yield rows, Batch(batch.path, batch.first_row, columns, batch.vectors[rows])


def reference_values(
    block: Batch, metadata: Metadata, *, divergence: str = "kl"
) -> dict[str, NDArray[Any]]:
    """Compute derived columns of rows with vectors, by the functions that define them.

    Parameters
    ----------
    block : Batch
        Checked rows that all have vectors.
    metadata, divergence
        As `derive`.

    Returns
    -------
    dict of str to array
        `derived_names` of the block, each of shape (token,).
    """
    names = derived_names(block.columns.keys())
    before = batch_support(block, metadata)
    found: dict[str, NDArray[Any]] = {"d_pre": DIVERGENCES[divergence].value(before)}
    if "d_post" in names:
        found["d_post"] = DIVERGENCES[divergence].value(_after(block, before))
    for name, tail in _TAILS.items():
        if name in names:
            collision = block["pre_collision"].astype(np.float64) if tail == "exact" else None
            direction = DIVERGENCES[divergence].direction(before, tail=tail, collision=collision)
            found[name] = direction.total
            found["d_dot_local"] = direction.local
    sampled = before.sampled
    rank = sampled.argmax(axis=-1).astype(np.int16)
    found["sampled_rank"] = np.where(rank == sampled.shape[-1] - 1, np.int16(-1), rank)
    return found


def _after(block: Batch, before: Support) -> Support:
    """The policy after the step on the same support; `batch_support` gives the same bits."""
    return before.with_policy(
        block["topk_post_logprobs"].astype(np.float64),
        block["post_logprob"].astype(np.float64),
        check=False,
    )
