"""Sums over all ids but those asked for, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

# A z this far below the pivot has weight 0 in float32; it keeps 0 · −∞ out of the entropy.
_FLOOR = -1e4


class Tiles(Protocol):
    """What makes logits less a pivot, tile by tile; see `logits`."""

    @property
    def vocab(self) -> int:
        """Number of ids."""

    def tiles(self, part: slice, pivot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """See `logits.Logits.tiles`."""


def first_of_each(ids: Tensor) -> Tensor:
    """Where an id stands that no earlier column of its row holds; False at negative ids.

    Parameters
    ----------
    ids : Tensor of int, shape (token, id)
        Perhaps with repetitions.

    Returns
    -------
    Tensor of bool, shape (token, id)
        One True for each different id of a row.
    """
    ordered, order = ids.sort(dim=1, stable=True)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.zeros_like(fresh).scatter_(1, order, fresh & (ordered >= 0))


def tail_sums(
    source: Tiles,
    part: slice,
    ids: Tensor,
    pivot: Tensor,
    width: int,
    *,
    collision: bool,
    entropy: bool,
) -> Tensor:
    r"""Σ e^(z−m), Σ e^(2(z−m)) and Σ e^(z−m) (z−m) over the ids that were not asked for.

    The ids asked for are masked out of each tile, so that what is summed *is* the tail: nothing
    is subtracted afterwards, and a small tail keeps all its digits. Any pivot m gives the same
    sums up to a common factor, so no running maximum is needed; where m lies so far below the
    maximum that e^(z−m) overflows, the sums are not finite.

    Parameters
    ----------
    source : Tiles
        Makes z − m.
    part : slice
        Which of its tokens.
    ids : Tensor of int, shape (token, id)
        Asked for at these tokens, counted like the source's ids; others are not there.
    pivot : Tensor of float64, shape (token,)
        m, a number of the tiles' dtype.
    width : int
        Ids of a tile.
    collision, entropy : bool
        Whether the second and the third sum are wanted; otherwise they are 0.

    Returns
    -------
    Tensor of float64, shape (3, token)
        Exponentials and the sums within a tile have the tile's precision, float32; across tiles
        they are added in float64.
    """
    sums = torch.zeros(3, len(pivot), dtype=torch.float64, device=pivot.device)
    # One sort says which ids fall into which tile.
    ordered, order = ids.reshape(-1).sort(stable=True)
    tokens = order // max(ids.shape[1], 1)
    bounds = torch.tensor([*range(0, source.vocab, width), source.vocab], device=ids.device)
    begins = torch.searchsorted(ordered, bounds).tolist()
    weights: Tensor | None = None
    for number, (first, tile) in enumerate(source.tiles(part, pivot, width)):
        inside = slice(begins[number], begins[number + 1])
        flat = tokens[inside] * tile.shape[1] + (ordered[inside] - first)
        tile.view(-1).index_fill_(0, flat, -torch.inf)
        if entropy:
            weights = torch.empty_like(tile) if weights is None else weights
            weight = weights.view(-1)[: tile.numel()].view(tile.shape)
            torch.exp(tile, out=weight)
            sums[2] += tile.clamp_(min=_FLOOR).mul_(weight).sum(1)
        else:
            weight = tile.exp_()
        sums[0] += weight.sum(1)
        if collision:
            sums[1] += torch.linalg.vector_norm(weight, dim=1).double().square()
    return sums
