"""What a fault is: a change of a dump's rows, and what must agree with them afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.dumps import KEY, Batch, Metadata, batch_support, batch_tokens
from deltad.masks import CRITERIA, CriterionError

from .rows import Bools, Columns, Rows

Change = Callable[[Rows, float], None]


@dataclass(frozen=True)
class Fault:
    """A fault, or a change that leaves a dump sound, that can be put into rows.

    Attributes
    ----------
    name : str
        Unique.
    cause : str or None
        What the doctor should call it; None for a change that leaves the dump sound.
    strengths : tuple of float
        Sizes that occur in practice; `change` says of what.
    change : callable
        Replaces columns and metadata of `Rows`, given a strength.
    also : tuple of str
        Other causes that are right too.
    estimate : bool
        Whether the strength is what the doctor's estimate should be.
    decides : bool
        Whether the mask was applied to the changed numbers, so that `in_loss` follows.
    thin : bool
        Whether a thinned dump can keep its rule: the rows that lie below it now are dropped.
        Otherwise most would go, and the dump is marked as storing all its rows.
    least : int
        Rows of a dump that must change for it to be broken.
    """

    name: str
    cause: str | None
    strengths: tuple[float, ...]
    change: Change
    also: tuple[str, ...] = ()
    estimate: bool = False
    decides: bool = True
    thin: bool = True
    least: int = 3

    @property
    def middle(self) -> float:
        """The strength in the middle of the list."""
        return self.strengths[len(self.strengths) // 2]

    def apply(
        self,
        columns: Mapping[str, NDArray[Any]],
        metadata: Metadata,
        strength: float,
        rng: Generator,
    ) -> tuple[Columns, Metadata]:
        """Put the fault into all rows of one arm and seed, whose values obey the contract.

        The rows come back in the order of step, sequence and position, with metadata that agrees
        with them, and without the columns over the whole vocabulary (`full_*`), since nobody
        knows what they would hold. The same state of `rng` gives the same fault, in every arm
        alike. Raises `NothingToBreakError` where the rows do not hold what the fault would change.
        """
        order = np.lexsort(tuple(columns[name] for name in reversed(KEY)))
        changed = {
            name: values[order]
            for name, values in columns.items()
            if not (self.decides and name.startswith("full_"))
        }
        rows = Rows(changed, metadata, rng)
        with np.errstate(all="ignore"):  # placeholders are no numbers to compute with
            self.change(rows, strength)
            if self.decides:
                rows["in_loss"] = _decided(rows)
            _drop_below(rows, keeps_rule=self.thin)
        return rows.columns, rows.metadata


FAULTS: Final[dict[str, Fault]] = {}
"""Every fault, and every change that leaves a dump sound, by name."""


def fault(
    name: str, cause: str | None, *strengths: float, **options: Any
) -> Callable[[Change], Change]:
    """Enter a change of rows into `FAULTS`; its first words say what goes wrong."""

    def enter(change: Change) -> Change:
        FAULTS[name] = Fault(name, cause, strengths or (1.0,), change, **options)
        return change

    return enter


def divergence(rows: Rows, family: str) -> NDArray[np.float64]:
    """D of the rows whose top-K log-probs are stored."""
    return np.asarray(DIVERGENCES[family].value(batch_support(_batch(rows), rows.metadata)))


def _batch(rows: Rows) -> Batch:
    """Rows as the mathematics takes them."""
    return Batch("", 0, rows.columns, rows.stored)


def _decided(rows: Rows) -> Bools:
    """`in_loss` as the applied mask decides it now; as it was where that cannot be known."""
    in_loss, update = rows["in_loss"].copy(), rows.metadata.update
    criterion = CRITERIA.get(str(update.get("mask")))
    if criterion is not None and rows.stored.any():
        with contextlib.suppress(CriterionError):  # it looks at a column that is not there
            in_loss[rows.stored] = criterion.keeps(
                batch_tokens(_batch(rows), rows.metadata),
                threshold=float(update.get("threshold", 0.0)),
                divergence=str(update.get("divergence", "kl")),
            )
    return np.asarray(in_loss)


def _drop_below(rows: Rows, *, keeps_rule: bool) -> None:
    """Make rows and metadata agree on what was stored."""
    if rows.metadata.stored_above is None or not keeps_rule:
        rows.describe(stored={"rule": "all"}, rows_seen=len(rows))
        return
    family, threshold = rows.metadata.stored_above
    above, stored = np.ones(len(rows), bool), rows.stored
    # A placeholder may leave no number; such a row stays, for it is the evidence.
    numbers = np.isfinite(rows["behavior_logprob"] + rows["pre_logprob"])[stored]
    above[stored] = ~(divergence(rows, family) <= threshold) | ~numbers
    rows.columns = {name: values[above] for name, values in rows.columns.items()}
