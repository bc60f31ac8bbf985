"""The ladder: what one optimizer step does to D, from a token's own gradient up to the step.

For every response token the first-order change of D along the step and along the batch's
gradient, and its change at a tenth and at three times the step; for a sample of tokens also
along their own gradient and along their sequence's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from deltad.masks import DEFAULT_THRESHOLD, CriterionError, Rule, rule

from .errors import ProbeError

LADDER_COLUMNS: Final = (
    "linear_delta",
    "linear_delta_own",
    "linear_delta_sequence",
    "linear_delta_batch",
    "delta_tenth",
    "delta_triple",
)
"""What the ladder adds to the rows of a dump."""

Derivative = Literal["auto", "jvp", "difference"]
"""How slopes along the step and the batch's gradient are taken; see `Ladder`."""


@dataclass(frozen=True)
class Ladder:
    """What `UpdateProbe(..., ladder=Ladder(...))` measures beside the step itself.

    Attributes
    ----------
    tokens : int
        Tokens a step for which the token's own and its sequence's gradient are taken: first
        those that exactly one of two criteria masks, then others outside the region, then any;
        at random within each. Costs two backward passes of the sequence for each.
    divergence : {"kl", "tv"}
        D, that of the update's region.
    threshold : float
        δ of the region.
    criterion, baseline : str or Rule
        The two criteria; by default `predictive-<divergence>-aggregated` and `ratio`.
    least : float
        Tokens with D up to this are not sampled: those that the dump does not store.
    seed : int
        Of the sample's own random numbers.
    ratio_cap : float, optional
        Upper bound of the importance weight in the loss, where it has one.
    derivative : {"auto", "jvp", "difference"}
        How the slopes along the step and the batch's gradient are taken: forward-mode
        differentiation where the model has it, else a central difference ("auto"), or one of
        the two.
    arms : tuple of str, optional
        The arms that are measured; by default all but `zero-step`.

    Raises
    ------
    ProbeError
        An option that makes no sense.

    Notes
    -----
    Directions are those in which a loss descends: −Σ r Â of a token or of its sequence's tokens
    in the loss, the gradient that the optimizer saw, the step that it took. A positive slope
    says that this push makes D grow. The first three are in nats per unit of learning rate
    under plain SGD, of a loss that is a sum for the token and its sequence, and the user's own
    for the batch.
    """

    tokens: int = 64
    divergence: str = "kl"
    threshold: float = DEFAULT_THRESHOLD
    criterion: str | Rule = ""
    baseline: str | Rule = "ratio"
    least: float = 0.0
    seed: int = 0
    ratio_cap: float | None = None
    derivative: Derivative = "auto"
    arms: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ProbeError(f"`tokens` must be at least 0, got {self.tokens}")
        if self.derivative not in ("auto", "jvp", "difference"):
            raise ProbeError(
                f"`derivative` must be auto, jvp or difference, got {self.derivative!r}"
            )
        for name in ("threshold", "least"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ProbeError(f"`{name}` must be finite and not negative, got {value!r}")
        if not self.criterion:
            object.__setattr__(self, "criterion", f"predictive-{self.divergence}-aggregated")
        try:
            for each in (self.criterion, self.baseline):
                rule(each).check_family(self.divergence)
        except CriterionError as error:
            raise ProbeError(f"the ladder's pair of criteria: {error}") from error

    def measures(self, arm: str) -> bool:
        """Whether an arm is measured."""
        return arm != "zero-step" if self.arms is None else arm in self.arms
