"""The kernels on a real GPU; and that the readout takes them there by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltad.probes.readout import readout

from . import laws
from .laws import DTYPES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES: dict[str, Any] = {"tokens": 300, "vocab": 9001, "hidden": 192, "ids": 21}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "scale": 0.5},
    {"bias": torch.linspace(-2, 2, 9001), "softcap": 4.0, "temperature": 1.3, "scale": 2.0},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_dots_and_sums_agree_with_float64(dtype: torch.dtype, options: dict[str, Any]) -> None:
    laws.check_dots_and_sums(Case.make("cuda", dtype, **SIZES), options)


def test_mixed_dtypes_are_multiplied_in_float32() -> None:
    case = Case.make("cuda", torch.float32, weight_dtype=torch.bfloat16, **SIZES)
    laws.check_dots_and_sums(case, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_readout_is_that_of_torch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    laws.check_readout(Case.make("cuda", dtype, **SIZES), options)


def test_the_same_inputs_give_the_same_bits() -> None:
    laws.check_same_bits(Case.make("cuda", torch.bfloat16, **SIZES))


def test_rows_of_a_wider_tensor() -> None:
    laws.check_strided_rows(Case.make("cuda", torch.float32, **SIZES))


def test_a_pivot_that_is_too_low_is_seen() -> None:
    laws.check_low_pivot(Case.make("cuda", torch.float32, **SIZES))


def test_the_kernels_read_what_the_tiles_read() -> None:
    case = Case.make("cuda", torch.bfloat16, **SIZES)
    tiles = readout(case.hidden, case.weight, case.ids)
    fused = readout(case.hidden, case.weight, case.ids, fused=True)
    assert torch.allclose(tiles.logprobs, fused.logprobs, atol=1e-5, equal_nan=True)
