"""The readout is exact whatever precision the process allows, and leaves the setting as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from deltad.probes import ProbeError
from deltad.probes.readout import exact_products, is_exclusive, precision, readout
from tests.probes.precisions import (
    ALL,
    CUDA,
    MKLDNN,
    Products,
    another_thread,
    environment,
    state,
)

from .plain import TOKENS, VOCAB, inputs, likeliest, oracle, worst

__all__ = ["environment"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alone", [True, False])
def test_exact_under_any_setting_which_is_as_before_afterwards(
    environment: str, dtype: torch.dtype, alone: bool
) -> None:
    hidden, weight, _ = inputs(dtype=dtype)
    ids = likeliest(hidden, weight)
    before = state()
    pair = (torch.randn(TOKENS, 4), torch.randn(VOCAB, 4))
    plain = readout(hidden, weight, ids, exclusive=alone)
    adapted = readout(hidden, weight, ids, low_rank=[pair], exclusive=alone)
    assert state() == before
    logits = hidden.double() @ weight.double().T
    assert worst(plain.logprobs, logits.log_softmax(1).gather(1, ids)) < 1e-5
    logits += pair[0].double() @ pair[1].double().T
    assert worst(adapted.logprobs, logits.log_softmax(1).gather(1, ids)) < 1e-5


def test_a_setting_that_was_inherited_still_is(environment: str) -> None:
    hidden, weight, ids = inputs()
    readout(hidden, weight, ids)
    inherits = environment in ("untouched", "cuda tf32", "cuda allow_tf32", "all tf32", "all bf16")
    for later in ("tf32", "bf16", "none"):
        ALL.fp32_precision = later
        assert (MKLDNN.matmul.fp32_precision == later) or not inherits


@pytest.mark.parametrize("value", ["tf32", "bf16", "ieee"])
@pytest.mark.usefixtures("environment")
def test_a_setting_of_its_own_stays_its_own_though_the_general_one_is_the_same(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    hidden, weight, ids = inputs(dtype=torch.bfloat16)
    ALL.fp32_precision = MKLDNN.matmul.fp32_precision = value
    readout(hidden, weight, ids, exclusive=True)
    readout(hidden.float(), weight.float(), ids, exclusive=True)
    assert ALL.fp32_precision == MKLDNN.matmul.fp32_precision == value
    ALL.fp32_precision = "none"
    assert MKLDNN.matmul.fp32_precision == value


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_arithmetic_is_for_bfloat16_numbers_on_processors_that_have_it(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: native)
    half, single = inputs(dtype=torch.bfloat16), inputs()
    pair = (torch.ones(TOKENS, 1), torch.ones(VOCAB, 1))
    for (hidden, weight), low_rank, setting in (
        (half[:2], [], "bf16" if native else "none"),
        (single[:2], [], "none"),
        ((half[0], single[1]), [], "none"),
        (half[:2], [pair], "none"),
        (half[:2], [(pair[0].bfloat16(), pair[1].bfloat16())], "bf16" if native else "none"),
    ):
        with Products() as products:
            readout(hidden, weight, half[2], low_rank=low_rank, exclusive=True)
        assert products.made == {(setting, torch.float32)}


def test_next_to_another_thread_no_setting_is_touched(
    monkeypatch: pytest.MonkeyPatch, environment: str
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    hidden, weight, ids = inputs()
    before = MKLDNN.matmul.fp32_precision
    with another_thread():
        assert not is_exclusive()
        with Products() as products:
            readout(hidden, weight, ids)
            readout(hidden.bfloat16(), weight.bfloat16(), ids)
    assert {setting for setting, _ in products.made} == {before}
    # float32 products would be rounded there, those of bfloat16 numbers would not.
    assert (torch.float64 in {dtype for _, dtype in products.made}) == (before in ("tf32", "bf16"))


def test_whose_threads_count() -> None:
    class Bar(threading.Thread):
        __module__ = "tqdm._monitor"

    over = threading.Event()
    ours = threading.Thread(target=over.wait, name="deltad writes run")
    bar, theirs = Bar(target=over.wait), threading.Thread(target=over.wait)
    was = is_exclusive()
    for thread, counts in ((ours, False), (bar, False), (theirs, True)):
        thread.start()
        assert is_exclusive() == (was and not counts)
    over.set()
    for thread in (ours, bar, theirs):
        thread.join()
    assert is_exclusive() == was


def test_under_the_profiler_and_the_compiler(environment: str) -> None:
    """Both read torch's older and newer switches, and raise where they contradict each other."""
    hidden, weight, ids = inputs()
    truth = oracle(hidden, weight).gather(1, ids)
    contradictory = "raises" in state()

    def read() -> Tensor:
        return readout(hidden, weight, ids).logprobs

    if not contradictory:  # torch's own profiler raises outside of the readout too
        with torch.profiler.profile(record_shapes=True):
            assert worst(read(), truth) < 1e-5
    compiled = torch.compile(read, backend="eager")
    assert worst(compiled(), truth) < 1e-5
    torch.compiler.reset()


def test_tf32_is_lifted_by_both_of_its_switches(environment: str) -> None:
    """As on CUDA; the switches are there without a device."""
    before = state()
    put_back = precision._lift_tf32()
    assert CUDA.matmul.fp32_precision == "ieee"
    assert not CUDA.matmul.allow_tf32  # does not raise: old and new agree
    put_back()
    assert state() == before


def test_the_products_of_a_graph_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derivatives multiply numbers that are not bfloat16, whatever the operands are."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    hidden, weight, _ = inputs(dtype=torch.bfloat16)
    with exact_products(hidden, weight, exclusive=True) as dtype:
        assert dtype == torch.float32
        assert MKLDNN.matmul.fp32_precision == "none"


@pytest.mark.parametrize(
    ("probe", "expected"),
    [("_is_amx_tile_supported", True), ("_is_avx512_bf16_supported", True), (None, False)],
)
def test_what_the_processor_says(
    monkeypatch: pytest.MonkeyPatch, probe: str | None, expected: bool
) -> None:
    monkeypatch.setattr(precision, "_onednn_takes_bfloat16", lambda: True)
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == probe, raising=False)
    assert precision.multiplies_bfloat16() is expected
    monkeypatch.setattr(precision, "_onednn_takes_bfloat16", lambda: False)
    assert not precision.multiplies_bfloat16()


def test_kernels_that_cannot_take_the_tensors_are_refused() -> None:
    hidden, weight, ids = inputs(dtype=torch.float64)
    with pytest.raises(ProbeError, match=r"`fused` needs Triton.*got torch.float64"):
        readout(hidden, weight, ids, fused=True)
