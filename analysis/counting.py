"""The kernel that counts: NumPy over blocks of a dump, one arm and one seed at a time.

Most tokens lie inside the region, so a block is judged in two steps: D before the update for
every token, then decisions and D after it only for those outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import READINGS, batch_tokens, check_batch, part_batches
from deltad.masks import Tokens

if TYPE_CHECKING:
    from deltad.dumps import Batch, Dump, Metadata

    from .question import Question, Resolved

Progress = Callable[[int], None]
"""Called with the number of rows just read."""

BATCH_ROWS: Final = 4_096
"""Rows judged at once: a top-20 block of float64 (0.7 MB) stays in a core's cache, which makes
counting a third faster than blocks of 16,384 rows do."""

VALUE_COLUMNS: Final = (
    "token_id",
    "advantage",
    "behavior_logprob",
    "pre_logprob",
    "post_logprob",
    "topk_ids",
    "topk_behavior_logprobs",
    "topk_pre_logprobs",
    "topk_post_logprobs",
)
"""What D before and after the update and every criterion's common part are made of."""

_POST: Final = frozenset(READINGS["post"])


class Decider(Protocol):
    """What decides which tokens keep their gradient: a criterion, for one."""

    @property
    def name(self) -> str:
        """As options name it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Optional columns of a dump that it needs."""

    def keep(self, tokens: Tokens, *, threshold: float, divergence: str) -> Any:
        """True where the gradient passes, shape (token,)."""


@dataclass(frozen=True, eq=False)
class Outside:
    """The tokens of a block that lie outside a region.

    Attributes
    ----------
    batch : Batch
        Their rows.
    tokens : Tokens
        What criteria see of them before the update.
    d_pre, delta_d : ndarray of float64, shape (token,)
        D before the update, and ΔD: nats for KL, a probability for TV. ΔD is NaN where the
        policy after the update was not read.
    """

    batch: Batch
    tokens: Tokens
    d_pre: NDArray[np.float64]
    delta_d: NDArray[np.float64]


