"""Which files of a dump this process writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True)
class Part:
    """The place of one process among those that write a dump.

    Attributes
    ----------
    rank : int
        Of this process among the writers, from 0.
    ranks : int
        Number of writers.
    writes : bool
        Whether this process writes; of those that work on one and the same batch only the first
        does.
    """

    rank: int
    ranks: int
    writes: bool = True

    @classmethod
    def of_process(cls) -> Part | None:
        """Each process writes: its rank in the default process group; None where there is none."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        return cls(distributed.get_rank(), distributed.get_world_size())

    @classmethod
    def among_replicas(cls, group: Any, device: torch.device) -> Part:
        """One process of each group writes; a collective of the default process group.

        Parameters
        ----------
        group : ProcessGroup
            Processes that work on the same batch as this one.
        device : torch.device
            Where the process group's backend takes tensors.

        Returns
        -------
        Part
            Writers are numbered in the order of their ranks; the others carry the number of the
            one that writes for them.
        """
        first = distributed.get_global_rank(group, 0)
        mine = torch.tensor([first], device=device)
        every = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, mine)
        writers = sorted({int(each) for each in every})
        return cls(writers.index(first), len(writers), writes=distributed.get_rank() == first)
