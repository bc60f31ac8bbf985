"""Rounded weights in the forward, master weights in the step."""

from __future__ import annotations

import pytest
import torch

from deltad.probes.recipes.weights import round_weights
from deltad.probes.training.precision import RoundedTraining


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


@pytest.mark.parametrize("kind", ["exact", "bf16", "fp8"])
def test_gradients_are_taken_at_rounded_weights_and_applied_to_the_master(kind: str) -> None:
    model, reference = linear(), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 5)
    with RoundedTraining(model, optimizer, kind) as training:
        for _ in range(3):
            master = {name: value.clone() for name, value in training.master.items()}
            with torch.no_grad():
                for name, value in reference.named_parameters():
                    value.copy_(master[name])
            round_weights(reference, kind)
            assert torch.equal(model.weight, reference.weight)
            for each in (model, reference):
                each.zero_grad()
                each(inputs).square().sum().backward()
            optimizer.step()
            for name, value in reference.named_parameters():
                assert value.grad is not None
                wanted = master[name] - 0.1 * value.grad
                assert torch.allclose(training.master[name], wanted, atol=1e-7)
        kept = {name: value.clone() for name, value in training.master.items()}
    for name, value in model.named_parameters():
        assert torch.equal(value, kept[name])
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
