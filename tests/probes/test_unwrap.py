"""Wrappers of models and optimizers: taken off, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltad.probes import ProbeError, UpdateProbe

from .tiny import Sink, backward, batch, same_bits, surrogate, tiny, weights
from .training import adamw


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel() -> None:
    def train(*, probed: bool, lr: float = 1e-2) -> tuple[Any, Sink]:
        model = tiny("llama", attention_dropout=0.2)
        batches = [batch(model, seed=seed) for seed in range(2)]
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr)
        sink = Sink()
        torch.manual_seed(2)
        probe = UpdateProbe(wrapped, optimizer, sink) if probed else None
        if probe is not None:
            probe.__enter__()
        for each in batches:
            optimizer.zero_grad()
            if probe is not None:
                probe.expect(each.tokens)
            backward(surrogate(wrapped(**each.inputs).logits, each))
            optimizer.step()
        if probe is not None:
            probe.__exit__(None, None, None)
        return model, sink

    model, sink = train(probed=True)
    assert same_bits(weights(model), weights(train(probed=False)[0]))
    assert np.abs(sink.deltas()).max() > 1e-3
    assert not train(probed=True, lr=0.0)[1].deltas().any()


def test_data_parallel_is_refused() -> None:
    model = nn.DataParallel(tiny())
    with pytest.raises(ProbeError, match="DataParallel runs replicas in threads"):
        UpdateProbe(model, adamw(model), Sink())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FullyShardedDataParallel", "FSDP1 has no way to give weights back"),
        ("DeepSpeedEngine", "DeepSpeed steps inside backward"),
    ],
)
def test_sharded_models_are_refused_by_name(name: str, message: str) -> None:
    kind = type(name, (nn.Module,), {})
    model = nn.Sequential(kind(), nn.Linear(2, 2))
    with pytest.raises(ProbeError, match=message):
        UpdateProbe(model, adamw(model), Sink())


def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ProbeError, match="weight is on the meta device"):
        UpdateProbe(model, adamw(model), Sink())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = tiny()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ProbeError, match="group 0 of the optimizer holds 2 parameters"):
        UpdateProbe(model, optimizer, Sink())


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ProbeError, match=r"must be a torch\.optim\.Optimizer, got object"):
        UpdateProbe(tiny(), object(), Sink())


def test_an_optimizer_of_some_of_the_parameters_is_enough() -> None:
    model = tiny()
    each = batch(model)
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        optimizer.step()
    assert np.abs(sink.deltas()).max() > 1e-4
