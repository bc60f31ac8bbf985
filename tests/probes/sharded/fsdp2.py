"""Models under fully_shard on two ranks."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from deltad.probes import UpdateProbe, branch
from tests.probes.tiny import Sink, backward, surrogate, tiny

from .small import small
from .training import Trained, batches_of, compare, local_weights, same, sgd, train


def sharded(model: Any, *, layers: bool = True, head: bool = False, **options: Any) -> Trained:
    if layers:
        for layer in model.model.layers:
            fully_shard(layer, **options)
    if head:
        fully_shard(model.lm_head, **options)
    fully_shard(model, **options)

    @contextmanager
    def accumulating(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        yield

    return Trained(model, sgd(model), accumulating)


def by_layers(out: Path) -> None:
    compare(sharded)


def tied_head(out: Path) -> None:
    compare(sharded, build=partial(small, tied=True))


def of_transformers(out: Path) -> None:
    for family in ("llama", "qwen3", "gemma2"):
        compare(partial(sharded, head=family == "llama"), build=partial(_doubled, family))


def _doubled(family: str) -> Any:
    return tiny(family).double()


def accumulation(out: Path) -> None:
    compare(sharded, micro=2)


def gathered_through_backward(out: Path) -> None:
    compare(partial(sharded, reshard_after_forward=False), micro=2)


def resharded_everywhere(out: Path) -> None:
    compare(partial(sharded, head=True, reshard_after_forward=True), micro=2)


def no_tokens_on_one_rank(out: Path) -> None:
    for empty in (0, 1):
        compare(sharded, empty=empty)


def checkpointing_and_dropout(out: Path) -> None:
    # The reference's generator sees other draws.
    from tests.probes.training import build

    compare(sharded, build=partial(build, "llama", checkpointing=False), dump=False)


def mixed_precision(out: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    probe = compare(
        partial(sharded, mp_policy=policy), build=partial(small, dtype=torch.float32), dump=False
    )
    assert probe.readout_metadata["head_dtype"] == "bfloat16"
    assert probe.readout_metadata["hidden_dtype"] == "bfloat16"
    assert probe.readout_metadata["accumulation"] == "float32"


def nothing_stays_gathered(out: Path) -> None:
    trained = sharded(small())
    mine = batches_of(small(), distributed.get_rank())
    train(trained, mine, Sink())
    for name, each in trained.model.named_parameters():
        assert hasattr(each, "device_mesh"), name
        assert each.grad is None, name


def arms_from_one_state(out: Path) -> None:
    """Several updates from one state; that of length zero changes no token."""
    ((each,),) = batches_of(small(), distributed.get_rank(), steps=1)
    sink, trained = Sink(), sharded(small())

    def update(arm: str) -> None:
        probe.expect(each.tokens)
        backward(surrogate(trained.model(**each.inputs).logits, each))
        trained.optimizer.step()
        trained.optimizer.zero_grad()

    with UpdateProbe(trained.model, trained.optimizer, sink) as probe:
        branch(trained.model, trained.optimizer, ["none", "zero-step"], update, probe=probe)
    assert not sink.deltas("zero-step").any()
    assert np.abs(sink.deltas("none")).max() > 1e-3
    alone = sharded(small())
    train(alone, [[each]], None)
    same(local_weights(trained.model), local_weights(alone.model))


def forwards_stay_whole(out: Path) -> None:
    """Ranks that keep other tokens, one of them none, make the same forwards."""
    rank = distributed.get_rank()
    mine = batches_of(small(), rank)
    every, some = Sink(), Sink()
    train(sharded(small()), mine, every)
    trained = sharded(small())
    near = 0.05 if rank == 0 else 1e6
    trained.options.update(keep="near", near=near, share_prompts=True)
    probe = train(trained, mine, some)
    assert probe is not None
    said = probe.readout_metadata
    assert said["cut"]["forward"] == "whole"
    assert said["cut"]["reason"] == "ranks make their forwards together"
    assert said["exact"]
    if rank:
        assert not some.calls
        return
    kept = [
        {name: each[_index(rows, few)] for name, each in rows.items()}
        for (_, rows), (_, few) in zip(every.calls, some.calls, strict=True)
    ]
    assert 0 < sum(len(rows["step"]) for rows in kept) < len(every.column("step"))
    for rows, (_, few) in zip(kept, some.calls, strict=True):
        for name, values in rows.items():
            np.testing.assert_array_equal(values, few[name], err_msg=name)


def _index(rows: dict[str, Any], few: dict[str, Any]) -> list[int]:
    """Where the rows that were kept are among all."""
    key = ("sequence", "position")
    places = list(zip(*(rows[name].tolist() for name in key), strict=True))
    return [places.index(each) for each in zip(*(few[name].tolist() for name in key), strict=True)]
