"""A head of which each rank holds the rows of some ids."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from deltad.dumps import Dump, Metadata, check_dump
from deltad.probes import Recorder
from deltad.probes.readout import Readout, read_logits, readout
from deltad.probes.sharded.vocab import VocabShard
from tests.probes.tiny import TOP_K, tiny

from .small import Small, small
from .training import Trained, batches_of, compare, train

UNEVEN = 97


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Plain and distributed tensors cannot go through one kernel.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)


def with_plan(model: Any, plan: dict[str, Any], **options: Any) -> Trained:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    parallelize_module(model, mesh, plan)
    return Trained(model, sgd(model), **options)


def full_logits(model: Any) -> Trained:
    return with_plan(model, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def distributed_logits(model: Any) -> Trained:
    return with_plan(
        model,
        {"lm_head": ColwiseParallel(use_local_output=False)},
        logits=lambda output: output.logits.full_tensor(),
    )


def local_logits(model: Any) -> Trained:
    def joined(output: Any) -> Tensor:
        local, weight = output.logits, model.lm_head.weight
        shape = torch.Size([*local.shape[:2], weight.shape[0]])
        whole: Tensor = DTensor.from_local(
            local,
            weight.device_mesh,
            [Shard(2)],
            shape=shape,
            stride=(shape[1] * shape[2], shape[2], 1),
        ).full_tensor()
        return whole

    return with_plan(model, {"lm_head": ColwiseParallel()}, logits=joined)


def every_layout(out: Path) -> None:
    for prepare in (full_logits, distributed_logits, local_logits):
        compare(prepare, shared=True)


def uneven(out: Path) -> None:
    for prepare in (full_logits, local_logits):
        compare(prepare, build=partial(small, UNEVEN), shared=True)


def body_alone(out: Path) -> None:
    plan = {f"model.layers.{index}.up": ColwiseParallel() for index in range(2)}
    plan |= {f"model.layers.{index}.down": RowwiseParallel() for index in range(2)}  # type: ignore[misc]
    compare(lambda model: with_plan(model, plan), shared=True)


def _llama(model: Any) -> Trained:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")  # type: ignore[assignment]
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for index in range(2):
        plan |= {f"model.layers.{index}.{name}": ColwiseParallel() for name in columns}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{index}.{name}"] = RowwiseParallel()
    return with_plan(model, plan)


def of_transformers(out: Path) -> None:
    compare(_llama, build=lambda: tiny("llama").double(), shared=True)


def one_part_for_all(out: Path) -> None:
    model = small()
    mine = batches_of(model, 0)
    with Recorder(
        out / "RUN", seed=0, metadata_for=lambda arm: Metadata(top_k=TOP_K, vocab_size=96)
    ) as recorder:
        train(local_logits(model), mine, recorder)
    distributed.barrier()
    if distributed.get_rank() == 0:
        (part,) = Dump.open(out / "RUN").parts
        assert (part.rank, part.metadata.ranks) == (0, 1)
        assert check_dump(out / "RUN") == []


class _Enter(torch.autograd.Function):
    """What all ranks use: gradients add up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)
        return gradient


class _Join(torch.autograd.Function):
    """All ids' logits from each rank's."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard) -> Tensor:
        ctx.columns = slice(shard.first, shard.first + local.shape[-1])
        flat = shard.gather(local.flatten(0, -2))
        return flat.view(*local.shape[:-1], shard.total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[..., ctx.columns].contiguous(), None


class PlainShard(nn.Module):
    """Rows of some ids as a plain parameter, as Megatron keeps them."""

    def __init__(self, head: nn.Linear, first: int, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight[first:last].detach().clone())
        self.bias = nn.Parameter(head.bias[first:last].detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(_Enter.apply(hidden), self.weight, self.bias)  # type: ignore[no-untyped-call]


def plain_shards(model: Small, cuts: tuple[int, ...]) -> Trained:
    rank = distributed.get_rank()
    shard: Any = PlainShard(model.lm_head, cuts[rank], cuts[rank + 1])
    model.lm_head = shard
    group = distributed.group.WORLD
    sizes = tuple(b - a for a, b in pairwise(cuts))
    ids = VocabShard(group, sizes, cuts[rank])
    return Trained(
        model,
        sgd(model),
        logits=lambda output: _Join.apply(output.logits, ids),  # type: ignore[no-untyped-call]
        options={"tp_group": group},
    )


def megatron(out: Path) -> None:
    for cuts in ((0, 48, 96), (0, 61, 96)):
        compare(partial(plain_shards, cuts=cuts), shared=True)


def readout_of_shards(out: Path) -> None:
    """Every number of a readout: padding, a rank without rows, a pivot far too low."""
    rank = distributed.get_rank()
    group = distributed.group.WORLD
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        generator = torch.Generator().manual_seed(1)

        def noise(
            *shape: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype
        ) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        hidden, weight, bias = noise(7, 16), noise(97, 16) * 2, noise(97)
        weight[95] = 900 * hidden[2] / hidden[2].norm()  # far above the ids of the third token
        low, high = noise(7, 2), noise(97, 2)
        logits = hidden @ weight.T + bias + low @ high.T
        ids = torch.randint(-1, 90, (7, 5), generator=generator)
        ids[4] = -1
        for softcap in (None, 9.0):
            options: dict[str, Any] = {
                "softcap": softcap,
                "temperature": 0.7,
                "vocab_chunk": 10,
                "entropy": True,
            }
            expected = readout(hidden, weight, ids, bias=bias, low_rank=[(low, high)], **options)
            for cuts in ((0, 49, 97), (0, 90, 97), (0, 97, 97), (0, 0, 97)):
                mine = slice(cuts[rank], cuts[rank + 1])
                shard = VocabShard.of(len(weight[mine]), group, hidden.device)
                assert shard.total == 97
                options |= {
                    "bias": bias[mine],
                    "low_rank": [(low, high[mine])],
                    "shard": shard,
                }
                compare_readouts(readout(hidden, weight[mine], ids, **options), expected, allowed)
                found = read_logits(hidden, weight[mine], logits[:, mine], ids, **options)
                compare_readouts(found, expected, allowed)


def compare_readouts(found: Readout, expected: Readout, allowed: float) -> None:
    """Equal but for rounding."""
    assert found.error is not None
    assert expected.error is not None
    torch.testing.assert_close(found.error.logit, expected.error.logit)
    for name in ("logsumexp", "logprobs", "entropy", "collision"):
        torch.testing.assert_close(
            getattr(found, name),
            getattr(expected, name),
            rtol=allowed / 10,
            atol=allowed,
            equal_nan=True,
        )
