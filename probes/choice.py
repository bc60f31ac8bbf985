"""What of a micro-batch is read after the step, and how."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .plan import Plan


@dataclass(frozen=True)
class Choice:
    """What of a micro-batch is read after the step.

    Attributes
    ----------
    kept : array of int, shape (row,)
        Rows that are recorded, ascending.
    read : array of int, shape (row,)
        Rows that the forward after the step is made for, ascending: those that are recorded and,
        where *pre* of them was read again, those that were so near the threshold that this could
        have carried them over it.
    plan : Plan or None
        The cut forward; None for the whole one, which is read at all rows.
    looked_at : int
        Rows of the sequences that were drawn.
    outside : int
        Of these, tokens outside the region that are not recorded: where only the disagreement
        tokens are.
    weight : float or None
        What a recorded row stands for, where sequences are drawn.
    """

    kept: NDArray[np.intp]
    read: NDArray[np.intp]
    plan: Plan | None
    looked_at: int
    outside: int
    weight: float | None

    @property
    def skipped(self) -> int:
        """Rows that were looked at and are not recorded."""
        return self.looked_at - len(self.kept)
