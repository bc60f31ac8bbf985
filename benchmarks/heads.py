"""Heads of the sizes that the goals name, with inputs that look like a language model's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deltad.probes.readout.precision import multiplies_bfloat16

IDS: Final = 21
"""K + 1: the behavior policy's 20 likeliest ids and the sampled token."""

_SPREAD: Final = 2.0  # standard deviation of the logits, nats


@dataclass(frozen=True)
class Size:
    """A head and how many tokens it reads.

    Attributes
    ----------
    hidden, vocab, tokens : int
        H, V and T.
    """

    hidden: int
    vocab: int
    tokens: int

    def __str__(self) -> str:
        return f"H{self.hidden} V{self.vocab}"

    @property
    def logits(self) -> int:
        """T · V."""
        return self.tokens * self.vocab


@dataclass(frozen=True)
class Inputs:
    """What a head takes, in one dtype."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor

    @classmethod
    def make(cls, size: Size, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        """Draw weights and hidden states such that one id of each token has about half the mass.

        The others asked for are drawn at random: no head's time depends on which they are.
        """
        generator = torch.Generator(device).manual_seed(0)
        drawn = {"generator": generator, "device": device}
        weight = torch.randn(size.vocab, size.hidden, **drawn)  # type: ignore[call-overload]
        weight *= _SPREAD / math.sqrt(size.hidden)
        hidden = torch.randn(size.tokens, size.hidden, **drawn)  # type: ignore[call-overload]
        ids = torch.randint(0, size.vocab, (size.tokens, IDS), **drawn)  # type: ignore[call-overload]
        likely = weight[ids[:, 0]]
        height = math.log(size.vocab) + _SPREAD**2 / 2  # log Σ e^z of the others
        hidden += height * likely / likely.square().sum(1, keepdim=True)
        return cls(hidden.to(dtype), weight.to(dtype), ids)

    def of_tokens(self, tokens: int) -> Inputs:
        """The first tokens alone."""
        return Inputs(self.hidden[:tokens], self.weight, self.ids[:tokens])


def arithmetic(dtype: torch.dtype) -> str:
    """By which arithmetic this processor multiplies a readout's inputs of a dtype."""
    if dtype == torch.bfloat16 and multiplies_bfloat16():
        amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        return f"bf16 arithmetic ({'AMX' if amx else 'AVX512-BF16'})"
    return f"float32 arithmetic ({torch.backends.cpu.get_cpu_capability()})"
