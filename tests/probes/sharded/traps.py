"""What corrupts sharded training, and that the probe does none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from deltad.probes import ProbeError, UpdateProbe
from tests.probes.tiny import Sink, backward, surrogate

from .fsdp2 import sharded
from .small import small
from .training import Trained, batches_of, local_weights, train


def a_forward_within_the_step(out: Path) -> None:
    """Without the probe: what a forward in the optimizer's own hook does, if nothing reshards."""
    rank = distributed.get_rank()
    mine = batches_of(small(), rank)
    results = []
    for naive in (False, True):
        trained = sharded(small())
        if naive:

            def look(*_: Any, trained: Trained = trained) -> None:
                with torch.no_grad():
                    trained.model(**mine[0][0].inputs)

            trained.optimizer.register_step_pre_hook(look)
        train(trained, mine, None)
        trained.model.reshard()
        results.append(local_weights(trained.model))
    assert not all(torch.equal(each, results[1][name]) for name, each in results[0].items())


def gradients_do_not_leak(out: Path) -> None:
    """The model's own `zero_grad` reaches every gradient after a step under the probe."""
    rank = distributed.get_rank()
    (first,), (second,) = batches_of(small(), rank)
    found = []
    for probed in (False, True):
        trained = sharded(small())
        probe = UpdateProbe(trained.model, trained.optimizer, Sink())
        with probe:
            if probed:
                probe.expect(first.tokens)
            backward(surrogate(trained.model(**first.inputs).logits, first))
            trained.optimizer.step()
            trained.model.zero_grad()
            assert all(each.grad is None for each in trained.model.parameters())
            backward(surrogate(trained.model(**second.inputs).logits, second))
            found.append(
                {
                    name: each.grad.to_local().clone()
                    for name, each in trained.model.named_parameters()
                }
            )
            probe.discard()
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name]), name


def the_next_forward_has_the_new_weights(out: Path) -> None:
    rank = distributed.get_rank()
    (first,), (second,) = batches_of(small(), rank)
    found = []
    for probed in (False, True):
        trained = sharded(small())
        with UpdateProbe(trained.model, trained.optimizer, Sink()) as probe:
            if probed:
                probe.expect(first.tokens)
            backward(surrogate(trained.model(**first.inputs).logits, first))
            trained.optimizer.step()
            with torch.no_grad():
                found.append(trained.model(**second.inputs).logits.clone())
    assert torch.equal(*found)


def fsdp1_is_refused(out: Path) -> None:
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            small(), use_orig_params=True, device_id=torch.device("cpu")
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ProbeError, match="FullyShardedDataParallel: FSDP1 has no way to give"):
        UpdateProbe(model, optimizer, Sink())


def the_ladder_is_refused(out: Path) -> None:
    from deltad.probes import Ladder

    trained = sharded(small())
    with pytest.raises(ProbeError, match="the ladder differentiates the whole model"):
        UpdateProbe(trained.model, trained.optimizer, Sink(), ladder=Ladder())