Judged = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""ΔD of some tokens outside, shape (token,), and decisions about them, (criterion, token)."""


@dataclass(frozen=True, eq=False)
class ArmCounts:
    """What one seed of one arm holds about a pair of criteria.

    Attributes
    ----------
    tokens : int
        Σ `rows_seen` over the seed's files, stored or not.
    without_vectors : int
        Rows stored without top-K vectors; their D is unknown and they are never outside.
    outside, outside_increase : int
        Tokens with D > δ before the update; of these, those with ΔD > 0.
    disagreement_deltas : ndarray of float64, shape (token,)
        ΔD in nats (KL) of the tokens outside that exactly one of the two criteria masks.
    kept_by_criterion : ndarray of bool, shape (token,)
        Of those, the ones that the criterion keeps; the baseline keeps all others.
    """

    tokens: int
    without_vectors: int
    outside: int
    outside_increase: int
    disagreement_deltas: NDArray[np.float64]
    kept_by_criterion: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Decided:
    """The tokens outside in one seed of one arm, decided by any number of criteria.

    Attributes
    ----------
    tokens : int
        Σ `rows_seen` over the seed's files, stored or not.
    without_vectors : int
        Rows stored without top-K vectors; their D is unknown and they are never outside.
    delta_d : ndarray of float64, shape (token,)
        ΔD of the tokens outside: nats for KL, a probability for TV.
    keep : ndarray of bool, shape (criterion, token)
        True where a criterion lets the gradient pass.
    """

    tokens: int
    without_vectors: int
    delta_d: NDArray[np.float64]
    keep: NDArray[np.bool_]

    @classmethod
    def of(
        cls, tokens: int, without_vectors: int, blocks: Sequence[Judged], criteria: int
    ) -> Decided:
        """Join blocks of ΔD and decisions."""
        return cls(
            tokens,
            without_vectors,
            np.concatenate([np.empty(0), *(delta_d for delta_d, _ in blocks)]),
            np.concatenate(
                [np.empty((criteria, 0), dtype=np.bool_), *(keep for _, keep in blocks)], axis=1
            ),
        )

    def pair(
        self, criterion: int, baseline: int, rows: NDArray[np.bool_] | slice = slice(None)
    ) -> ArmCounts:
        """What some of the tokens say about two of the criteria, given by their places."""
        delta_d = self.delta_d[rows]
        ours, theirs = self.keep[criterion][rows], self.keep[baseline][rows]
        disagree = ours != theirs
        return ArmCounts(
            tokens=self.tokens,
            without_vectors=self.without_vectors,
            outside=len(delta_d),
            outside_increase=int(np.count_nonzero(delta_d > 0)),
            disagreement_deltas=delta_d[disagree],
            kept_by_criterion=ours[disagree],
        )

    def foretold(self, criterion: int) -> NDArray[np.bool_]:
        """Where a criterion foretold the sign: kept and ΔD ≤ 0, or masked and ΔD > 0."""
        return np.asarray(self.keep[criterion] == (self.delta_d <= 0))


def count_arm(
    dump: Dump, arm: str, seed: int, resolved: Resolved, *, progress: Progress | None = None
) -> ArmCounts:
    """Count one seed of one arm, checking every row that is read.

    Parameters
    ----------
    dump : Dump
        An open dump.
    arm : str
        Whose post columns give ΔD.
    seed : int
        Which repetition.
    resolved : Resolved
        Region and criteria; its arms are not looked at.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    ArmCounts
        All counts 0 for a seed with nothing stored.

    Raises
    ------
    DumpError
        A row holds an impossible value; names file, row and column.
    """
    pair = (resolved.criterion, resolved.baseline)
    without_vectors = 0
    blocks: list[Judged] = []
    for batch, metadata in checked_batches(dump, arm, seed, columns_for(*pair), progress=progress):
        without_vectors += int(np.count_nonzero(~batch.vectors))
        found = outside_of(batch, metadata, resolved.question)
        if found is not None:
            blocks.append((found.delta_d, decisions(found.tokens, resolved.question, pair)))
    return Decided.of(dump.rows_seen(arm, seed), without_vectors, blocks, 2).pair(0, 1)


def checked_batches(
    dump: Dump,
    arm: str,
    seed: int,
    columns: Collection[str],
    *,
    progress: Progress | None = None,
) -> Iterator[tuple[Batch, Metadata]]:
    """Stream the rows of one seed of one arm, every value checked, with their file's metadata.

    Parameters
    ----------
    dump, arm, seed
        Which rows.
    columns : collection of str
        What to read.
    progress : callable, optional
        Told the number of rows of every block, once it was used.

    Yields
    ------
    Batch, Metadata
        At least a row.

    Raises
    ------
    DumpError
        A row holds an impossible value; names file, row and column.
    """
    for part in dump.files(arm, seed):
        for batch in part_batches(part, columns=columns, batch_rows=BATCH_ROWS):
            check_batch(batch, part.metadata, columns)
            yield batch, part.metadata
            if progress is not None:
                progress(len(batch))


def columns_for(*criteria: Decider, post: bool = True) -> list[str]:
    """Columns of a dump that ΔD and these criteria are computed from.

    Parameters
    ----------
    *criteria : Decider
        What will decide.
    post : bool
        Whether the policy after the update was read; without it there is no ΔD.

    Returns
    -------
    list of str
        In no particular order.
    """
    optional = dict.fromkeys(column for each in criteria for column in each.columns)
    return [*(name for name in VALUE_COLUMNS if post or name not in _POST), *optional]


def select(batch: Batch, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Batch:
    """Some rows of a checked block."""
    return replace(
        batch,
        columns={name: values[rows] for name, values in batch.columns.items()},
        vectors=batch.vectors[rows],
        nulls={},  # a checked block has none
    )


def outside_of(
    batch: Batch, metadata: Metadata, region: Question, *, tokens: Tokens | None = None
) -> Outside | None:
    """Find the tokens of a block outside the region, and what the update did to them.

    Parameters
    ----------
    batch : Batch
        Checked rows with `columns_for()`, and with what criteria need besides.
    metadata : Metadata
        Of their file.
    region : Question
        Its threshold and divergence.
    tokens : Tokens, optional
        `batch_tokens` of the block, where they are there already.

    Returns
    -------
    Outside or None
        None where no token with vectors has D > δ.
    """
    known = np.flatnonzero(batch.vectors)
    if not len(known):
        return None
    d_pre = (tokens or batch_tokens(batch, metadata)).divergence(region.divergence)
    is_outside = d_pre > region.threshold
    if not is_outside.any():
        return None
    block = select(batch, known[is_outside])
    d_pre = d_pre[is_outside]
    d_post = np.full(len(d_pre), np.nan)
    if "post_logprob" in block.columns:
        d_post = batch_tokens(block, metadata, post=True).divergence(region.divergence)
    return Outside(block, batch_tokens(block, metadata), d_pre, d_post - d_pre)


def decisions(tokens: Tokens, region: Question, deciders: Sequence[Decider]) -> NDArray[np.bool_]:
    """Every decider's keep of some tokens, shape (criterion, token)."""
    return np.stack(
        [
            each.keep(tokens, threshold=region.threshold, divergence=region.divergence)
            for each in deciders
        ]
    )
