"""What a trainer logs of a mask, as numerators and denominators.

A mean of means over micro-batches of unequal length is no mean. So each metric is a pair of sums
that can be added over micro-batches and ranks, and is divided last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deltad.masks import RULES

from .judgement import Judged

MEANINGS: Mapping[str, str] = {
    "outside": "D > δ (top-K where known, else on {k, rest})",
    "masked": "weight ≤ 0: the gradient does not pass",
    "masked_positive": "masked and Â > 0",
    "masked_negative": "masked and Â < 0",
    "disagreement": "outside, and exactly one of this rule and the ratio rule masks it",
    "clip_fraction": "clip-higher (0.2, 0.28) would mask it",
    "capped": "r > `ratio_cap` and the gradient passes",
    "dual_clipped": "Â < 0 and r > `dual` (clip-higher with a dual clip)",
    "missing": "left out: the behaviour policy's numbers are NaN (over all response tokens)",
    "ppo_kl": "log μ_k − log π_k, nats",
    "ratio": "r",
    "divergence": "D, nats or a probability",
    "probability_shift": "|π_k − μ_k|",
    "weight": "w",
}
"""What the numerator of each metric sums over the response tokens; all but `missing` count the
tokens that took part in their denominator."""


class Metric(NamedTuple):
    """A share or a mean before it is divided.

    Attributes
    ----------
    numerator, denominator : Tensor
        Detached scalars, float64 where the device has it.
    """

    numerator: Tensor
    denominator: Tensor

    @property
    def value(self) -> float:
        """The quotient; NaN over no tokens. Waits for the device."""
        count = float(self.denominator)
        return float(self.numerator) / count if count else float("nan")


def measure(
    judged: Judged,
    weight: Tensor,
    log_ratio: Tensor,
    *,
    threshold: tuple[float, float],
    divergence: str,
    ratio_cap: float | None,
    beyond: Tensor | None,
) -> dict[str, Metric]:
    """Sum every metric of `MEANINGS` that can be known.

    Parameters
    ----------
    judged
        The tokens.
    weight, log_ratio
        w, and log r as the loss has it; shape (batch · token,).
    threshold
        δ where Â ≤ 0, and where Â > 0.
    divergence
        The region's.
    ratio_cap
        The loss's, None for none.
    beyond
        Tokens that a dual clip stops; shape (batch · token,).
    """
    with torch.no_grad():
        tokens, usable = judged.tokens, judged.usable
        low, high = threshold
        count = usable.sum().to(weight.dtype)
        distance = judged.divergence(divergence)
        outside = distance > torch.where(judged.positive, torch.full_like(distance, high), low)
        masked = weight <= 0
        pi, mu = tokens.policy_logprob.exp(), tokens.behavior_logprob.exp()
        found: dict[str, Tensor] = {
            "outside": outside,
            "masked": masked,
            "masked_positive": masked & judged.positive,
            "masked_negative": masked & (tokens.advantage < 0),
            "clip_fraction": ~RULES["clip-higher"].keeps(tokens, check=False),
            "ppo_kl": -log_ratio,
            "ratio": log_ratio.exp(),
            "divergence": distance,
            "probability_shift": (pi - mu).abs(),
            "weight": weight,
        }
        if ratio_cap is not None:
            found["capped"] = (log_ratio.exp() > ratio_cap) & ~masked
        if beyond is not None:
            found["dual_clipped"] = beyond
        if tokens.support is not None:
            further = tokens.advantage * tokens.ratio_direction > 0
            found["disagreement"] = outside & (further != masked)
        zero = torch.zeros_like(weight)
        sums = {
            name: Metric(torch.where(usable, value.to(weight.dtype), zero).sum(), count)
            for name, value in found.items()
        }
        response = judged.response.sum().to(weight.dtype)
        return sums | {"missing": Metric(response - count, response)}


def add_metrics(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Add the metrics of several micro-batches.

    Parameters
    ----------
    metrics
        What `trust_region_loss` gave for each.

    Returns
    -------
    dict of str to Metric
        Sums of numerators and of denominators; a name that one of them lacks is left out.
    """
    every = list(metrics)
    if not every:
        return {}
    names = [name for name in every[0] if all(name in other for other in every)]
    return {
        name: Metric(
            torch.stack([one[name].numerator for one in every]).sum(),
            torch.stack([one[name].denominator for one in every]).sum(),
        )
        for name in names
    }
