"""What a fault is: a change of a dump's rows, and what must agree with them afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.dumps import KEY, Batch, Metadata, batch_support, batch_tokens
from deltad.masks import CRITERIA, CriterionError

from .slots import Columns

Change = Callable[[Columns, Metadata, float, Generator], Metadata]


@dataclass(frozen=True)
class Injection:
    """A fault, or a harmless change, that can be put into the rows of one arm and seed.

    Attributes
    ----------
    name : str
        Unique among faults and controls.
    cause : str or None
        What the doctor should call it; None for a change that leaves the dump sound.
    strengths : tuple of float
        Sizes that occur in practice.
    unit : str
        What a strength is.
    change : callable
        Replaces columns, whose rows are in order, and returns the metadata.
    also : tuple of str
        Other causes that are right too.
    estimate : bool
        Whether the strength is what the doctor's estimate should be.
    decides : bool
        Whether the mask was applied on the changed numbers, so that `in_loss` follows.
    thin : bool
        Whether a thinned dump can keep its rule: the rows that lie below it now are dropped.
        Otherwise most would go, and the dump is marked as storing all its rows.
    least : int
        Rows of a dump that must change for it to be broken.
    """

    name: str
    cause: str | None
    strengths: tuple[float, ...]
    unit: str
    change: Change
    also: tuple[str, ...] = ()
    estimate: bool = False
    decides: bool = True
    thin: bool = True
    least: int = 3

    @property
    def accepted(self) -> frozenset[str]:
        """Causes that are right; none for a sound dump."""
        return frozenset([self.cause, *self.also] if self.cause else self.also)

    @property
    def summary(self) -> str:
        """What goes wrong, in a sentence."""
        return (self.change.__doc__ or "").partition("\n")[0]

    def apply(
        self,
        columns: Mapping[str, NDArray[Any]],
        metadata: Metadata,
        strength: float,
        rng: Generator,
    ) -> tuple[Columns, Metadata]:
        """Put the fault into rows.

        Parameters
        ----------
        columns : mapping of str to array
            All rows of one arm and seed, whose values obey the contract; not changed. A row
            whose vectors are NULL holds −1 for its ids.
        metadata : Metadata
            Of their file.
        strength : float
            Its size, in its unit.
        rng : Generator
            The same state gives the same fault, in every arm alike.

        Returns
        -------
        columns : dict of str to array
            Rows in the order of step, sequence and position. Columns over the whole vocabulary
            (`full_*`) are left out, since nobody knows what they would hold.
        metadata : Metadata
            `rows_seen` and `stored` agree with the rows.

        Raises
        ------
        NothingToBreakError
            The rows do not hold what the fault would change.
        """
        order = np.lexsort(tuple(columns[name] for name in reversed(KEY)))
        changed = {
            name: values[order]
            for name, values in columns.items()
            if not (self.decides and name.startswith("full_"))
        }
        with np.errstate(all="ignore"):  # placeholders are no numbers to reckon with
            metadata = self.change(changed, metadata, strength, rng)
            if self.decides:
                changed["in_loss"] = _decided(changed, metadata)
            return _stored(changed, metadata, keeps_rule=self.thin)


def _batch(columns: Columns) -> Batch:
    """Columns as the mathematics takes them."""
    return Batch("", 0, columns, np.asarray((columns["topk_ids"] >= 0).any(axis=1)))


def _decided(columns: Columns, metadata: Metadata) -> NDArray[np.bool_]:
    """`in_loss` as the applied mask decides it now; as it was where that cannot be known."""
    in_loss = columns["in_loss"].copy()
    update, batch = metadata.update, _batch(columns)
    criterion = CRITERIA.get(str(update.get("mask")))
    if criterion is None or not batch.vectors.any():
        return np.asarray(in_loss)
    with contextlib.suppress(CriterionError):  # it looks at a column that is not there
        in_loss[batch.vectors] = criterion.keep(
            batch_tokens(batch, metadata),
            threshold=float(update.get("threshold", 0.0)),
            divergence=str(update.get("divergence", "kl")),
        )
    return np.asarray(in_loss)


def _stored(columns: Columns, metadata: Metadata, *, keeps_rule: bool) -> tuple[Columns, Metadata]:
    """Rows and metadata that agree on what was stored."""
    rows = len(columns["token_id"])
    if metadata.stored_above is None or not keeps_rule:
        return columns, dataclasses.replace(metadata, stored={"rule": "all"}, rows_seen=rows)
    family, threshold = metadata.stored_above
    batch = _batch(columns)
    above = np.ones(rows, bool)
    divergence = DIVERGENCES[family](batch_support(batch, metadata))
    # A placeholder may leave no number; such a row stays, for it is the evidence.
    numbers = np.isfinite(columns["behavior_logprob"] + columns["pre_logprob"])[batch.vectors]
    above[batch.vectors] = ~(divergence <= threshold) | ~numbers
    return {name: values[above] for name, values in columns.items()}, metadata
