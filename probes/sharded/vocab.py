"""A head of which each rank holds the rows of some ids, and sums over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class VocabShard:
    """The rows of the head that this rank holds, among those of its group.

    Attributes
    ----------
    group : ProcessGroup
        Ranks that together hold all rows, in the order of the ids.
    sizes : tuple of int
        Rows of each rank; they need not be even, and may be 0.
    first : int
        Id of this rank's first row.
    """

    group: Any
    sizes: tuple[int, ...]
    first: int

    @classmethod
    def of(cls, rows: int, group: Any, device: torch.device) -> VocabShard:
        """Learn how many rows the others hold; a collective of the group.

        Parameters
        ----------
        rows : int
            Of this rank.
        group : ProcessGroup
            As above.
        device : torch.device
            Where the rows are.

        Returns
        -------
        VocabShard
            Of this rank.
        """
        mine = torch.tensor([rows], device=device)
        every = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(every, mine, group=group)
        sizes = tuple(int(each) for each in every)
        return cls(group, sizes, sum(sizes[: distributed.get_rank(group)]))

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.sizes)

    def combine(
        self, top: Tensor, total: Tensor, squares: Tensor, weighted: Tensor, picked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        r"""Sums over the ids of all ranks from those over the ids of each.

        With m the maximum over all ranks and :math:`m_r` this rank's,

        .. math:: \sum_j e^{z_j - m} = \sum_r e^{m_r - m} \sum_{j \in r} e^{z_j - m_r}

        and likewise for the squares; the sum weighted by z − m gains (m_r − m) times the plain one.

        Parameters
        ----------
        top : Tensor, shape (token,)
            Largest logit z of this rank's ids; −∞ where it has none.
        total, squares, weighted : Tensor, shape (token,)
            Σ e^(z−top), Σ e^(2(z−top)), Σ e^(z−top) (z−top) over this rank's ids.
        picked : Tensor, shape (token, id)
            z at the ids asked for, NaN where this rank does not have them.

        Returns
        -------
        top, total, squares, weighted, picked : Tensor
            The same over all ids; equal on all ranks of the group. Two all-reduces: one maximum,
            one sum.
        """
        highest = top.clone()
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self.group)
        # A rank without rows has sums of 0, which no shift may turn into NaN.
        shift = torch.where(top == -torch.inf, 0.0, top - highest)
        weighted = (weighted + total * shift) * shift.exp()
        here = ~picked.isnan()
        # An id is held by one rank. Where a logit is NaN nobody seems to hold it; the sums, NaN
        # too, tell that the policy is not finite.
        sums = torch.cat(
            [
                torch.stack([total * shift.exp(), squares * (2 * shift).exp(), weighted], 1),
                torch.where(here, picked, 0.0),
                here.to(picked.dtype),
            ],
            1,
        )
        distributed.all_reduce(sums, group=self.group)
        width = picked.shape[1]
        held = sums[:, 3 + width :] > 0
        found = torch.where(held, sums[:, 3 : 3 + width], torch.nan)
        return highest, sums[:, 0], sums[:, 1], sums[:, 2], found

    def highest(self, z: Tensor, spread: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tell all ranks the logits that one of them has; one all-reduce of a maximum.

        Parameters
        ----------
        z : Tensor, shape (token, id)
            Logits at ids of this rank, NaN at others.
        spread : Tensor, shape (token,)
            Its maximum is wanted too.
        ids : Tensor of int, shape (token, id)
            Of all ranks; negative ids are padding, which nobody has.

        Returns
        -------
        z, spread : Tensor
            Of all ids; NaN at padding, and where the rank that has the id found NaN.
        """
        mine = (ids >= self.first) & (ids < self.first + self.sizes[self._rank()])
        known = torch.where(mine & ~z.isnan(), z, -torch.inf)
        # A maximum loses NaN on some backends: it travels as a number of its own.
        lost = (mine & z.isnan()).to(z.dtype)
        both = torch.cat([known, lost, spread[:, None]], 1)
        distributed.all_reduce(both, distributed.ReduceOp.MAX, group=self.group)
        width = z.shape[1]
        found = torch.where(
            (both[:, width : 2 * width] > 0) | (ids < 0), torch.nan, both[:, :width]
        )
        return found, both[:, -1]

    def add(self, sums: Tensor) -> Tensor:
        """Sum over the ranks; one all-reduce."""
        sums = sums.clone()
        distributed.all_reduce(sums, group=self.group)
        return sums

    def _rank(self) -> int:
        """Number of this rank within its group."""
        return distributed.get_rank(self.group)

    def gather(self, logits: Tensor) -> Tensor:
        """Join the logits of all ranks: (token, this rank's rows) to (token, all rows)."""
        widest = max(self.sizes)
        padded = logits.new_zeros(logits.shape[0], widest)
        padded[:, : logits.shape[1]] = logits
        every = [torch.empty_like(padded) for _ in self.sizes]
        distributed.all_gather(every, padded, group=self.group)
        return torch.cat([each[:, :size] for each, size in zip(every, self.sizes, strict=True)], 1)
