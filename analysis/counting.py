"""What is counted: the tokens of a block outside a region, decisions about them, their tallies.

Most tokens lie inside the region, so a block is judged in two steps: D before the update for
every token, then decisions and D after it only for those outside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.dumps import READINGS, batch_tokens, check_batch, part_batches
from deltad.masks import Tokens

if TYPE_CHECKING:
    from deltad.dumps import Batch, Dump, Metadata

    from .engine import Progress
    from .question import Question

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

NOISE: Final = "delta_d_noise"
WEIGHT: Final = "weight"
WHERE_RECORDED: Final = (NOISE, WEIGHT)
"""Read along wherever a file has them."""

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

    @property
    def noise(self) -> NDArray[np.float64]:
        """Bound on the error of ΔD, shape (token,); NaN where none was recorded."""
        return self._column(NOISE, np.nan)

    @property
    def weight(self) -> NDArray[np.float64]:
        """Tokens that each stands for, shape (token,)."""
        return self._column(WEIGHT, 1.0)

    @property
    def undetermined(self) -> NDArray[np.bool_]:
        """Where |ΔD| is below the bound on its error, shape (token,)."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.delta_d) < self.noise)

    def _column(self, name: str, otherwise: float) -> NDArray[np.float64]:
        """An optional column in float64, or one number for all."""
        if name not in self.batch.columns:
            return np.full(len(self.delta_d), otherwise)
        return self.batch[name].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Judged:
    """Some tokens outside the region, with every decision about them.

    Attributes
    ----------
    delta_d : ndarray of float64, shape (token,)
        ΔD: nats for KL, a probability for TV.
    keep : ndarray of bool, shape (criterion, token)
        True where a criterion lets the gradient pass.
    undetermined : ndarray of bool, shape (token,)
        Where |ΔD| is below the bound on its error.
    bounded : ndarray of bool, shape (token,)
        Where that bound was recorded.
    weight : ndarray of float64, shape (token,)
        Tokens that each stands for; 1 where all sequences were recorded.
    """

    delta_d: NDArray[np.float64]
    keep: NDArray[np.bool_]
    undetermined: NDArray[np.bool_]
    bounded: NDArray[np.bool_]
    weight: NDArray[np.float64]

    @classmethod
    def of(cls, found: Outside, keep: NDArray[np.bool_]) -> Judged:
        """Put decisions beside the tokens that they are about."""
        return cls(found.delta_d, keep, found.undetermined, ~np.isnan(found.noise), found.weight)

    @classmethod
    def joined(cls, blocks: Sequence[Judged], criteria: int) -> Judged:
        """Join blocks in their order."""
        return cls(
            np.concatenate([np.empty(0), *(each.delta_d for each in blocks)]),
            np.concatenate([_none((criteria, 0)), *(each.keep for each in blocks)], axis=1),
            np.concatenate([_none(0), *(each.undetermined for each in blocks)]),
            np.concatenate([_none(0), *(each.bounded for each in blocks)]),
            np.concatenate([np.empty(0), *(each.weight for each in blocks)]),
        )

    def __getitem__(self, rows: NDArray[np.bool_] | slice) -> Judged:
        """Some of the tokens."""
        return Judged(
            self.delta_d[rows],
            self.keep[:, rows],
            self.undetermined[rows],
            self.bounded[rows],
            self.weight[rows],
        )


@dataclass(frozen=True)
class Tally:
    """Tokens by what the update did to their D.

    Attributes
    ----------
    tokens : int
        All of them.
    increase : int or None
        Those with ΔD > 0; None where it is not known of all.
    undetermined : int
        Those whose ΔD is below the bound on its error; neither increase nor decrease.
    bounded : int
        Those with such a bound.
    weights : tuple of float
        Σ weight of the tokens whose ΔD is determined, and of those of them with ΔD > 0.
    extremes : tuple of float
        Least and largest weight of all of them; ∞ and −∞ without any.
    """

    tokens: int
    increase: int | None
    undetermined: int = 0
    bounded: int = 0
    weights: tuple[float, float] = (0.0, 0.0)
    extremes: tuple[float, float] = (math.inf, -math.inf)

    @classmethod
    def of(cls, judged: Judged) -> Tally:
        """Count some tokens."""
        determined = ~judged.undetermined
        up = determined & (judged.delta_d > 0)
        return cls(
            len(up),
            int(np.count_nonzero(up)),
            int(np.count_nonzero(judged.undetermined)),
            int(np.count_nonzero(judged.bounded)),
            (float(judged.weight[determined].sum()), float(judged.weight[up].sum())),
            (float(judged.weight.min()), float(judged.weight.max()))
            if len(up)
            else (math.inf, -math.inf),
        )

    def __add__(self, other: Tally) -> Tally:
        """Count both together."""
        known = self.increase is not None and other.increase is not None
        return Tally(
            self.tokens + other.tokens,
            (self.increase or 0) + (other.increase or 0) if known else None,
            self.undetermined + other.undetermined,
            self.bounded + other.bounded,
            (self.weights[0] + other.weights[0], self.weights[1] + other.weights[1]),
            (
                min(self.extremes[0], other.extremes[0]),
                max(self.extremes[1], other.extremes[1]),
            ),
        )


