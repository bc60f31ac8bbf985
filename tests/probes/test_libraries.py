"""Accelerate and Lightning Fabric, as one trains with them on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltad.probes import UpdateProbe

from .tiny import Batch, Sink, batch, same_bits, surrogate, tiny, weights
from .training import adamw


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerated(
    *, probed: bool, precision: str, accumulate: int, scaler: Any = None, overflow: int = -1
) -> tuple[Any, Sink, UpdateProbe | None]:
    """Four micro-batches; a gradient of one of them may overflow."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    model = tiny("llama")
    batches = [batch(model, seed=seed) for seed in range(4)]
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    bare = adamw(model)
    prepared, optimizer = accelerator.prepare(model, bare)
    if scaler is not None:  # Accelerator makes its own on GPUs only
        optimizer = AcceleratedOptimizer(bare, scaler=scaler)
    sink = Sink()
    probe = UpdateProbe(prepared, optimizer, sink) if probed else None
    with probe or nullcontext():
        for index, each in enumerate(batches):
            with accelerator.accumulate(prepared):
                if probe is not None:
                    probe.expect(each.tokens)
                loss = surrogate(prepared(**each.inputs).logits, each)
                accelerator.backward(loss if scaler is None else scaler.scale(loss))
                if index == overflow:
                    next(model.parameters()).grad.fill_(torch.inf)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(prepared), sink, probe


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    model, sink, _ = accelerated(probed=True, precision=precision, accumulate=2)
    plain, _, _ = accelerated(probed=False, precision=precision, accumulate=2)
    assert same_bits(weights(model), weights(plain))
    assert [set(rows["step"]) for _, rows in sink.calls] == [{0}, {0}, {1}, {1}]
    assert np.abs(sink.deltas()).max() > 1e-3


def test_a_step_that_accelerate_skips_is_dropped() -> None:
    results = []
    for probed in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, sink, probe = accelerated(
            probed=probed, precision="no", accumulate=1, scaler=scaler, overflow=1
        )
        assert scaler.get_scale() == 2.0
        results.append(weights(model))
        if probe is not None:
            assert (probe.dropped_steps, probe.step) == (1, 3)
            assert [set(rows["step"]) for _, rows in sink.calls] == [{0}, {1}, {2}]
    assert same_bits(*results)


def with_fabric(
    *, probed: bool, precision: str, overflow: int = -1
) -> tuple[nn.Module, Sink, UpdateProbe | None, list[Batch]]:
    """Four micro-batches, two a step."""
    import lightning_fabric
    from lightning_fabric.plugins import MixedPrecision

    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        options = {
            "plugins": MixedPrecision(
                "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0)
            )
        }
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, **options)
    model = tiny("llama")
    batches = [batch(model, seed=seed) for seed in range(4)]
    prepared, optimizer = fabric.setup(model, adamw(model))
    sink = Sink()
    probe = UpdateProbe(prepared, optimizer, sink) if probed else None
    with probe or nullcontext():
        for index, each in enumerate(batches):
            last = index % 2 == 1
            with fabric.no_backward_sync(prepared, enabled=not last):
                if probe is not None:
                    probe.expect(each.tokens)
                fabric.backward(surrogate(prepared(**each.inputs).logits, each))
            if last:
                if index == overflow:
                    next(model.parameters()).grad.fill_(torch.inf)
                optimizer.step()
                optimizer.zero_grad()
    return model, sink, probe, batches


@pytest.mark.filterwarnings("ignore:.*no_backward_sync")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric(precision: str) -> None:
    model, sink, probe, _ = with_fabric(probed=True, precision=precision)
    plain, *_ = with_fabric(probed=False, precision=precision)
    assert same_bits(weights(model), weights(plain))
    assert [set(rows["step"]) for _, rows in sink.calls] == [{0}, {0}, {1}, {1}]
    assert np.abs(sink.deltas()).max() > 1e-3
    assert probe is not None
    assert probe.readout_metadata["verified"] is True


@pytest.mark.filterwarnings("ignore:.*no_backward_sync")
def test_a_step_that_fabric_skips_is_dropped() -> None:
    model, sink, probe, batches = with_fabric(probed=True, precision="16-mixed", overflow=1)
    plain, *_ = with_fabric(probed=False, precision="16-mixed", overflow=1)
    assert same_bits(weights(model), weights(plain))
    assert probe is not None
    assert (probe.dropped_steps, probe.step) == (1, 1)
    assert probe.dropped_tokens == sum(int(each.tokens.response_mask.sum()) for each in batches[:2])
    assert [set(rows["step"]) for _, rows in sink.calls] == [{0}, {0}]
