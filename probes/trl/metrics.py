"""What a step did, among the trainer's own metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.losses.metrics import Metric
from deltad.probes.rows import Rows
from deltad.steps import StepQuestion, StepScalars, count_steps

LOGGED: Final = (
    "outside_rate",
    "disagreement_rate",
    "in_loss_rate",
    "increase_rate",
    "outside_increase_rate",
    "delta_d_mean",
    "delta_d_outside_mean",
    "d_pre_p99",
    "d_pre_max",
    "d_post_max",
)
"""Of `StepScalars.scalars`, what goes among the trainer's metrics."""


@dataclass
class StepSums:
    """Sums of one optimizer step on one rank; can be pickled and added.

    Attributes
    ----------
    scalars : StepScalars or None
        Counts; None where the rank had no response token in the step.
    divergence : tuple of float
        Σ D before and after the step, and how many tokens they are over.
    loss : dict of str to (float, float)
        Numerators and denominators of the masked loss's metrics.
    """

    scalars: StepScalars | None = None
    divergence: tuple[float, float, int] = (0.0, 0.0, 0)
    loss: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add_rows(
        self, arm: str, rows: Rows, question: StepQuestion, vocab_size: int, *, seed: int, rank: int
    ) -> None:
        """Count the rows of one micro-batch, all of one step."""
        metadata = Metadata(top_k=rows["topk_ids"].shape[1], vocab_size=vocab_size)
        batch = Batch("the rows of the probe", 0, rows, np.ones(len(rows["step"]), np.bool_))
        for counted in count_steps(batch, metadata, question, arm=arm, seed=seed, rank=rank):
            self.scalars = counted if self.scalars is None else self.scalars + counted
        before, after = (
            batch_tokens(batch, metadata, post=post).divergence(question.divergence)
            for post in (False, True)
        )
        pre, post, tokens = self.divergence
        self.divergence = (
            pre + float(before.sum()),
            post + float(after.sum()),
            tokens + len(before),
        )

    def add_loss(self, metrics: Mapping[str, Metric]) -> None:
        """Add the metrics of one micro-batch's masked loss."""
        for name, (above, below) in metrics.items():
            self._add_one(name, float(above), float(below))

    def add(self, other: StepSums) -> None:
        """Add another rank's sums of the same step."""
        if other.scalars is not None:
            mine = self.scalars
            self.scalars = other.scalars if mine is None else mine + other.scalars
        first, second = self.divergence, other.divergence
        self.divergence = (first[0] + second[0], first[1] + second[1], first[2] + second[2])
        for name, (above, below) in other.loss.items():
            self._add_one(name, above, below)

    def named(self, prefix: str) -> dict[str, float]:
        """Numbers for the trainer's metrics; without what is undefined."""
        found: dict[str, float] = {}
        if self.scalars is not None:
            scalars = self.scalars.scalars(prefix=prefix, sums=False)
            found |= {
                name: scalars[name]
                for name in (f"{prefix}/{each}" for each in LOGGED)
                if name in scalars
            }
        pre, post, tokens = self.divergence
        if tokens:
            found |= {f"{prefix}/d_pre_mean": pre / tokens, f"{prefix}/d_post_mean": post / tokens}
        found |= {
            f"{prefix}/loss/{name}": above / below
            for name, (above, below) in self.loss.items()
            if below
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _add_one(self, name: str, above: float, below: float) -> None:
        """Add one metric of the loss."""
        before = self.loss.get(name, (0.0, 0.0))
        self.loss[name] = (before[0] + above, before[1] + below)


def over_ranks(sums: StepSums, ranks: int) -> StepSums:
    """Add the step's sums of all ranks; a collective, to be called on each."""
    if ranks == 1:
        return sums
    from accelerate.utils import gather_object

    total = StepSums()
    gathered: Iterable[Any] = gather_object([sums])
    for each in gathered:
        total.add(each)
    return total
