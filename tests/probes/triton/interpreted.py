"""The kernels in Triton's interpreter; run by test_interpreter.py in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltad.probes.triton.support import interpreting

from . import laws
from .laws import DTYPES, Case

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "scale": 0.5},
    {"bias": torch.linspace(-2, 2, 500), "softcap": 4.0, "temperature": 1.3, "scale": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_dots_and_sums_agree_with_float64(options: dict[str, Any]) -> None:
    laws.check_dots_and_sums(Case.make("cpu", torch.bfloat16), options)


def test_mixed_dtypes_are_multiplied_in_float32() -> None:
    case = Case.make("cpu", torch.float32, weight_dtype=torch.bfloat16)
    laws.check_dots_and_sums(case, {})


def test_more_ids_than_a_block_holds() -> None:
    laws.check_dots_and_sums(Case.make("cpu", torch.float32, tokens=4, ids=40), {})


def test_several_blocks_of_tokens_and_splits_of_the_vocabulary() -> None:
    laws.check_dots_and_sums(Case.make("cpu", torch.float32, tokens=18, vocab=2060, hidden=8), {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_readout_is_that_of_torch(dtype: torch.dtype) -> None:
    laws.check_readout(Case.make("cpu", dtype), OPTIONS[-1])


def test_the_same_inputs_give_the_same_bits() -> None:
    laws.check_same_bits(Case.make("cpu", torch.bfloat16))


def test_rows_of_a_wider_tensor() -> None:
    laws.check_strided_rows(Case.make("cpu", torch.float32))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_a_pivot_that_is_too_low_is_seen() -> None:
    laws.check_low_pivot(Case.make("cpu", torch.float32))
