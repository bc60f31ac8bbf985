"""A first look at a block in float32: whether it is sound, and which tokens may be outside.

Most tokens lie far inside the region, and most blocks are sound. Both can be told from single
precision exponentials, which the sums of probabilities need in any case: a block is *sound*
where no rule of `deltad.dumps.check_batch` can be broken, and a token is *inside* where an upper
bound of its D, rounding counted in, is below the threshold. What cannot be told so is judged by
`check_batch` and by the float64 mathematics, which remain the only ones that refuse a value or
call a token outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltad._checks import AGREEMENT_TOLERANCE
from deltad.divergence import KL_TAIL_FLOOR

if TYPE_CHECKING:
    from deltad.dumps import Batch, Metadata

    from .question import Question


def block_rows(top_k: int) -> int:
    """Rows looked at together: few enough that a policy's exponentials stay in a core's cache."""
    return min(4_096, max(1, 2**19 // max(1, top_k)))


MOST_TURNS: Final = 256
"""Ids up to which comparing all pairs of a row is faster than sorting it."""

LISTS: Final = (
    ("topk_behavior_logprobs", "behavior_logprob"),
    ("topk_pre_logprobs", "pre_logprob"),
    ("topk_post_logprobs", "post_logprob"),
)
"""The log-probs at the listed ids, and that of the sampled token, of each policy."""

SEEN: Final = frozenset({"topk_ids", *(name for name, _ in LISTS)})
"""Columns that are looked at here; `check_batch` looks at any other."""

_UNIT: Final = float(np.finfo(np.float32).eps)
_NOTHING: Final = -800.0  # e to this power is 0 in float64 too

_Floats = NDArray[np.float32]


class _Policy(NamedTuple):
    """One policy in a block, in float32."""

    logprobs: _Floats  # at the listed ids, shape (token, topk)
    probs: _Floats
    alone: _Floats  # log-prob of the sampled token, shape (token,)
    alone_prob: _Floats  # its probability, and 0 where it is listed
    mass: _Floats  # Σ of the probabilities
    lowest: float  # least log-prob of all


class Screen:
    """Looks at blocks of one shape of lists, those of a file, under a region's threshold.

    Keeps its scratch arrays from block to block.
    """

    def __init__(self, metadata: Metadata, region: Question) -> None:
        self._tolerance = metadata.logprob_tolerance
        self._vocab_size = metadata.vocab_size
        self._threshold = np.float32(region.threshold)
        if self._threshold > region.threshold:  # a bound in float32 must not slip between
            self._threshold = np.nextafter(self._threshold, np.float32(-np.inf))
        # The bounds take it that there is a tail.
        has_tail = metadata.vocab_size > metadata.top_k + 1
        self._bound = UPPER_BOUNDS.get(region.divergence) if has_tail else None
        size = block_rows(metadata.top_k) * metadata.top_k
        self._slots = np.empty(2 * size, np.int32)
        self._bytes = bytearray(size)
        self._equal = np.frombuffer(self._bytes, np.bool_)
        self._floats = [np.empty(size, np.float32) for _ in range(3)]

    def candidates(self, batch: Batch, rows: slice) -> NDArray[np.intp] | None:
        """Find the rows of a block that may lie outside: every token outside is among them.

        The batch is unchecked, with ids, lists and scalars; the block has `block_rows` rows at
        most. Gives places in the batch, ascending. None where a value may be impossible, or ids
        are padded: the block is to be checked in full.
        """
        places = np.arange(rows.start, rows.stop)
        known = batch.vectors[rows]
        chosen: NDArray[np.intp] | slice = rows  # which copies nothing
        if not known.all():
            chosen = places = places[known]
        if not len(places):
            return places
        with np.errstate(invalid="ignore", over="ignore"):
            found = self._look(batch, chosen)
        return None if found is None else places[found]

    def _look(self, batch: Batch, rows: NDArray[np.intp] | slice) -> NDArray[Any] | None:
        """The same for rows that all have vectors: which of them."""
        listed = self._listed(batch["topk_ids"][rows], batch["token_id"][rows])
        if listed is None:
            return None
        policies: list[_Policy] = []
        for (name, scalar), scratch in zip(LISTS, (0, 1, 1), strict=True):
            if name not in batch.columns:
                continue
            found = self._policy(
                batch[name][rows], batch[scalar][rows], listed, scratch, finite=bool(policies)
            )
            if found is None:
                return None
            policies.append(found)
            if len(policies) == 2 and self._bound is not None:
                bound = self._bound(policies[0], found, self._scratch(2, found.logprobs.shape))
        if self._bound is None or len(policies) < 2:
            return np.ones(len(policies[0].mass), np.bool_)
        return np.asarray(~(bound <= self._threshold))  # NaN may be anything

    def _listed(
        self, ids: NDArray[np.int32], token_id: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
        """Rows whose sampled token is listed, and its place among all slots of all rows.

        None for ids that may be wrong.
        """
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            return None
        count, top_k = ids.shape
        # Twice one below the other, so that a turn of the slots is a piece of it: with half of
        # the turns every slot has met every other.
        slots = self._slots[: 2 * ids.size]
        np.copyto(slots[: ids.size].reshape(top_k, count), ids.T)
        slots[ids.size :] = slots[: ids.size]
        equal = self._equal[: ids.size]
        if top_k > MOST_TURNS:
            ordered = np.sort(ids, axis=1)
            if (ordered[:, 1:] == ordered[:, :-1]).any():
                return None
        for turn in range(1, top_k // 2 + 1) if top_k <= MOST_TURNS else ():
            np.equal(slots[turn * count :][: ids.size], slots[: ids.size], out=equal)
            if self._bytes.find(1, 0, ids.size) >= 0:  # faster than `any`
                return None
        np.equal(slots[: ids.size].reshape(top_k, count), token_id, out=equal.reshape(top_k, count))
        slot, row = np.divmod(np.flatnonzero(equal), count)
        return row, row * top_k + slot

    def _policy(
        self,
        logprobs: _Floats,
        scalar: _Floats,
        listed: tuple[NDArray[np.intp], NDArray[np.intp]],
        scratch: int,
        *,
        finite: bool,
    ) -> _Policy | None:
        """One policy's probabilities; None where a rule may be broken."""
        highest, lowest = float(logprobs.max()), float(logprobs.min())
        if not highest <= self._tolerance or (finite and lowest == -math.inf):
            return None
        row, place = listed
        entry = logprobs.ravel()[place].astype(np.float64)
        if len(row) and not np.abs(entry - scalar[row]).max() <= AGREEMENT_TOLERANCE:
            return None
        alone = np.minimum(scalar, 0)
        if highest > 0 or (not finite and lowest < _NOTHING):
            logprobs = np.clip(logprobs, None if finite else _NOTHING, 0)
        probs = np.exp(logprobs, out=self._scratch(scratch, logprobs.shape))
        alone_prob = np.exp(alone)
        alone_prob[row] = 0
        mass = np.einsum("ij->i", probs) + alone_prob
        if not mass.max() <= 1 + self._tolerance - _slack(logprobs.shape[1]):
            return None
        lowest = min(lowest if finite else max(lowest, _NOTHING), float(alone.min()))
        return _Policy(logprobs, probs, alone, alone_prob, mass, lowest)

    def _scratch(self, which: int, shape: tuple[int, ...]) -> _Floats:
        """One of the scratch arrays in a shape."""
        return self._floats[which][: math.prod(shape)].reshape(shape)


