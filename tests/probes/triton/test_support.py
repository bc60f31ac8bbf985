"""What the kernels take, asked without a GPU."""

from __future__ import annotations

import pytest
import torch

from deltad.probes.triton import support, supports


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(3, 8), torch.zeros(11, 8), torch.zeros(3, 2, dtype=torch.long)


def test_tensors_on_the_cpu_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not supports(*case())


@pytest.mark.parametrize(
    "change",
    ["float64", "adapters", "no ids", "many ids", "no tokens", "columns first", "no Triton"],
)
def test_what_the_kernels_do_not_know_is_left_to_torch(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(support, "installed", lambda: change != "no Triton")
    hidden, weight, ids = case()
    if change != "no Triton":
        assert supports(hidden, weight, ids)
    low_rank = [(hidden[:, :2], weight[:, :2])] if change == "adapters" else []
    if change == "float64":
        hidden = hidden.double()
    elif change == "no ids":
        ids = ids[:, :0]
    elif change == "many ids":
        ids = ids[:, :1].expand(-1, 257)
    elif change == "no tokens":
        hidden, ids = hidden[:0], ids[:0]
    elif change == "columns first":
        weight = weight.T.contiguous().T
    assert not supports(hidden, weight, ids, low_rank=low_rank)
