"""PPO's and GRPO's clip: as a mask with bounds of one's own, and as the loss that trainers log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltad.masks import CLIP_HIGH, CLIP_LOW, CRITERIA, Criterion

from .judgement import Judged


def clip_higher(*, low: float = CLIP_LOW, high: float = CLIP_HIGH) -> Criterion:
    """The clip of PPO and GRPO with bounds of one's own, as a criterion.

    Parameters
    ----------
    low, high : float
        It leaves 1 − `low` ≤ r ≤ 1 + `high` alone; 0 ≤ low ≤ 1, high ≥ 0.

    Returns
    -------
    Criterion
        Named `clip-higher`, as the registry's of 0.2 and 0.28.

    Raises
    ------
    ValueError
        Bounds that do not hold r = 1.
    """
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"`low` must lie in [0, 1] and `high` must not be negative, got {low} and {high}"
        )
    return dataclasses.replace(
        CRITERIA["clip-higher"],
        proximity=f"r > {1 + high:g} or r < {1 - low:g}",
        outside=lambda tokens, threshold, _: (tokens.ratio > 1 + high) | (tokens.ratio < 1 - low),
    )


@dataclass(frozen=True)
class Clip:
    """What a clipped token's loss stands still at.

    Attributes
    ----------
    low, high : float
        The clip leaves 1 − `low` ≤ r ≤ 1 + `high` alone.
    dual : float
        Where Â < 0 the loss is at most −`dual` · Â (dual clip, arXiv:1912.09729; TRL's `delta`);
        infinite for none.
    """

    low: float = CLIP_LOW
    high: float = CLIP_HIGH
    dual: float = math.inf

    @classmethod
    def of(cls, parameters: Mapping[str, float]) -> Clip:
        """From the parameters of clip-higher, the registry's where they are not given.

        Raises
        ------
        ValueError
            `dual` would cut off r = 1.
        """
        clip = cls(**parameters)
        if not clip.dual > 1:
            raise ValueError(f"`dual` must be above 1, got {clip.dual}")
        return clip

    def beyond(self, judged: Judged, log_ratio: Tensor) -> Tensor:
        """Â < 0 and r > `dual`: no gradient passes; shape (batch · token,)."""
        beyond: Tensor = (judged.tokens.advantage < 0) & (log_ratio.exp() > self.dual)
        return beyond

    def held(self, judged: Judged, log_ratio: Tensor) -> Tensor:
        """The objective of a token that is not let pass, its bound times Â."""
        bound = torch.where(judged.positive, 1 + self.high, 1 - self.low)
        bound = torch.where(self.beyond(judged, log_ratio), self.dual, bound)
        held: Tensor = bound * judged.tokens.advantage
        return held
