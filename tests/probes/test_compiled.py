"""The laws of the probe for models within torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltad.probes import ProbeError, UpdateProbe

from .tiny import Sink, backward, batch, same_bits, surrogate, tiny, weights

pytestmark = [
    # The compiler's own imports and defaults warn.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model: nn.Module, backend: str) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
    return compiled


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def layers(model: nn.Module, backend: str) -> nn.Module:
    inner: Any = model.model
    for layer in inner.layers:
        layer.compile(backend=backend)
    return model


def body(model: nn.Module, backend: str) -> nn.Module:
    model.model = torch.compile(model.model, backend=backend)  # type: ignore[arg-type, assignment]
    return model


Compile = Callable[[nn.Module, str], nn.Module]
WAYS: list[Compile] = [whole, in_place, layers, body]


def run(
    way: Compile, backend: str, *, probed: bool, lr: float = 1e-2, warm: bool = False
) -> tuple[nn.Module, Sink, int]:
    """Two steps of two micro-batches; `warm` compiles before the probe is there."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny("llama", attention_dropout=0.2, num_hidden_layers=1)
    batches = [batch(model, seed=seed) for seed in range(2)]
    called = way(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if warm:
        called(**batches[0].inputs)
    torch.manual_seed(1)
    sink = Sink()
    probe = UpdateProbe(called, optimizer, sink) if probed else None
    with probe or nullcontext():
        for _ in range(2):
            optimizer.zero_grad()
            for each in batches:
                if probe is not None:
                    probe.expect(each.tokens)
                backward(surrogate(called(**each.inputs).logits, each))
            optimizer.step()
    if probe is not None:
        assert probe.readout_metadata["forward"] == "matching"
        assert probe.readout_metadata["verified"] is True
    return model, sink, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(way: Compile, backend: str, *, warm: bool) -> None:
    alone, _, graphs = run(way, backend, probed=False, warm=warm)
    probed, sink, graphs_with_probe = run(way, backend, probed=True, warm=warm)
    assert same_bits(weights(alone), weights(probed))
    assert graphs == graphs_with_probe > 0
    assert len(sink.calls) == 4
    assert np.abs(sink.deltas()).max() > 1e-3
    _, still, _ = run(way, backend, probed=True, lr=0.0)
    assert not still.deltas().any()


@pytest.mark.parametrize(
    ("way", "warm"), [(whole, False), pytest.param(in_place, True, marks=pytest.mark.slow)]
)
def test_weights_are_bit_identical_and_a_step_of_length_zero_changes_nothing(
    way: Compile, warm: bool
) -> None:
    """Traced by the compiler and run by eager kernels: seconds rather than minutes."""
    check(way, "eager", warm=warm)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_same_with_generated_kernels(way: Compile, warm: bool) -> None:
    check(way, "inductor", warm=warm)


def test_the_hooks_and_the_compiled_call_are_as_before() -> None:
    model = in_place(tiny("llama"), "eager")
    compiled_call = model._compiled_call_impl
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with UpdateProbe(model, optimizer, Sink()):
        assert model._compiled_call_impl is not compiled_call
    assert model._compiled_call_impl is compiled_call
    outer = whole(tiny("llama"), "eager")
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    with UpdateProbe(outer, optimizer, Sink()):
        assert len(outer._forward_hooks) == 1
    for part in outer.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


def test_pre_from_the_training_forward_is_refused() -> None:
    model = whole(tiny("llama"), "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ProbeError, match="cannot be 'training' for a compiled model"):
        UpdateProbe(model, optimizer, Sink(), pre="training")


def test_a_compiled_function_around_the_model_is_told_from_the_model() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def loss() -> torch.Tensor:
        return surrogate(model(**each.inputs).logits, each)

    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        loss().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(ProbeError, match="the model given to the probe was not called"):
            optimizer.step()
        probe.discard()
