"""Sums over everything that was not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltad.probes.readout.tail import first_of_each, tail_sums


@dataclass
class Known:
    """Tiles of numbers that are given."""

    z: Tensor

    @property
    def vocab(self) -> int:
        return self.z.shape[1]

    def tiles(self, part: slice, pivot: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.vocab, width):
            yield first, (self.z[part, first : first + width] - pivot[:, None]).contiguous()


@given(
    rows=st.lists(st.lists(st.integers(-1, 11), min_size=4, max_size=4), min_size=1, max_size=6),
    width=st.integers(1, 15),
)
def test_every_id_asked_for_is_left_out_once(rows: list[list[int]], width: int) -> None:
    ids = torch.tensor(rows)
    z = torch.randn(len(ids), 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pivot = z.amax(1)
    part = slice(0, len(ids))
    sums = tail_sums(Known(z), part, ids, pivot, width, collision=True, entropy=True)
    for row, asked in enumerate(rows):
        rest = [j for j in range(12) if j not in asked]
        y = z[row, rest] - pivot[row]
        expected = [y.exp().sum(), (2 * y).exp().sum(), (y.exp() * y).sum()]
        torch.testing.assert_close(sums[:, row], torch.stack(expected))
        first = first_of_each(ids)[row].tolist()
        assert first == [i >= 0 and i not in asked[:at] for at, i in enumerate(asked)]


def test_a_tail_of_nothing_is_exactly_nothing() -> None:
    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    every = torch.arange(5).expand(3, -1)
    sums = tail_sums(
        Known(z), slice(0, 3), every, z.amax(1).double(), 2, collision=True, entropy=True
    )
    assert torch.equal(sums, torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("mass", [1e-12, 1e-30])
def test_a_small_tail_keeps_its_digits(mass: float) -> None:
    """What 1 − Σ could not tell from nothing."""
    z = torch.full((1, 1001), float(torch.tensor(mass / 1000).log()))
    z[0, 0] = 0.0
    sums = tail_sums(
        Known(z),
        slice(0, 1),
        torch.tensor([[0]]),
        torch.zeros(1, dtype=torch.float64),
        64,
        collision=False,
        entropy=False,
    )
    assert float(sums[0, 0]) == pytest.approx(mass, rel=1e-5)
