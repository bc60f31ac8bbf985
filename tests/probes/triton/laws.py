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
    options = {key: _at(value, case.hidden.device) for key, value in options.items()}
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


def check_readout(case: Case, options: dict[str, Any]) -> None:
    """The whole readout through the kernels is that through torch's tiles, on the CPU."""
    here = {key: _at(value, case.hidden.device) for key, value in options.items()}
    there = {key: _at(value, torch.device("cpu")) for key, value in options.items()}
    fused = readout(
        case.hidden, case.weight, case.ids, fused=True, entropy=True, vocab_chunk=100, **here
    )
    tiles = readout(case.hidden.cpu(), case.weight.cpu(), case.ids.cpu(), entropy=True, **there)
    for name, allowed in (
        ("logsumexp", 1e-5), ("logprobs", 1e-5), ("entropy", 1e-5), ("collision", 1e-6),
    ):  # fmt: skip
        found, expected = getattr(fused, name).cpu(), getattr(tiles, name)
        assert found.dtype == torch.float64
        assert torch.equal(found.isnan(), expected.isnan())
        assert float((found - expected).nan_to_num().abs().max()) < allowed
    assert float(fused.logprobs.nan_to_num().max()) <= 1e-6
    assert fused.error is not None
    assert tiles.error is not None
    assert torch.allclose(fused.error.logit.cpu(), tiles.error.logit, rtol=1e-3, atol=1e-12)


def _at(value: Any, device: torch.device) -> Any:
    """A tensor where it is wanted; anything else as it is."""
    return value.to(device) if isinstance(value, Tensor) else value


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
