"""How a model is spread over ranks, and what its ranks must do together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from deltad.probes.errors import ProbeError

from .fsdp import gather, is_fsdp2, lineage, reshard
from .part import Part
from .tensors import is_sharded


@dataclass(frozen=True)
class Sharding:
    """What of a model is spread over ranks.

    Attributes
    ----------
    model : nn.Module
        Without wrappers.
    gathers : bool
        Whether forwards gather weights (`fully_shard`).
    replicas : ProcessGroup or None
        Ranks that work on one and the same batch (tensor parallel).
    groups : tuple of ProcessGroup
        Ranks whose forwards wait for each other; what one of them does, all must.
    device : torch.device
        Where collectives take tensors.
    """

    model: nn.Module
    gathers: bool
    replicas: Any
    groups: tuple[Any, ...]
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, group: Any = None, together: Any = None) -> Sharding:
        """Look at a model's parameters.

        Parameters
        ----------
        model : nn.Module
            Without wrappers.
        group : ProcessGroup, optional
            Ranks that work on the same batch, where the parameters do not tell.
        together : ProcessGroup, optional
            Ranks whose forwards wait for each other though no parameter is spread over them.

        Returns
        -------
        Sharding
            Of this rank.

        Raises
        ------
        ProbeError
            Parameters that are spread in a way which is not supported.
        """
        reshard(model)  # a forward may have left weights gathered
        replicas, groups = group, [each for each in (group, together) if each is not None]
        for name, parameter in model.named_parameters():
            if not is_sharded(parameter):
                continue
            spread: Any = parameter
            mesh, first = spread.device_mesh, _tensor_parallel_axis(model, name, spread)
            groups += [mesh.get_group(axis) for axis in range(mesh.ndim)]
            if first is None:
                continue
            if first != mesh.ndim - 1:
                raise ProbeError(
                    f"parameter {name} is spread over a mesh of {mesh.ndim} axes, of which "
                    f"{mesh.ndim - first} are not fully_shard's: one, tensor parallel, is supported"
                )
            found = mesh.get_group(first)
            if replicas is not None and _ranks(found) != _ranks(replicas):
                raise ProbeError(
                    f"parameter {name} is tensor-parallel over ranks {_ranks(found)}, others over "
                    f"{_ranks(replicas)}: one group of ranks must share a batch"
                )
            replicas = found if replicas is None else replicas
        unique = {_ranks(each): each for each in groups}
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        return cls(
            model,
            any(is_fsdp2(part) for part in model.modules()),
            replicas,
            # In the order in which they were found, which is the same on every rank.
            tuple(each for ranks, each in unique.items() if len(ranks) > 1),
            device,
        )

    @property
    def joint(self) -> bool:
        """Whether ranks must make the same forwards."""
        return self.gathers or bool(self.groups)

    def part(self) -> Part | None:
        """Place of this process among those that write; a collective where batches are shared."""
        if self.replicas is None or distributed.get_world_size(self.replicas) == 1:
            return Part.of_process()
        return Part.among_replicas(self.replicas, self.device)

    def all(self, flag: bool) -> bool:
        """Whether it holds on every rank; a collective."""
        return self._reduced(flag, distributed.ReduceOp.MIN)

    def any(self, flag: bool) -> bool:
        """Whether it holds on some rank; a collective."""
        return self._reduced(flag, distributed.ReduceOp.MAX)

    def gather(self, module: nn.Module) -> None:
        """Gather the weights of a module within the model; see `fsdp.gather`."""
        if self.gathers:
            gather(lineage(self.model, module))

    def gather_around(self, module: nn.Module) -> None:
        """Gather what holds a module that is about to be called without the model around it."""
        if self.gathers:
            gather(lineage(self.model, module)[:-1])

    @contextmanager
    def visit(self, *, stale: bool = False) -> Iterator[None]:
        """Make forwards of one's own within, and leave no weight gathered.

        Parameters
        ----------
        stale : bool
            Weights that are gathered now may be older than the last step.
        """
        if self.gathers and stale:
            reshard(self.model)
        try:
            yield
        finally:
            if self.gathers:
                reshard(self.model)

    def _reduced(self, flag: bool, operation: Any) -> bool:
        """Minimum or maximum over the ranks of all groups, one group after the other."""
        value = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        for group in self.groups:
            distributed.all_reduce(value, operation, group=group)
        return bool(value)


def _ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a group."""
    return tuple(distributed.get_process_group_ranks(group))


def _tensor_parallel_axis(model: nn.Module, name: str, parameter: Any) -> int | None:
    """First axis of a parameter's mesh that is not fully_shard's; None where all are."""
    mesh = parameter.device_mesh
    owner = model.get_submodule(name.rpartition(".")[0])
    if not any(is_fsdp2(part) for part in lineage(model, owner)):
        return 0
    # fully_shard's axes come first: one that shards, or one of replicas and one that shards.
    own = 2 if mesh.ndim > 1 and parameter.placements[0].is_replicate() else 1
    return own if own < mesh.ndim else None