def kl_bound(behavior: _Policy, policy: _Policy, scratch: _Floats) -> _Floats:
    """An upper bound of `deltad.divergence.kl`, shape (token,).

    With ε the error of a mass in float32, the tails lie in μ_t ± ε and π_t ± ε. The tail's term
    t log(t/π_t) falls in π_t and is convex in t, so it is at most its value at μ_t + ε and
    π_t − ε, and what it can gain from there to μ_t − ε, an interval of length 2ε, in which it
    falls by no more than −∫ log t ≤ 2ε (1 − log 2ε). The terms of the list, each μ_i times at most
    the largest |log μ_i − log π_i|, round by a unit each in exponential, difference, product
    and sum.
    """
    width = behavior.probs.shape[1]
    error = 2 * _slack(width)
    np.subtract(behavior.logprobs, policy.logprobs, out=scratch)
    terms = np.einsum("ij,ij->i", behavior.probs, scratch)
    terms += behavior.alone_prob * (behavior.alone - policy.alone)
    mu_tail = np.maximum(1 - behavior.mass, 0) + np.float32(error)
    pi_tail = np.maximum(1 - policy.mass - np.float32(error), np.float32(KL_TAIL_FLOOR / 2))
    terms += mu_tail * np.log(mu_tail / pi_tail)
    largest = -min(behavior.lowest, policy.lowest)
    slack = _UNIT * (width + 8) * (largest + 60) + 4 * error * (1 - math.log(2 * error))
    return np.asarray(terms + np.float32(slack))


def tv_bound(behavior: _Policy, policy: _Policy, scratch: _Floats) -> _Floats:
    """An upper bound of `deltad.divergence.tv`, shape (token,), masses as in `kl_bound`."""
    np.subtract(behavior.probs, policy.probs, out=scratch)
    total = np.einsum("ij->i", np.abs(scratch, out=scratch))
    total += np.abs(behavior.alone_prob - policy.alone_prob)
    tails = [np.maximum(1 - each.mass, 0) for each in (behavior, policy)]
    total += np.abs(tails[0] - tails[1])
    return np.asarray(total / 2 + np.float32(4 * _slack(behavior.probs.shape[1])))


def _slack(width: int) -> float:
    """How far a float32 sum of so many probabilities, and the sampled token's, may be off.

    Each exponential and each addition rounds by at most one unit in the last place of 1.
    """
    return 2 * _UNIT * (width + 2)


UPPER_BOUNDS: Final[Mapping[str, Callable[..., _Floats]]] = {"kl": kl_bound, "tv": tv_bound}
"""Upper bounds in float32 by the divergence's name; without one, any token may be outside."""
