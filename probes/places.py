"""Where in the hidden states of a forward the rows of a micro-batch are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ProbeError
from .forward import Forward


@dataclass(frozen=True)
class Places:
    """Positions of a micro-batch's rows in what enters the head.

    Attributes
    ----------
    index : Tensor of int, shape (row,)
        Place of each row along the flattened leading axes of the hidden states; −1 where the
        forward left its position out.
    positions : int
        Hidden states of the whole forward.
    width : int
        Length of the last of their leading axes.
    batch, length : int
        Shape of `response_mask`.
    """

    index: Tensor
    positions: int
    width: int
    batch: int
    length: int

    @classmethod
    def of(
        cls, forward: Forward, b: Tensor, j: Tensor, *, batch: int, length: int, device: Any
    ) -> Places:
        """Find the hidden states at positions j of rows b.

        Parameters
        ----------
        forward : Forward
            Which may have left positions out.
        b, j : Tensor of int, shape (row,)
            Positions whose logits are wanted.
        batch, length : int
            Shape of `response_mask`.
        device : torch.device
            Where `index` shall be.

        Returns
        -------
        Places
            Of these rows.
        """
        grid = _kept_positions(forward, batch, length, device)
        back = torch.full((batch * length,), -1, dtype=torch.long, device=device)
        back[grid.reshape(-1)] = torch.arange(grid.numel(), device=device)
        return cls(back[b * length + j], grid.numel(), grid.shape[-1], batch, length)

    def select(self, hidden: Tensor) -> Tensor:
        """Hidden states of the rows, shape (row, hidden)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.index.numel() and flat.shape[0] != self.positions:
            raise ProbeError(
                f"the forward gave hidden states at {flat.shape[0]} positions, expected "
                f"{self.positions} for `response_mask` of shape {(self.batch, self.length)}: the "
                "model drops or adds positions that the probe does not know of"
            )
        return flat.index_select(0, self.index.to(hidden.device))

    def select_of(self, hidden: Tensor, rows: Tensor, batch_rows: Tensor | None) -> Tensor:
        """Hidden states of some rows; see `MicroBatch.select_of`."""
        if batch_rows is None:
            return self.select(hidden)[rows.to(hidden.device)]
        flat = hidden.reshape(-1, hidden.shape[-1])
        expected = len(batch_rows) * self.width
        if flat.shape[0] != expected or self.positions != self.batch * self.width:
            raise ProbeError(
                f"a forward of {len(batch_rows)} rows gave hidden states at {flat.shape[0]} "
                f"positions, expected {expected}"
            )
        index = self.index.cpu()[rows.cpu()]
        place = torch.searchsorted(batch_rows, index // self.width)
        return flat.index_select(0, (place * self.width + index % self.width).to(flat.device))

    def columns(self, most: int = 4) -> Tensor:
        """Choose a few columns of the head's input that hold rows."""
        columns: Tensor = torch.unique(self.index % self.width)
        return columns[:most]

    def among(self, columns: Tensor | None, device: Any) -> tuple[Tensor, Tensor]:
        """Rows whose logits are there where the forward gave those of these columns only.

        Parameters
        ----------
        columns : Tensor of int, optional
            Of the head's input; by default all.
        device : torch.device
            Of the logits.

        Returns
        -------
        rows, index : Tensor of int
            Which rows, and their places along the flattened leading axes of the logits.
        """
        index = self.index.to(device)
        rows = torch.arange(index.numel(), device=device)
        if columns is None:
            return rows, index
        columns = columns.to(device)
        at = torch.full((self.width,), -1, dtype=torch.long, device=device)
        at[columns] = torch.arange(columns.numel(), device=device)
        rows = (at[index % self.width] >= 0).nonzero()[:, 0]
        return rows, index[rows] // self.width * columns.numel() + at[index[rows] % self.width]


def _kept_positions(forward: Forward, batch: int, length: int, device: torch.device) -> Tensor:
    """Position b · L + j of each hidden state, in the shape that they have without their axis."""
    grid = torch.arange(batch * length, device=device).view(batch, length)
    if not forward.from_head:
        return grid
    kept: Any = forward.call.argument("logits_to_keep")
    if kept is None:
        kept = forward.call.argument("num_logits_to_keep")
    if isinstance(kept, Tensor):
        kept = kept.to(device)
        if kept.ndim == 1:
            return grid[:, kept]
        return grid[kept] if kept.dtype == torch.bool else grid.gather(1, kept.long())
    return grid if kept is None else grid[:, -int(kept) :]
