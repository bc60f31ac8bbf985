"""Meshes of two axes, on two ranks (the first axis has length 1) or four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from deltad.dumps import Dump, Metadata, check_dump
from deltad.probes import Recorder
from tests.probes.tiny import TOP_K

from .small import small
from .tensor_parallel import sgd
from .training import Trained, batches_of, local_weights, same, train


def both(model: Any) -> Trained:
    mesh = init_device_mesh(
        "cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
    )
    parallelize_module(
        model, mesh["tensor"], {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return Trained(model, sgd(model))


def hybrid(model: Any) -> Trained:
    mesh = init_device_mesh(
        "cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards")
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trained(model, sgd(model))


def _recorded(out: Path, prepare: Any, data_rank: int) -> Dump:
    results = []
    mine = batches_of(small(), data_rank)
    for probed in (False, True):
        trained = prepare(small())
        if probed:
            with Recorder(
                out, seed=0, metadata_for=lambda arm: Metadata(top_k=TOP_K, vocab_size=96)
            ) as recorder:
                train(trained, mine, recorder)
        else:
            train(trained, mine, None)
        results.append(local_weights(trained.model))
    same(*results)
    distributed.barrier()
    assert check_dump(out) == []
    return Dump.open(out)


def tensor_parallel_within_fsdp(out: Path) -> None:
    dump = _recorded(out / "RUN", both, distributed.get_rank() // 2)
    pairs = distributed.get_world_size() // 2
    assert [(part.rank, part.metadata.ranks) for part in dump.parts] == [
        (n, pairs) for n in range(pairs)
    ]


def hybrid_sharding(out: Path) -> None:
    dump = _recorded(out / "RUN", hybrid, distributed.get_rank())
    world = distributed.get_world_size()
    assert [(part.rank, part.metadata.ranks) for part in dump.parts] == [
        (n, world) for n in range(world)
    ]
