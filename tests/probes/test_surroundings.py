"""The probe in processes that allow TF32, or in which another thread multiplies."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from deltad.probes import UpdateProbe
from deltad.probes.readout import precision

from .precisions import MKLDNN, another_thread, environment, state
from .tiny import Sink, batch, same_bits, tiny, weights
from .training import adamw, step

__all__ = ["environment"]


@pytest.mark.parametrize("keep", ["all", "near"])
def test_training_and_setting_are_as_without_the_probe(environment: str, keep: str) -> None:
    before, trained = state(), []
    for probed in (False, True):
        model = tiny()
        batches = [batch(model, seed=seed) for seed in range(2)]
        optimizer = adamw(model)
        if probed:
            with UpdateProbe(model, optimizer, Sink(), keep=keep) as probe:  # type: ignore[arg-type]
                step(model, optimizer, batches, probe)
        else:
            step(model, optimizer, batches)
        trained.append(weights(model))
    assert same_bits(*trained)
    assert state() == before


@pytest.mark.parametrize("appears", ["before", "between the steps", "never"])
def test_a_step_of_length_zero_changes_no_token_next_to_a_thread(
    monkeypatch: pytest.MonkeyPatch, appears: str
) -> None:
    """Pre and post come from one arithmetic, also once the thread is gone again."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    model = tiny().bfloat16()
    each = batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        if appears == "before":
            with another_thread():
                step(model, optimizer, [each], probe)
        step(model, optimizer, [each], probe)
        if appears == "between the steps":
            with another_thread():
                step(model, optimizer, [each], probe)
        step(model, optimizer, [each], probe)
    assert np.array_equal(sink.deltas(), np.zeros_like(sink.deltas()))


def _train(weight: Tensor, steps: int, seen: set[str] | None = None) -> Tensor:
    """Float32 products, each of which a lowered precision would change."""
    for _ in range(steps):
        if seen is not None:
            seen.add(MKLDNN.matmul.fp32_precision)
        weight = torch.tanh(weight @ weight.t())
    return weight


def test_another_thread_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    expected = _train(start, 400)
    model = tiny().bfloat16()
    each = batch(model)
    optimizer = adamw(model)
    found: list[Tensor] = []
    seen: set[str] = set()
    ready, over = threading.Event(), threading.Event()

    def work() -> None:
        torch.set_num_threads(1)
        ready.set()
        while not over.is_set():
            found.append(_train(start, 400, seen))

    with UpdateProbe(model, optimizer, Sink()) as probe:
        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
        for _ in range(3):
            step(model, optimizer, [each], probe)
        over.set()
        thread.join()
    assert seen == {"none"}
    assert all(torch.equal(each, expected) for each in found)
