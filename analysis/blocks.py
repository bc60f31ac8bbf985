"""The tokens outside a region, streamed from a span of a dump.

`outside_blocks` is what counts: whole batches are decoded, a first look in float32 picks the
tokens that may lie outside, and only these are judged. `plain_blocks` is the same without the
first look, everything checked and computed in float64: the reference that the fast one must
equal to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from deltad.dumps import check_batch, findings, part_batches

from .counting import WHERE_RECORDED, Outside, outside_of, select
from .screening import BLOCK_ROWS, SEEN, Screen

if TYPE_CHECKING:
    from deltad.dumps import Batch, Metadata

    from .engine import Span
    from .question import Question

BATCH_ROWS: Final = 4 * BLOCK_ROWS
"""Rows decoded at once: few enough that what they need is allocated once and used again."""


@dataclass(frozen=True, eq=False)
class Block:
    """What some rows of a file hold.

    Attributes
    ----------
    found : Outside or None
        Those outside the region, in the file's order; None without any.
    unknown : int
        Rows whose D is unknown, since they have no vectors.
    """

    found: Outside | None
    unknown: int


def outside_blocks(span: Span, region: Question, columns: Collection[str]) -> Iterator[Block]:
    """Stream the tokens outside of a span, every value that is read being checked.

    Parameters
    ----------
    span : Span
        Row groups of a file.
    region : Question
        Its threshold and divergence.
    columns : collection of str
        `columns_for` what decides, and whatever else is wanted of the tokens outside.

    Yields
    ------
    Block
        In the file's order.

    Raises
    ------
    DumpError
        A row holds an impossible value; names file, row and column.
    """
    metadata = span.part.metadata
    screen = Screen(metadata, region)
    names = where_recorded(span, columns)
    others = [name for name in names if name not in SEEN]
    picked: list[Batch] = []
    for batch in part_batches(span.part, columns=names, batch_rows=BATCH_ROWS, groups=span.groups):
        sound = not batch.nulls and not any(findings(batch, metadata, others))
        for start in range(0, len(batch), BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, len(batch)))
            places = screen.candidates(batch, rows) if sound else None
            if places is not None:
                picked.append(select(batch, places))
            if places is None or sum(map(len, picked)) >= BLOCK_ROWS:
                yield _judged(picked, metadata, region)
                picked = []
            if places is None:
                block = _cut(batch, rows)
                check_batch(block, metadata, names)
                yield Block(outside_of(block, metadata, region), 0)
        yield Block(None, unknown_rows(batch, metadata))
    yield _judged(picked, metadata, region)


def plain_blocks(span: Span, region: Question, columns: Collection[str]) -> Iterator[Block]:
    """The same in the plainest way; parameters, yields and raises as `outside_blocks`."""
    metadata = span.part.metadata
    names = where_recorded(span, columns)
    for batch in part_batches(span.part, columns=names, batch_rows=BLOCK_ROWS, groups=span.groups):
        check_batch(batch, metadata, names)
        yield Block(outside_of(batch, metadata, region), unknown_rows(batch, metadata))


def where_recorded(span: Span, columns: Collection[str]) -> list[str]:
    """The columns, with the bound of ΔD's error and the weight where the file has them."""
    along = [name for name in WHERE_RECORDED if name in span.part.columns]
    return list(dict.fromkeys([*columns, *along]))


def unknown_rows(batch: Batch, metadata: Metadata) -> int:
    """Rows whose D is unknown; where a rule left vectors out near 0, D is known to be there."""
    if metadata.near is not None:
        return 0
    return len(batch) - int(np.count_nonzero(batch.vectors))


def _judged(picked: list[Batch], metadata: Metadata, region: Question) -> Block:
    """Those of the picked rows that are outside."""
    if not picked:
        return Block(None, 0)
    rows = replace(
        picked[0],
        columns={
            name: np.concatenate([each[name] for each in picked]) for name in picked[0].columns
        },
        vectors=np.concatenate([each.vectors for each in picked]),
    )
    return Block(outside_of(rows, metadata, region), 0)


def _cut(batch: Batch, rows: slice) -> Batch:
    """Consecutive rows of an unchecked batch."""
    return replace(
        batch,
        first_row=batch.first_row + rows.start,
        columns={name: values[rows] for name, values in batch.columns.items()},
        vectors=batch.vectors[rows],
        nulls={name: absent[rows] for name, absent in batch.nulls.items() if absent[rows].any()},
    )
