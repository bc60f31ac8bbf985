"""What a file holds of the rows that a writer is given: which, which vectors, what is derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.masks import CriterionError, rule

from .batch import Batch
from .columns import DERIVED, derived_names
from .derived import derive, derived_metadata, rounded_down
from .errors import DumpError
from .metadata import Metadata
from .rules import Near
from .tokens import batch_support, batch_tokens

Vectors = Literal["all"] | Near
"""Which rows keep their vectors."""

_ROUNDED: Final = ("d_pre", "d_post")  # in rows without vectors; the other numbers are NULL there
_MIX: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


class Content:
    """Chooses rows and vectors of one arm and seed, and fills the derived columns.

    Parameters
    ----------
    metadata : Metadata
        As the writer was given it.
    seed : int
        The dump's, for the sample among rows that are not near.
    readings : collection of {"pre", "post"}
        Readings of the policy that were made.
    derived : bool
        Fill the derived columns, where the policy before the step was read.
    vectors : "all" or Near
        Which rows keep their vectors.

    Attributes
    ----------
    metadata : Metadata
        With `derived` and `vectors` as they will be.
    outside : int
        Tokens outside that `choose` left out under the rule "disagreement".

    Raises
    ------
    ValueError
        Vectors are to be left out without derived columns, or of another divergence.
    """

    def __init__(
        self,
        metadata: Metadata,
        *,
        seed: int,
        readings: Collection[str],
        derived: bool,
        vectors: Vectors,
    ) -> None:
        self.outside = 0
        self.near = vectors if isinstance(vectors, Near) else None
        if self.near is None and vectors != "all":
            raise ValueError(f"`vectors` must be 'all' or a Near, got {vectors!r}")
        self.divergence = _divergence(metadata, self.near) if derived and readings else None
        if self.near is not None:
            if self.divergence is None:
                raise ValueError(
                    "vectors can be left out where derived columns tell D instead: `derived` must "
                    "be true and the reading 'pre' made"
                )
            metadata = dataclasses.replace(metadata, vectors=self.near.to_json_object())
        if self.divergence is not None:
            metadata = dataclasses.replace(metadata, derived=derived_metadata(self.divergence))
        self.metadata = metadata
        self._seed = seed

    def added(self, batch: Batch) -> tuple[str, ...]:
        """Names of the columns that `fill` will add to those of a batch.

        Raises
        ------
        DumpError
            One of them is there already.
        """
        if self.divergence is None:
            return ()
        for name in DERIVED:
            if name in batch.columns:
                raise DumpError(
                    batch.path,
                    "is filled by the writer: leave it out, or make the writer with derived=False",
                    column=name,
                )
        return derived_names(batch.columns.keys())

    def choose(self, batch: Batch) -> NDArray[np.bool_] | None:
        """Rows that the rule of storage keeps; None for all.

        Raises
        ------
        DumpError
            A row has no vectors, or a criterion of the rule needs a column that is missing.
        """
        if self.metadata.stored_above is None:
            return None
        if not batch.vectors.all():
            raise DumpError(
                batch.path,
                "storing what lies above a threshold needs every row's vectors",
                row=int(np.flatnonzero(~batch.vectors)[0]),
                column="topk_ids",
            )
        if self.metadata.stored_pair is None:
            divergence, threshold = self.metadata.stored_above
            d_pre = DIVERGENCES[divergence].value(batch_support(batch, self.metadata))
            return np.asarray(d_pre > threshold)
        try:
            outside, disagreement = pair_decisions(batch, self.metadata)
        except CriterionError as error:
            raise DumpError(batch.path, f"the rule of `stored` cannot be kept: {error}") from error
        self.outside += int(np.count_nonzero(outside & ~disagreement))
        return disagreement

    def fill(
        self, columns: Mapping[str, NDArray[Any]], vectors: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """Add the derived columns, and find which rows keep their vectors.

        Parameters
        ----------
        columns : mapping of str to array
            Checked columns in their stored types.
        vectors : array of bool, shape (token,)
            Rows whose vectors there are.

        Returns
        -------
        columns : dict of str to array
            With the derived ones.
        vectors : array of bool, shape (token,)
            Rows whose vectors are to be stored.
        """
        if self.divergence is None:
            return dict(columns), vectors
        found = derive(Batch("", 0, columns, vectors), self.metadata, divergence=self.divergence)
        if self.near is not None:
            vectors = kept_vectors(found["d_pre"], columns, self.near, self._seed)
            rest = ~vectors
            for name, values in found.items():
                if name in _ROUNDED:
                    values[rest] = rounded_down(values[rest])
                elif values.dtype.kind == "f":
                    values[rest] = np.nan
        return {**columns, **found}, vectors


def pair_decisions(batch: Batch, metadata: Metadata) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens lie outside the stored pair's region, and on which its criteria disagree.

    Parameters
    ----------
    batch : Batch
        Checked rows, all of them with vectors.
    metadata : Metadata
        With the rule "disagreement".

    Returns
    -------
    outside, disagreement : array of bool, shape (token,)

    Raises
    ------
    CriterionError
        A criterion needs a column that the batch lacks.
    ValueError
        The rule is another.
    """
    pair = metadata.stored_pair
    if pair is None:
        raise ValueError("`stored` names no pair of criteria")
    tokens = batch_tokens(batch, metadata)
    outside = np.asarray(tokens.divergence(pair.divergence) > pair.threshold)
    keeps = []
    for name in (pair.criterion, pair.baseline):
        keeps.append(rule(name).keeps(tokens, threshold=pair.threshold, divergence=pair.divergence))
    return outside, np.asarray(outside & (keeps[0] != keeps[1]))


