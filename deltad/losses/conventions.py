"""Where trainers differ from the paper, and an option for each difference.

The masks of the field are written down alike and computed a little differently. Everything that
was found to change a number is one field of a `Convention`; `docs/losses.md` holds them in a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from deltad.masks import Rule

Value = Literal["ratio", "logprob", "clip"]
"""What a loss reads; see `trust_region_loss`."""

TRL_BINARY_GAP: Final = 1e-7
"""TRL's DPPO keeps probabilities this far below 1 in the second term of the binary KL."""

VERL_BINARY_SHIFT: Final = 1e-8
"""verl's `dppo_kl` adds this to both 1 − μ_k and 1 − π_k."""

VERL_LOG_RATIO: Final = 20.0
"""verl clamps log r to ± this before the exponential, in nats."""


@dataclass(frozen=True)
class Convention:
    """One way to write the masks down.

    Attributes
    ----------
    name : str
        As `trust_region_loss` takes it.
    value : {"ratio", "logprob"}
        What the loss reads where the criterion is not the clip.
    clip_value : {"ratio", "clip"}
        What it reads where the criterion is the clip.
    log_ratio_bound : float, optional
        Bound of |log π_k − log μ_k| before the exponential, in nats.
    binary_kl : callable of (log μ_k, log π_k) to D, optional
        The binary KL in place of deltad's, whose tail is max(1 − π_k, 1e-12).
    source : str
        Whose it is and which version was run against it.
    """

    name: str
    value: Value
    clip_value: Value
    source: str
    log_ratio_bound: float | None = None
    binary_kl: Callable[[Tensor, Tensor], Tensor] | None = None

    def adapt(self, rule: Rule) -> Rule:
        """The criterion as this convention computes its proximity."""
        if self.binary_kl is None or rule.name != "binary-kl":
            return rule
        divergence = self.binary_kl
        return dataclasses.replace(
            rule,
            region=lambda tokens: divergence(tokens.behavior_logprob, tokens.policy_logprob),
        )


def _trl_binary_kl(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """μ (log μ − log π) + (1 − μ) log((1 − μ)/(1 − π)), both kept below 1 in the logarithms."""
    mu, pi = log_mu.exp(), log_pi.exp()
    rest_mu = torch.log1p(-mu.clamp(max=1 - TRL_BINARY_GAP))
    rest_pi = torch.log1p(-pi.clamp(max=1 - TRL_BINARY_GAP))
    return mu * (log_mu - log_pi) + (1 - mu) * (rest_mu - rest_pi)


def _verl_binary_kl(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """μ (log μ − log π) + (1 − μ) log((1 − μ + 1e-8)/(1 − π + 1e-8))."""
    rest_mu = 1 - log_mu.exp() + VERL_BINARY_SHIFT
    rest_pi = 1 - log_pi.exp() + VERL_BINARY_SHIFT
    return log_mu.exp() * (log_mu - log_pi) + (1 - log_mu.exp()) * (rest_mu / rest_pi).log()


CONVENTIONS: Final[Mapping[str, Convention]] = MappingProxyType(
    {
        convention.name: convention
        for convention in (
            Convention("paper", "ratio", "ratio", "arXiv:2607.10848v1, and deltad's analysis"),
            Convention(
                "trl",
                "logprob",
                "clip",
                "TRL: GRPOTrainer 1.16, the DPPO trainer of 1.8",
                binary_kl=_trl_binary_kl,
            ),
            Convention(
                "verl",
                "logprob",
                "clip",
                "verl 0.9: vanilla, dppo_kl, dppo_tv",
                log_ratio_bound=VERL_LOG_RATIO,
                binary_kl=_verl_binary_kl,
            ),
        )
    }
)
"""Every convention by name; "paper" is the default everywhere."""


def convention(name: str) -> Convention:
    """Look a convention up by name.

    Raises
    ------
    ValueError
        No such name; the message lists those that exist.
    """
    if name not in CONVENTIONS:
        raise ValueError(f"there is no convention {name!r}; choose one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]
