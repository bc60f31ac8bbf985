"""PPO's and GRPO's clip: as a mask with bounds of one's own, and as the loss that trainers log."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deltad.masks import CLIP_HIGH, CLIP_LOW

from .judgement import Judged


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio, and what a clipped token's loss stands still at.

    Attributes
    ----------
    low, high : float
        The clip leaves 1 − `low` ≤ r ≤ 1 + `high` alone; 0 ≤ low ≤ 1, high ≥ 0.
    dual : float
        Where Â < 0 the loss is at most −`dual` · Â, with no gradient beyond (dual clip,
        arXiv:1912.09729; TRL's `delta`); > 1, infinite for none.

    Raises
    ------
    ValueError
        Bounds that do not hold r = 1.
    """

    low: float = CLIP_LOW
    high: float = CLIP_HIGH
    dual: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ValueError(
                "`low` must lie in [0, 1] and `high` must not be negative, got "
                f"{self.low} and {self.high}"
            )
        if not self.dual > 1:
            raise ValueError(f"`dual` must be above 1, got {self.dual}")

    def beyond(self, judged: Judged, ratio: Tensor) -> Tensor:
        """Â < 0 and r > `dual`; shape (batch · token,)."""
        beyond: Tensor = (judged.tokens.advantage < 0) & (ratio > self.dual)
        return beyond

    def held(self, judged: Judged, ratio: Tensor) -> Tensor:
        """The objective of a token that is not let pass, its bound times Â."""
        # Tensors, not numbers: `where` of two numbers would round them to float32.
        bound = torch.where(judged.positive, torch.full_like(ratio, 1 + self.high), 1 - self.low)
        bound = torch.where(self.beyond(judged, ratio), self.dual, bound)
        held: Tensor = bound * judged.tokens.advantage
        return held