@dataclass(frozen=True, eq=False)
class ArmCounts:
    """What one seed of one arm, or a span of it, holds about a pair of criteria.

    Attributes
    ----------
    tokens : int
        Σ `rows_seen` over the files, stored or not.
    without_vectors : int
        Rows whose D is unknown, since they were stored without top-K vectors; never outside.
    outside : Tally
        Tokens with D > δ before the update.
    disagreement : Judged
        The tokens outside that exactly one of the two criteria masks; `keep` is of the
        criterion alone, and the baseline keeps all others.
    """

    tokens: int
    without_vectors: int
    outside: Tally
    disagreement: Judged

    @classmethod
    def joined(cls, parts: Sequence[ArmCounts]) -> ArmCounts:
        """Add up the spans of a seed, in their order."""
        outside = Tally(0, 0)
        for part in parts:
            outside += part.outside
        return cls(
            sum(part.tokens for part in parts),
            sum(part.without_vectors for part in parts),
            outside,
            Judged.joined([part.disagreement for part in parts], 1),
        )


@dataclass(frozen=True, eq=False)
class Decided:
    """The tokens outside in one seed of one arm, decided by any number of criteria.

    Attributes
    ----------
    tokens : int
        Σ `rows_seen` over the seed's files, stored or not.
    without_vectors : int
        Rows whose D is unknown, since they were stored without top-K vectors; never outside.
    judged : Judged
        The tokens outside.
    outside : int, optional
        Their number, where only some of them were stored.
    """

    tokens: int
    without_vectors: int
    judged: Judged
    outside: int | None = None

    @classmethod
    def joined(cls, parts: Sequence[Decided], criteria: int) -> Decided:
        """Add up the spans of a seed, in their order."""
        known = [part.outside for part in parts if part.outside is not None]
        return cls(
            sum(part.tokens for part in parts),
            sum(part.without_vectors for part in parts),
            Judged.joined([part.judged for part in parts], criteria),
            sum(known) if known else None,
        )

    def pair(
        self, criterion: int, baseline: int, rows: NDArray[np.bool_] | slice = slice(None)
    ) -> ArmCounts:
        """What some of the tokens say about two of the criteria, given by their places."""
        judged = self.judged[rows]
        disagree = judged.keep[criterion] != judged.keep[baseline]
        outside = Tally.of(judged)
        if self.outside is not None:
            outside = Tally(self.outside, None, extremes=outside.extremes)
        return ArmCounts(
            self.tokens,
            self.without_vectors,
            outside,
            replace(judged[disagree], keep=judged.keep[criterion : criterion + 1, disagree]),
        )

    def foretold(self, criterion: int) -> NDArray[np.bool_]:
        """Where a criterion foretold the sign: kept and ΔD ≤ 0, or masked and ΔD > 0.

        Says nothing of tokens that are undetermined.
        """
        return np.asarray(self.judged.keep[criterion] == (self.judged.delta_d <= 0))


def _none(shape: int | tuple[int, int]) -> NDArray[np.bool_]:
    """No bools."""
    return np.empty(shape, dtype=np.bool_)


def checked_batches(
    dump: Dump,
    arm: str,
    seed: int,
    columns: Collection[str],
    *,
    along: Collection[str] = (),
    progress: Progress | None = None,
) -> Iterator[tuple[Batch, Metadata]]:
    """Stream the rows of one seed of one arm, every value checked, with their file's metadata.

    Parameters
    ----------
    dump, arm, seed
        Which rows.
    columns : collection of str
        What to read.
    along : collection of str
        What to read besides from the files that have it.
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
        names = list(dict.fromkeys([*columns, *(name for name in along if name in part.columns)]))
        for batch in part_batches(part, columns=names, batch_rows=BATCH_ROWS):
            check_batch(batch, part.metadata, names)
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
    tokens = tokens or batch_tokens(batch, metadata)
    d_pre = tokens.divergence(region.divergence)
    is_outside = d_pre > region.threshold
    if not is_outside.any():
        return None
    block, tokens = select(batch, known[is_outside]), some_tokens(tokens, is_outside)
    d_pre = d_pre[is_outside]
    d_post = np.full(len(d_pre), np.nan)
    if "post_logprob" in block.columns and tokens.support is not None:
        after = tokens.support.with_policy(
            block["topk_post_logprobs"].astype(np.float64),
            block["post_logprob"].astype(np.float64),
            check=False,  # `check_batch` has done it
        )
        d_post = DIVERGENCES[region.divergence](after)
    return Outside(block, tokens, d_pre, d_post - d_pre)


def some_tokens(tokens: Tokens, rows: NDArray[np.bool_]) -> Tokens:
    """Some of the tokens, nothing computed anew.

    Parameters
    ----------
    tokens : Tokens
        NumPy arrays.
    rows : ndarray of bool, shape (token,)
        Which of them.
    """
    support = tokens.support
    if support is not None:
        arrays: dict[str, Any] = {
            field.name: value[rows]
            for field in fields(support)
            if isinstance(value := getattr(support, field.name), np.ndarray)
        }
        support = replace(support, **arrays)
    return Tokens(
        tokens.advantage[rows],
        tokens.behavior_logprob[rows],
        tokens.policy_logprob[rows],
        support=support,
        collision=None if tokens.collision is None else tokens.collision[rows],
        full={name: (d[rows], d_dot[rows]) for name, (d, d_dot) in tokens.full.items()},
    )


def decisions(tokens: Tokens, region: Question, deciders: Sequence[Decider]) -> NDArray[np.bool_]:
    """Every decider's keep of some tokens, shape (criterion, token)."""
    return np.stack(
        [
            each.keep(tokens, threshold=region.threshold, divergence=region.divergence)
            for each in deciders
        ]
    )
