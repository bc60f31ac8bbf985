"""What the kernels must give, wherever they run; against float64, from the equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltad.probes.readout import readout
from deltad.probes.triton import dots, sums, supports

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Case:
    """Hidden states, head and ids, the last with padding and the ids at the tiles' edges."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor

    @classmethod
    def make(
        cls,
        device: str,
        dtype: torch.dtype,
        *,
        tokens: int = 13,
        vocab: int = 500,
        hidden: int = 72,
        ids: int = 6,
        weight_dtype: torch.dtype | None = None,
    ) -> Case:
        generator = torch.Generator().manual_seed(5)
        h = torch.randn(tokens, hidden, generator=generator).to(dtype)
        w = (torch.randn(vocab, hidden, generator=generator) / 3).to(weight_dtype or dtype)
        at = torch.stack([torch.randperm(vocab, generator=generator)[:ids] for _ in range(tokens)])
        at[0, 2] = -1
        at[1, :] = -1
        edges = torch.tensor([0, 255, 256, 257, vocab - 1])
        at[2, :5] = edges[edges < vocab]
        return cls(h.to(device), w.to(device), at.to(device))

    def logits(
        self,
        *,
        bias: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """z of all ids, in float64."""
        z = self.hidden.double() @ self.weight.double().T
        if bias is not None:
            z = z + bias.double()
        z = z * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        return z / temperature


def check_dots_and_sums(case: Case, options: dict[str, Any]) -> None:
    """Both kernels against float64."""
    options = {
        key: value.to(case.hidden.device) if isinstance(value, Tensor) else value
        for key, value in options.items()
    }
    assert supports(case.hidden, case.weight, case.ids)
    z = case.logits(**options)
    found, spread = dots(case.hidden, case.weight, case.ids, **options)
    asked = case.ids >= 0
    expected = torch.where(asked, z.gather(1, case.ids.clamp(min=0)), torch.nan)
    assert torch.equal(found.isnan(), ~asked)
    assert float((found - expected).nan_to_num().abs().max()) < 5e-6

    rows = case.weight[case.ids.clamp(min=0)].double() * case.hidden.double()[:, None, :]
    wide = torch.where(asked, rows.square().sum(2).sqrt(), 0.0).amax(1)
    assert torch.allclose(spread.double(), wide, rtol=1e-5)

    # The second token asks for no id: any pivot does.
    pivot = torch.where(asked, found, -torch.inf).amax(1)
    pivot[1] = 0.5
    inside = torch.zeros_like(z).scatter_add_(1, case.ids.clamp(min=0), asked.to(z)) > 0
    shifted = torch.where(inside, -torch.inf, z - pivot.double()[:, None])
    e = shifted.exp()
    total, squares, weighted = sums(
        case.hidden, case.weight, case.ids, pivot, **options, entropy=True
    )
    assert squares is not None
    assert weighted is not None
    for sum_, terms in (
        (total, e),
        (squares, e.square()),
        (weighted, e * shifted.clamp(min=-1e4)),
    ):
        assert sum_.dtype == torch.float64
        scale = terms.abs().sum(1)
        assert float(((sum_ - terms.sum(1)).abs() / scale).max()) < 1e-5


def check_against_torch(case: Case) -> None:
    """Log-probs and collision as the torch tiles have them, from the kernels' halves."""
    rows = [i for i in range(len(case.ids)) if bool((case.ids[i] >= 0).all())]
    hidden, ids = case.hidden[rows], case.ids[rows]
    z = dots(hidden, case.weight, ids)[0].double()
    pivot = z.amax(1)
    total, squares, weighted = sums(hidden, case.weight, ids, pivot)
    assert squares is not None
    assert weighted is None
    e = (z - pivot[:, None]).exp()
    mass = total + e.sum(1)
    read = readout(hidden, case.weight, ids)
    expected = z - pivot[:, None] - mass.log()[:, None]
    assert float((read.logprobs - expected).abs().max()) < 1e-5
    assert float(expected.max()) <= 0
    collision = (squares + e.square().sum(1)) / mass.square()
    assert read.collision is not None
    assert float((read.collision - collision).abs().max()) < 1e-6


def check_same_bits(case: Case) -> None:
    """Again, and of some tokens alone: the same bits."""
    pivot = torch.zeros(len(case.ids), device=case.hidden.device)
    first = sums(case.hidden, case.weight, case.ids, pivot)[0]
    assert torch.equal(first, sums(case.hidden, case.weight, case.ids, pivot)[0])
    some = sums(case.hidden[3:], case.weight, case.ids[3:], pivot[3:])[0]
    assert torch.equal(first[3:], some)


def check_strided_rows(case: Case) -> None:
    """Rows of a wider tensor are read where they lie."""
    wide = torch.cat([case.hidden, case.hidden], 1)
    view = wide[:, : case.hidden.shape[1]]
    assert supports(view, case.weight, case.ids)
    found, expected = (dots(each, case.weight, case.ids)[0] for each in (view, case.hidden))
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert not supports(case.hidden.T.contiguous().T, case.weight, case.ids)


def check_low_pivot(case: Case) -> None:
    """A pivot far below the logits gives sums that are not finite, and nothing else."""
    pivot = torch.zeros(len(case.ids), device=case.hidden.device)
    pivot[4] = -500
    total = sums(case.hidden, case.weight, case.ids, pivot)[0]
    assert not bool(total[4].isfinite())
    assert bool(total[5:].isfinite().all())
