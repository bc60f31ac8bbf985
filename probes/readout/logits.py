"""How a head makes logits, at single ids and in tiles over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of gathered rows of W at a time: what a core's cache holds, and a GPU's.
_GATHERED = 1 << 19
_GATHERED_CUDA = 1 << 23


@dataclass(frozen=True)
class Transform:
    """From W h + b to logits at the temperature: c tanh(s (W h + b) / c) / T.

    Attributes
    ----------
    scale, softcap, temperature
        s, c (None: no bound) and T.
    """

    scale: float
    softcap: float | None
    temperature: float

    @property
    def factor(self) -> float:
        """Derivative at 0, s / T; nowhere is it larger."""
        return self.scale / self.temperature

    def __call__(self, values: Tensor) -> Tensor:
        """Apply in place."""
        if self.softcap is None:
            return values if self.factor == 1.0 else values.mul_(self.factor)
        values.mul_(self.scale / self.softcap).tanh_()
        return values.mul_(self.softcap / self.temperature)


@dataclass(frozen=True)
class Logits:
    """Logits of some positions, over the ids whose rows of W are here.

    Attributes
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head.
    weight : Tensor, shape (vocab, hidden)
        W.
    bias : Tensor, shape (vocab,), or None
        b.
    low_rank : sequence of (Tensor, Tensor)
        x (token, rank) and B (vocab, rank) of each adapter.
    transform : Transform
        What the model does to W h + b.
    dtype : torch.dtype
        Of tiles, float32 or float64.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    low_rank: Sequence[tuple[Tensor, Tensor]]
    transform: Transform
    dtype: torch.dtype

    @property
    def vocab(self) -> int:
        """Number of ids here."""
        return self.weight.shape[0]

    @property
    def widens(self) -> bool:
        """Whether CUDA multiplies half precision as it is and writes the sums as float32."""
        dtypes = {self.hidden.dtype, self.weight.dtype}
        half = dtypes in ({torch.bfloat16}, {torch.float16})
        return half and self.hidden.is_cuda and torch.version.hip is None

    def at_ids(self, part: slice, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Exact dots: W h at single ids, by multiplying the rows of W out.

        Parameters
        ----------
        part : slice
            Which tokens.
        ids : Tensor of int, shape (token, id)
            Rows of `weight`; others are not here.

        Returns
        -------
        z : Tensor of float64, shape (token, id)
            Logits at the temperature; NaN where the id is not here.
        spread : Tensor of float64, shape (token,)
            Largest Euclidean norm of a dot's terms, √Σ (w h)², before the transform.
        """
        here = (ids >= 0) & (ids < self.weight.shape[0])
        rows = torch.where(here, ids, 0)
        factors = [(self.hidden, self.weight), *self.low_rank]
        raw = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        spread = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        if not self.vocab or not ids.shape[1]:
            return raw.fill_(torch.nan), spread
        for left, right in factors:
            step = _tokens_at_once(ids, right)
            for start in range(0, len(ids), step):
                few = slice(start, start + step)
                x = left[part][few].to(self.dtype)
                terms = right.index_select(0, rows[few].reshape(-1)).to(self.dtype)
                terms = terms.view(len(x), -1, right.shape[1]).mul_(x[:, None])
                raw[few] += terms.sum(-1)
                norm = torch.where(here[few], torch.linalg.vector_norm(terms, dim=-1), 0.0)
                spread[few] += norm.amax(1).double().square()
        if self.bias is not None:
            raw += self.bias[rows].double()
        return torch.where(here, self.transform(raw), torch.nan), spread.sqrt()

    def tiles(self, part: slice, pivot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """Logits less the pivot, a tile at a time.

        Parameters
        ----------
        part : slice
            Which tokens.
        pivot : Tensor of float64, shape (token,)
            Of these tokens, a number of the tiles' dtype.
        width : int
            Ids of a tile.

        Yields
        ------
        first : int
            First id of the tile.
        tile : Tensor, shape (token, id)
            z − pivot; contiguous, to be overwritten, and gone with the next.
        """
        vocab, deep = self.weight.shape
        tokens, width = len(pivot), max(1, min(width, vocab))
        device, dtype = self.hidden.device, self.dtype
        room = torch.empty(tokens * width, dtype=dtype, device=device)
        x = self.hidden[part]
        taken = pivot[:, None].to(dtype)
        converted = None
        if not self.widens:
            x = x.to(dtype)
            if self.weight.dtype != dtype:
                converted = torch.empty(width, deep, dtype=dtype, device=device)
        for first in range(0, vocab, width):
            ids = slice(first, min(first + width, vocab))
            shape = (tokens, ids.stop - first)
            tile = room[: shape[0] * shape[1]].view(shape)
            rows = self.weight[ids]
            if converted is not None:
                rows = converted[: shape[1]].copy_(rows)
            self._fill(tile, x, rows, part, ids, taken)
            yield first, tile

    def _fill(
        self, tile: Tensor, x: Tensor, rows: Tensor, part: slice, ids: slice, pivot: Tensor
    ) -> None:
        """Make one tile in its own dtype."""
        linear = self.transform.softcap is None and not self.widens
        factor = self.transform.factor if linear else 1.0
        bias = None if self.bias is None else self.bias[ids].to(tile.dtype)
        if linear:
            # The pivot goes in with the product, at no cost of its own.
            if bias is None:
                tile.copy_(-pivot)
            else:
                torch.sub(bias * factor, pivot, out=tile)
            tile.addmm_(x, rows.t(), alpha=factor)
        elif self.widens:
            torch.mm(x, rows.t(), tile.dtype, out=tile)
        else:
            torch.mm(x, rows.t(), out=tile)
        for low, high in self.low_rank:
            tile.addmm_(low[part].to(tile.dtype), high[ids].to(tile.dtype).t(), alpha=factor)
        if not linear:
            if bias is not None:
                tile += bias
            self.transform(tile).sub_(pivot)


@dataclass(frozen=True)
class GivenLogits:
    """Logits that a trainer's forward has made, at some positions.

    Attributes
    ----------
    values : Tensor, shape (position, vocab)
        As the head's module gave them, before scale, bound and temperature.
    rows : Tensor of int, shape (token,), or None
        Which positions; None for all.
    transform : Transform
        What the model does to them.
    dtype : torch.dtype
        Of tiles.
    """

    values: Tensor
    rows: Tensor | None
    transform: Transform
    dtype: torch.dtype

    @property
    def vocab(self) -> int:
        """Number of ids."""
        return self.values.shape[1]

    def tiles(self, part: slice, pivot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """As `Logits.tiles`."""
        vocab = self.values.shape[1]
        tokens, width = len(pivot), max(1, min(width, vocab))
        room = torch.empty(tokens * width, dtype=self.dtype, device=self.values.device)
        taken = pivot[:, None].to(self.dtype)
        for first in range(0, vocab, width):
            given = self.values[:, first : min(first + width, vocab)]
            given = given[part] if self.rows is None else given.index_select(0, self.rows[part])
            tile = room[: given.numel()].view(given.shape).copy_(given)
            self.transform(tile).sub_(taken)
            yield first, tile


def _tokens_at_once(ids: Tensor, rows: Tensor) -> int:
    """How many tokens' rows are gathered at a time."""
    limit = _GATHERED_CUDA if ids.is_cuda else _GATHERED
    return max(1, limit // max(1, ids.shape[1] * rows.shape[1]))
