"""What foretells ΔD of a token: the criteria's directions, and the exact first order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from deltad.masks import CRITERIA, Criterion

from .counting import Outside

if TYPE_CHECKING:
    from deltad.dumps import Dump

LINEAR: Final = "linear_delta"
"""The column of exact first-order ΔD along the arm's update, where it was recorded."""


@dataclass(frozen=True)
class Predictor:
    """What foretells ΔD of a token.

    Attributes
    ----------
    name : str
        A criterion's name, or the column's.
    formula : str
        In words and symbols.
    values : callable of Outside to ndarray, shape (token,)
        The prediction; above 0 foretells ΔD > 0.
    columns : tuple of str
        Optional columns of a dump that it needs.
    """

    name: str
    formula: str
    values: Callable[[Outside], NDArray[np.float64]]
    columns: tuple[str, ...] = ()


def predictors(divergence: str) -> tuple[Predictor, ...]:
    """Every direction there is for a divergence, and the exact first order."""
    return (
        *(
            _along(each)
            for each in CRITERIA.values()
            if each.name == "ratio" or each.family == divergence
        ),
        Predictor(
            LINEAR,
            "exact first-order ΔD along the update",
            lambda outside: outside.batch[LINEAR].astype(np.float64),
            (LINEAR,),
        ),
    )


def linear_family(dump: Dump, arm: str) -> str:
    """The divergence whose first order an arm recorded, as its metadata's `ladder` says."""
    ladder = dump.metadata(arm).extra.get("ladder")
    return str(ladder.get("divergence", "kl")) if isinstance(ladder, dict) else "kl"


def _along(each: Criterion) -> Predictor:
    """Â · r · direction of one criterion."""

    def values(outside: Outside) -> NDArray[np.float64]:
        """The prediction, up to the step size."""
        tokens = outside.tokens
        with np.errstate(invalid="ignore", over="ignore"):  # 0 · ∞ predicts nothing
            return np.asarray(tokens.advantage * tokens.ratio * each.push(tokens))

    return Predictor(each.name, f"Â · r · ({each.direction})", values, each.columns)