def kept_vectors(
    d_pre: NDArray[np.float64], keys: Mapping[str, NDArray[Any]], near: Near, seed: int
) -> NDArray[np.bool_]:
    """Find the rows whose vectors the rule "near" keeps.

    Parameters
    ----------
    d_pre : array of float64, shape (token,)
        D before the step, of the rule's divergence.
    keys : mapping of str to array
        `step`, `sequence` and `position` of the rows.
    near : Near
        The rule.
    seed : int
        Of the dump.

    Returns
    -------
    array of bool, shape (token,)
        D at the threshold or above, and the sample of the rest: the same in every arm.
    """
    kept = np.asarray(d_pre >= near.threshold)
    if near.sample > 0:
        kept |= drawn(seed, keys["step"], keys["sequence"], keys["position"]) < near.sample
    return kept


def drawn(
    seed: int, step: NDArray[Any], sequence: NDArray[Any], position: NDArray[Any]
) -> NDArray[np.float64]:
    """Give each token a number by what identifies it, as if drawn evenly from [0, 1).

    Parameters
    ----------
    seed : int
        Of the dump.
    step, sequence, position : array of int, shape (token,)
        `KEY` of the rows.

    Returns
    -------
    array of float64, shape (token,)
        The same in every arm, process and run.

    Notes
    -----
    The finalizer of splitmix64 (Steele, Lea and Flood, 2014), once for each part of the key.
    """
    state = np.full(len(step), seed % 2**64, dtype=np.uint64)
    golden, first, second = (np.uint64(value) for value in _MIX)
    for part in (step, sequence, position):
        state = (state ^ part.astype(np.int64).view(np.uint64)) + golden
        state = (state ^ (state >> np.uint64(30))) * first
        state = (state ^ (state >> np.uint64(27))) * second
        state ^= state >> np.uint64(31)
    return np.asarray((state >> np.uint64(11)) * np.float64(2.0**-53), dtype=np.float64)


def _divergence(metadata: Metadata, near: Near | None) -> str:
    """Of which D the derived columns are: what the vectors' rule, the rows' or the update has."""
    said = metadata.derived["divergence"] if metadata.derived is not None else None
    if near is not None and said not in (None, near.divergence):
        raise ValueError(
            f"`vectors` and the metadata's `derived` must be of one divergence, got "
            f"{near.divergence} and {said}"
        )
    above = metadata.stored_above
    candidates = (
        said,
        near.divergence if near is not None else None,
        above[0] if above is not None else None,
        metadata.update.get("divergence"),
        "kl",
    )
    return next(name for name in candidates if isinstance(name, str) and name in DIVERGENCES)
