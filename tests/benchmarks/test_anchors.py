"""Each peer's head gives the log-probs of a float64 head, as far as its rounding lets it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.anchors import ANCHORS, Anchor, float64_head
from benchmarks.anchors.anchor import rounded_dots
from benchmarks.anchors.liger import liger_method, liger_package

TOKENS, HIDDEN, VOCAB = 70, 32, 700


def inputs(dtype: torch.dtype, ids: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / 2).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS, ids), generator=generator)


def test_the_float64_head_is_log_softmax() -> None:
    hidden, weight, ids = inputs(torch.float64, 3)
    expected = (hidden @ weight.T).log_softmax(1).gather(1, ids)
    assert float((float64_head(hidden, weight, ids, rows=9) - expected).abs().max()) < 1e-13


@pytest.mark.parametrize("ids", [1, 4])
@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_float32_heads_agree_with_float64(anchor: Anchor, ids: int) -> None:
    hidden, weight, wanted = inputs(torch.float32, ids)
    found = anchor.read(hidden, weight, wanted)
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    assert float((found - float64_head(hidden, weight, wanted)).abs().max()) < 1e-5


@pytest.mark.parametrize("ids", [1, 4])
@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_bf16_heads_round_their_logits(anchor: Anchor, ids: int) -> None:
    hidden, weight, wanted = inputs(torch.bfloat16, ids)
    error = (anchor.read(hidden, weight, wanted) - float64_head(hidden, weight, wanted)).abs()
    assert 1e-3 < float(error.max()) < 0.12  # logits up to 16 are known to 1/16


def test_liger_written_here_is_liger() -> None:
    pytest.importorskip("liger_kernel")
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, ids = inputs(dtype, 1)
        found = liger_method(hidden, weight, ids)
        assert torch.allclose(found, liger_package(hidden, weight, ids), rtol=0, atol=1e-6)


def test_rounded_dots_are_the_products_of_a_matrix_product() -> None:
    hidden, weight, ids = inputs(torch.bfloat16, 5)
    product = (hidden @ weight.T).float().gather(1, ids)
    assert float((rounded_dots(hidden, weight, ids) - product).abs().max()) < 0.07
    assert float((rounded_dots(hidden, weight, ids) == product).float().mean()) > 0.98
