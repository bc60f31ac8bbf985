"""The same training on all ranks together and on one, with and without the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from deltad.probes import UpdateProbe
from tests.probes.tiny import Batch, Sink, backward, batch, surrogate, weights

from .small import small

TOLERANCE = 1e-6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam, whose first step has the size of the rate however small the gradient.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@dataclass
class Trained:
    """A sharded model as one trains it."""

    model: Any
    optimizer: Any
    accumulating: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext()
    logits: Callable[[Any], Tensor] = lambda output: output.logits
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def no_probe() -> Iterator[None]:
    yield None


def batches_of(
    model: Any, rank: int, *, steps: int = 2, micro: int = 1, empty: int = -1, **options: Any
) -> list[list[Batch]]:
    """Micro-batches by step; those of one rank may be without response tokens."""
    found = [
        [
            batch(
                model,
                seed=100 * rank + 10 * step + index,
                first_sequence=100 * rank + 10 * index,
                **options,
            )
            for index in range(micro)
        ]
        for step in range(steps)
    ]
    if rank == empty:
        for each in (each for step in found for each in step):
            each.tokens.response_mask[:] = False
    return found


def train(trained: Trained, steps: list[list[Batch]], sink: Any) -> UpdateProbe | None:
    """Train; with a sink, under the probe."""
    probe = (
        None
        if sink is None
        else UpdateProbe(trained.model, trained.optimizer, sink, **trained.options)
    )
    with probe or no_probe():
        for micro in steps:
            for index, each in enumerate(micro):
                with trained.accumulating(index == len(micro) - 1):
                    if probe is not None:
                        probe.expect(each.tokens)
                    logits = trained.logits(trained.model(**each.inputs))
                    backward(loss(logits, each) / len(micro))
            trained.optimizer.step()
            # Not the optimizer's: this one misses what is registered as parameters no more.
            trained.model.zero_grad()
    return probe


def loss(logits: Tensor, each: Batch) -> Tensor:
    """Of a micro-batch, 0 where nothing was sampled."""
    if each.tokens.response_mask.any():
        return surrogate(logits, each)
    return logits.sum() * 0.0


def train_alone(model: Any, ranks: list[list[list[Batch]]]) -> Sink:
    """Train one whole model on the batches of all ranks; calls come by step, micro-batch, rank."""
    sink, optimizer = Sink(), sgd(model)
    with UpdateProbe(model, optimizer, sink) as probe:
        for step in range(len(ranks[0])):
            for index in range(len(ranks[0][step])):
                for mine in ranks:
                    each = mine[step][index]
                    probe.expect(each.tokens)
                    scale = len(mine[step]) * len(ranks)
                    backward(loss(model(**each.inputs).logits, each) / scale)
            optimizer.step()
            optimizer.zero_grad()
    return sink


def local_weights(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of every parameter and buffer."""
    return {
        name: (each.to_local() if hasattr(each, "to_local") else each).detach().clone()
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert first.keys() == second.keys()
    for name, each in first.items():
        assert torch.equal(each, second[name]), name


def compare(
    prepare: Callable[[Any], Trained],
    *,
    build: Callable[[], Any] = small,
    micro: int = 1,
    empty: int = -1,
    shared: bool = False,
    tolerance: float = TOLERANCE,
    dump: bool = True,
    proved: bool = True,
) -> UpdateProbe:
    """Training is bit-identical with and without the probe, the dump that of one whole model.

    Parameters
    ----------
    prepare
        Shards a model and makes its optimizer.
    build
        Makes the model, the same each time.
    micro
        Micro-batches a step.
    empty
        A rank without response tokens.
    shared
        Whether all ranks work on the same batches.
    tolerance
        Between the sharded dump and the other.
    dump
        Whether there is a dump of one whole model to compare with.
    proved
        Whether this rank had something to hold the readout against.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    ranks = [
        batches_of(build(), index, micro=micro, empty=empty)
        for index in range(1 if shared else world)
    ]
    mine = ranks[0 if shared else rank]
    results, probe, sink = [], None, Sink()
    for probed in (False, True):
        torch.manual_seed(5)
        trained = prepare(build())
        found = train(trained, mine, sink if probed else None)
        probe = found or probe
        results.append(local_weights(trained.model))
    same(*results)
    assert probe is not None
    for proof in ("verified", "exact"):
        assert probe.readout_metadata[proof] is (True if proved else None)
    if not dump:
        return probe
    alone = build()
    reference = train_alone(alone, ranks)
    calls = [
        rows
        for index, (_, rows) in enumerate(_with_empty(reference, ranks))
        if index % len(ranks) == (0 if shared else rank) and len(rows)
    ]
    writes = not shared or rank == 0
    assert len(sink.calls) == (len(calls) if writes else 0)
    for (_, rows), expected in zip(sink.calls, calls, strict=writes):
        assert rows.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(
                rows[name], values, rtol=0, atol=tolerance, err_msg=f"{name} of rank {rank}"
            )
    if writes and calls:
        assert np.abs(sink.deltas()).max() > 1e-3
    for name, each in weights(alone).items():
        held: Any = dict([*trained.model.named_parameters(), *trained.model.named_buffers()])
        got = held.get(name, held.get(f"module.{name}"))
        if got is not None and hasattr(got, "full_tensor"):
            got = got.full_tensor()
        if got is not None and got.shape == each.shape:
            np.testing.assert_allclose(got.detach(), each, rtol=0, atol=tolerance, err_msg=name)
    return probe


def _with_empty(
    reference: Sink, ranks: list[list[list[Batch]]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of the reference, with an empty one where a micro-batch had no response tokens."""
    calls = iter(reference.calls)
    for step in range(len(ranks[0])):
        for index in range(len(ranks[0][step])):
            for mine in ranks:
                some = bool(mine[step][index].tokens.response_mask.any())
                yield next(calls) if some else ("", {})
