"""One run of a training: a mask and a seed, its curves, and what it is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.curves import CURVES, BatchLine

Floats = NDArray[np.float64]

MEASURES: Final[dict[str, str]] = {
    "final": "held-out accuracy after the last batch",
    "best": "highest held-out accuracy of all evaluations",
    "mean": "mean held-out accuracy of all evaluations after the first",
}
"""What a run is judged by."""


@dataclass(frozen=True)
class Setting:
    """The options that all runs of one RUN share.

    Attributes
    ----------
    folder : Path
        RUN.
    options : mapping
        As the training wrote them.
    model : str
        What was trained.
    """

    folder: Path
    options: Mapping[str, Any]
    model: str

    @property
    def name(self) -> str:
        """Recipe, precision, threshold and K in words."""
        options = self.options
        region = "" if options["divergence"] == "kl" else f" ({options['divergence'].upper()})"
        return (
            f"{options['recipe']}, {options['precision']}, δ = {options['threshold']:g}{region}, "
            f"K = {options['top_k']}"
        )


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """One mask and seed of a training.

    Attributes
    ----------
    setting : Setting
        Which training.
    mask, seed
        Which run.
    lines : tuple of BatchLine
        In order.
    """

    setting: Setting
    mask: str
    seed: int
    lines: tuple[BatchLine, ...]

    @property
    def complete(self) -> bool:
        """Whether it was trained to its end."""
        return bool(self.lines) and self.lines[-1].batch == int(self.setting.options["batches"])

    @cached_property
    def curves(self) -> dict[str, Floats]:
        """Every curve over the lines, shape (line,); NaN where a line has no such number."""
        values = [line.values() for line in self.lines]
        return {name: np.array([each[name] for each in values]) for name in CURVES}

    def measure(self, name: str) -> float:
        """One of `MEASURES`; NaN of a run that is not complete."""
        accuracy = self.curves["accuracy"]
        accuracy = accuracy[~np.isnan(accuracy)]
        if not self.complete or not len(accuracy):
            return math.nan
        found = {"final": accuracy[-1], "best": accuracy.max(), "mean": accuracy[1:].mean()}
        return float(found[name])

    def total(self, name: str) -> float:
        """A curve's quotient over all batches together; NaN where there is none."""
        curve = CURVES[name]
        above, below = (
            sum(line.sums.get(part, 0.0) for line in self.lines if curve.below in line.sums)
            for part in (curve.above, curve.below)
        )
        return above / below if below else math.nan
