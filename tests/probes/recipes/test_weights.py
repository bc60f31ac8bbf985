"""Rounding of weights, against the grids of the number formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltad.probes.recipes.weights import round_weights


def layer() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(64, 32)
    with torch.no_grad():
        made.weight.mul_(torch.logspace(-3, 2, 32)[:, None])
        made.weight[5] = 0
    return made


def test_exact_weights_stay() -> None:
    rounded = layer()
    round_weights(rounded, "exact")
    assert torch.equal(rounded.weight, layer().weight)


@pytest.mark.parametrize(("kind", "error"), [("bf16", 2**-7), ("fp8", 2**-3)])
def test_matrices_lose_what_the_format_loses_and_biases_nothing(kind: str, error: float) -> None:
    rounded, before = layer(), layer()
    round_weights(rounded, kind)
    assert torch.equal(rounded.bias, before.bias)
    off = (rounded.weight - before.weight).abs()
    # Half a unit in the last place, and the subnormals of a row scaled to 448.
    smallest = before.weight.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert (off <= before.weight.abs() * error / 2 * 1.001 + smallest).all()
    assert (off > before.weight.abs() * error / 16).float().mean() > 0.5
    assert torch.equal(rounded.weight[5], torch.zeros(64))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_rounding_twice_is_rounding_once(kind: str) -> None:
    once, twice = layer(), layer()
    round_weights(once, kind)
    round_weights(twice, kind)
    round_weights(twice, kind)
    torch.testing.assert_close(once.weight, twice.weight, rtol=1e-6, atol=0)
