"""Counting from derived columns: D and Ḋ as the recorder wrote them, and no vector read.

`deltad.dumps.derive` fills these columns by the functions that are called here for vectors, so
the counts are the same. A file is counted so where its columns follow this version's definitions
and the region's divergence, and where nothing that decides needs more than they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from deltad._array import Array
from deltad.direction import TAILS, Direction
from deltad.dumps import DumpError, check_batch, part_batches
from deltad.masks import Criterion, Tokens

from .blocks import Block, where_recorded
from .counting import Decider, Outside, select

if TYPE_CHECKING:
    from deltad.dumps import Batch, PartFile

    from .engine import Span
    from .question import Question

BATCH_ROWS: Final = 131_072
"""Rows decoded at once; there are some forty bytes in each."""

_BEFORE: Final = "d_pre"
_AFTER: Final = "d_post"
_COMMON: Final = ("advantage", "behavior_logprob", "pre_logprob", _BEFORE)
_BINARY: Final = "binary-"


@dataclass(frozen=True)
class RecordedTokens(Tokens):
    """What criteria look at, D and Ḋ being known and the vectors not.

    Attributes
    ----------
    region_divergence : str
        Which D and Ḋ are known.
    d : Array, shape (token,)
        D before the step.
    d_dot : mapping of str to Array of shape (token,)
        Ḋ by its tail.
    """

    region_divergence: str = ""
    d: Array = None
    d_dot: Mapping[str, Array] = field(default_factory=dict)

    def divergence(self, name: str) -> Array:
        """D on the top-K support, shape (token,)."""
        return self.d if name == self.region_divergence else super().divergence(name)

    def direction(self, name: str, tail: str) -> Direction:
        """Ḋ on the top-K support; its two terms are not told apart, and all is in the first."""
        if name != self.region_divergence or tail not in self.d_dot:
            return super().direction(name, tail)
        d_dot = self.d_dot[tail]
        return Direction(local=d_dot, global_=np.zeros_like(d_dot))


def recorded_columns(
    part: PartFile, region: Question, deciders: Iterable[Decider], *, post: bool = True
) -> list[str] | None:
    """Columns by which a file can be counted without its vectors.

    Parameters
    ----------
    part : PartFile
        The file.
    region : Question
        Its divergence.
    deciders : iterable of Decider
        Criteria or weights.
    post : bool
        Whether ΔD is wanted.

    Returns
    -------
    list of str or None
        None where vectors are needed.
    """
    if part.metadata.derived_divergence != region.divergence:
        return None
    names = dict.fromkeys([*_COMMON, *([_AFTER] if post else [])])
    for each in deciders:
        if each.name.startswith(_BINARY):  # by the entry in the top-K, not by the scalar
            return None
        tail = each.name.rpartition("-")[2]
        if isinstance(each, Criterion) and each.family is not None and tail in TAILS:
            names[f"d_dot_{tail}"] = None
        else:
            names |= dict.fromkeys(each.columns)
    return list(names) if set(names) <= set(part.columns) else None


def recorded_blocks(span: Span, region: Question, columns: Collection[str]) -> Iterator[Block]:
    """Stream the tokens outside of a span by their recorded D.

    Parameters
    ----------
    span : Span
        Row groups of a file.
    region : Question
        Its threshold and divergence.
    columns : collection of str
        `recorded_columns`, and whatever else is wanted of the tokens outside.

    Yields
    ------
    Block
        In the file's order.

    Raises
    ------
    DumpError
        A row holds an impossible value, or lacks one that it must have outside; names file, row
        and column.
    """
    for _, block in recorded_batches(span, region, columns):
        yield block


def recorded_batches(
    span: Span, region: Question, columns: Collection[str]
) -> Iterator[tuple[Batch, Block]]:
    """The same with all rows beside those outside."""
    names = where_recorded(span, columns)
    for batch in part_batches(span.part, columns=names, batch_rows=BATCH_ROWS, groups=span.groups):
        check_batch(batch, span.part.metadata, names)
        d_pre = batch[_BEFORE]
        places = np.flatnonzero(d_pre > region.threshold)
        found = _outside(batch, places, region) if len(places) else None
        yield batch, Block(found, int(np.count_nonzero(np.isnan(d_pre))))


def recorded_tokens(batch: Batch, region: Question) -> RecordedTokens:
    """What criteria see of rows whose D is known.

    Parameters
    ----------
    batch : Batch
        Checked rows with `recorded_columns`.
    region : Question
        Its divergence.

    Returns
    -------
    RecordedTokens
        In float64 of the stored values.
    """
    name = region.divergence
    full = (f"full_{name}_pre", f"full_{name}_direction")
    whole = {name: (batch[full[0]], batch[full[1]])} if set(full) <= batch.columns.keys() else {}
    return RecordedTokens(
        batch["advantage"].astype(np.float64),
        batch["behavior_logprob"].astype(np.float64),
        batch["pre_logprob"].astype(np.float64),
        full=whole,
        region_divergence=name,
        d=batch[_BEFORE],
        d_dot={tail: batch[f"d_dot_{tail}"] for tail in TAILS if f"d_dot_{tail}" in batch.columns},
    )


def _outside(batch: Batch, places: NDArray[np.intp], region: Question) -> Outside:
    """Some rows as tokens outside."""
    block = select(batch, places)
    for name in block.columns:
        if name in (_AFTER, *(f"d_dot_{tail}" for tail in TAILS)):
            missing = np.flatnonzero(np.isnan(block[name]))
            if len(missing):
                raise DumpError(
                    batch.path,
                    f"must be there where `{_BEFORE}` is above {region.threshold:g}, found NULL",
                    row=batch.first_row + int(places[missing[0]]),
                    column=name,
                )
    d_pre = block[_BEFORE]
    d_post = block[_AFTER] if _AFTER in block.columns else np.full(len(d_pre), np.nan)
    return Outside(block, recorded_tokens(block, region), d_pre, d_post - d_pre)
