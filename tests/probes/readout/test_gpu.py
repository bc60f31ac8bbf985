"""Tiles whose half-precision products are written as float32, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from deltad.probes.readout import readout

from .plain import inputs, likeliest, oracle, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_widened_products_are_exact_to_float32(dtype: torch.dtype, softcap: float | None) -> None:
    hidden, weight, _ = (each.cuda() for each in inputs(dtype=dtype, vocab=600))
    ids = likeliest(hidden.cpu(), weight.cpu()).cuda()
    read = readout(hidden, weight, ids, softcap=softcap, temperature=0.7, vocab_chunk=128)
    truth = oracle(hidden, weight, softcap=softcap, temperature=0.7)
    assert worst(read.logprobs, truth.gather(1, ids)) < 1e-5
    assert worst(read.collision, truth.exp().square().sum(1)) < 1e-5
