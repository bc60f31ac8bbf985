"""The readout against float64 throughout, written from the equations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltad.probes import ProbeError
from deltad.probes.readout import readout

from .tiny import LargestTensor

TOKENS, HIDDEN, VOCAB = 37, 48, 101


def inputs(
    *, dtype: torch.dtype = torch.float32, spread: float = 0.6, ids: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * spread).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS, ids), generator=generator)


def oracle(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-softmax over the whole vocabulary in float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def worst(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"scale": 0.125},
    {"softcap": 2.5},
    {"softcap": 30.0, "scale": 0.5, "temperature": 0.8},
    {"bias": torch.linspace(-3, 3, VOCAB)},
    {"bias": torch.linspace(-3, 3, VOCAB), "scale": 2.0, "softcap": 5.0, "temperature": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_agrees_with_float64_within_1e5_nats(options: dict[str, Any]) -> None:
    hidden, weight, ids = inputs()
    read = readout(hidden, weight, ids, token_chunk=8, vocab_chunk=23, entropy=True, **options)
    logprobs = oracle(hidden, weight, **options)
    probs = logprobs.exp()
    assert worst(read.logprobs, logprobs.gather(1, ids)) < 1e-5
    assert worst(read.entropy, -(probs * logprobs).sum(1)) < 1e-5
    assert worst(read.collision, probs.square().sum(1)) < 1e-6
    assert read.logprobs.dtype == read.logsumexp.dtype == torch.float64


def test_logsumexp_is_that_of_the_logits_at_the_temperature() -> None:
    hidden, weight, ids = inputs()
    read = readout(hidden, weight, ids, temperature=0.5)
    expected = (hidden.double() @ weight.double().T / 0.5).logsumexp(1)
    assert worst(read.logsumexp, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_not_rounded_further(dtype: torch.dtype) -> None:
    hidden, weight, ids = inputs(dtype=dtype)
    read = readout(hidden, weight, ids)
    assert worst(read.logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-5
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, ids)
    assert worst(rounded, oracle(hidden, weight).gather(1, ids)) > 1e-3


def test_float64_inputs_are_read_in_float64() -> None:
    hidden, weight, ids = inputs(dtype=torch.float64)
    read = readout(hidden, weight, ids, vocab_chunk=10)
    assert worst(read.logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-12


def test_mixed_dtypes_are_read_in_the_wider_one() -> None:
    hidden, weight, ids = inputs()
    read = readout(hidden.bfloat16(), weight, ids)
    assert worst(read.logprobs, oracle(hidden.bfloat16(), weight).gather(1, ids)) < 1e-5


@pytest.mark.parametrize("spread", [1e-3, 5.0, 60.0])
def test_flat_and_extremely_peaked_policies(spread: float) -> None:
    hidden, weight, ids = inputs(spread=spread)
    read = readout(hidden, weight, ids, vocab_chunk=10, entropy=True)
    logprobs = oracle(hidden, weight)
    probs = logprobs.exp()
    # z itself is only known to an ulp of its float32 size.
    allowed = 1e-5 + 4 * torch.finfo(torch.float32).eps * float(logprobs.abs().max())
    assert worst(read.logprobs, logprobs.gather(1, ids)) < allowed
    assert worst(read.entropy, -torch.special.xlogy(probs, probs).sum(1)) < allowed
    assert bool((read.entropy >= 0).all())
    assert bool((read.collision <= 1 + 1e-6).all())


@pytest.mark.parametrize("vocab_chunk", [1, 50, 100, 101, 4096])
@pytest.mark.parametrize("token_chunk", [5, 36, 37, 512])
def test_chunk_boundaries_lose_no_id(vocab_chunk: int, token_chunk: int) -> None:
    hidden, weight, _ = inputs()
    every = torch.arange(VOCAB).expand(TOKENS, -1)
    read = readout(hidden, weight, every, vocab_chunk=vocab_chunk, token_chunk=token_chunk)
    logprobs = oracle(hidden, weight)
    assert worst(read.logprobs, logprobs) < 1e-5
    assert worst(read.logprobs.exp().sum(1), torch.ones(1)) < 1e-6
    assert worst(read.collision, logprobs.exp().square().sum(1)) < 1e-6


def test_one_id() -> None:
    hidden, weight, ids = inputs(ids=1)
    assert (
        worst(readout(hidden, weight, ids).logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-5
    )


def test_the_maximum_may_lie_in_any_tile() -> None:
    hidden = torch.eye(4)
    weight = torch.zeros(12, 4)
    for token, best in enumerate((0, 3, 8, 11)):
        weight[best, token] = 50.0
    ids = torch.tensor([[0], [3], [8], [11]])
    read = readout(hidden, weight, ids, vocab_chunk=3)
    assert worst(read.logprobs, torch.zeros(1)) < 1e-12
    assert worst(read.collision, torch.ones(1)) < 1e-12


def test_padding_ids_give_nan_and_leave_the_rest() -> None:
    hidden, weight, ids = inputs()
    padded = ids.clone()
    padded[:, 3] = -1
    read = readout(hidden, weight, padded)
    assert bool(read.logprobs[:, 3].isnan().all())
    others = [0, 1, 2, 4, 5, 6]
    assert worst(read.logprobs[:, others], readout(hidden, weight, ids).logprobs[:, others]) < 1e-6


def test_a_repeated_id_gives_the_same_number() -> None:
    hidden, weight, ids = inputs()
    ids[:, -1] = ids[:, 0]
    read = readout(hidden, weight, ids, vocab_chunk=17)
    assert torch.equal(read.logprobs[:, 0], read.logprobs[:, -1])


def test_minus_infinity_in_the_bias_bars_an_id() -> None:
    hidden, weight, ids = inputs()
    bias = torch.zeros(VOCAB)
    bias[40:] = -torch.inf
    read = readout(hidden, weight, ids % 40, bias=bias, vocab_chunk=20, entropy=True)
    logprobs = oracle(hidden, weight[:40])
    assert worst(read.logprobs, logprobs.gather(1, ids % 40)) < 1e-5
    assert worst(read.entropy, -(logprobs.exp() * logprobs).sum(1)) < 1e-5


def test_no_tokens() -> None:
    _, weight, _ = inputs()
    none = torch.empty(0, 3, dtype=torch.long)
    read = readout(torch.empty(0, HIDDEN), weight, none, entropy=True)
    assert read.logprobs.shape == (0, 3)
    for values in (read.entropy, read.collision, read.logsumexp):
        assert values is not None
        assert values.shape == (0,)


def test_inputs_are_left_as_they_are() -> None:
    hidden, weight, ids = inputs()
    weight.requires_grad_()
    before = [each.detach().clone() for each in (hidden, weight, ids)]
    read = readout(hidden, weight, ids, softcap=5.0, temperature=0.5)
    for now, then in zip((hidden, weight, ids), before, strict=True):
        assert torch.equal(now, then)
    assert not read.logprobs.requires_grad


def test_autocast_around_it_changes_nothing() -> None:
    hidden, weight, ids = inputs()
    expected = readout(hidden, weight, ids).logprobs
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(readout(hidden, weight, ids).logprobs, expected)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_lowered_matmul_precision_is_lifted_and_put_back(precision: str) -> None:
    hidden, weight, ids = inputs()
    with matmul_precision(precision):
        mkldnn: Any = torch.backends.mkldnn
        before = (mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
        read = readout(hidden, weight, ids)
        assert (
            mkldnn.matmul.fp32_precision,
            torch.backends.cuda.matmul.fp32_precision,
        ) == before
        assert torch.get_float32_matmul_precision() == precision
    assert worst(read.logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-5


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes at which precision matrix products are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.settings: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
            mkldnn: Any = torch.backends.mkldnn
            cuda = torch.backends.cuda.matmul.fp32_precision
            self.settings.add((mkldnn.matmul.fp32_precision, cuda))
        return func(*args, **(kwargs or {}))


def test_products_are_made_in_float32_whatever_the_precision_set() -> None:
    hidden, weight, ids = inputs()
    with matmul_precision("medium"), Products() as products:
        readout(hidden, weight, ids)
    assert products.settings == {("ieee", "ieee")}


def test_no_tensor_is_larger_than_a_tile_or_the_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 16, generator=generator)
    weight = torch.randn(300, 16, generator=generator).bfloat16()
    ids = torch.randint(0, 300, (200, 6), generator=generator)
    with LargestTensor() as largest:
        readout(hidden, weight, ids, token_chunk=50, vocab_chunk=60, softcap=3.0)
    assert largest.elements <= max(50 * 60, hidden.numel(), weight.numel(), ids.numel())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be positive, got 0.0"),
        ({"temperature": float("nan")}, "`temperature` must be positive"),
        ({"softcap": -1.0}, "`softcap` must be positive, got -1.0"),
        ({"token_chunk": 0}, "`token_chunk` must be positive, got 0"),
        ({"bias": torch.zeros(3)}, r"`bias` must have shape \(101,\), got \(3,\)"),
        ({"ids": torch.full((TOKENS, 1), VOCAB)}, "`ids` must be below 101.*got 101"),
        ({"ids": torch.zeros(3, 1, dtype=torch.long)}, r"`ids` must have shape \(37, id\)"),
        ({"hidden": torch.zeros(TOKENS, 3)}, "must agree in their last axis"),
    ],
)
def test_refuses_what_cannot_be_read(change: dict[str, Any], message: str) -> None:
    hidden, weight, ids = inputs()
    given: dict[str, Any] = {"hidden": hidden, "head_weight": weight, "ids": ids, **change}
    with pytest.raises(ProbeError, match=message):
        readout(**given)
