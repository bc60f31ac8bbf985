"""The readout and its reference against float64 throughout, written from the equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltad.probes import ProbeError
from deltad.probes.readout import Readout, readout, reference_readout
from tests.probes.tiny import LargestTensor

from .plain import HIDDEN, TOKENS, VOCAB, inputs, likeliest, oracle, worst

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


def pivoted(*args: Any, **options: Any) -> Readout:
    return readout(*args, entropy=True, **options)


both = pytest.mark.parametrize("read_by", [pivoted, reference_readout])


@both
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_agrees_with_float64_within_1e5_nats(
    options: dict[str, Any], read_by: Callable[..., Readout]
) -> None:
    hidden, weight, ids = inputs()
    read = read_by(hidden, weight, ids, token_chunk=8, vocab_chunk=23, **options)
    logprobs = oracle(hidden, weight, **options)
    probs = logprobs.exp()
    assert worst(read.logprobs, logprobs.gather(1, ids)) < 1e-5
    assert worst(read.entropy, -(probs * logprobs).sum(1)) < 1e-5
    assert worst(read.collision, probs.square().sum(1)) < 1e-5
    assert read.logprobs.dtype == read.logsumexp.dtype == torch.float64


@both
def test_logsumexp_is_that_of_the_logits_at_the_temperature(
    read_by: Callable[..., Readout],
) -> None:
    hidden, weight, ids = inputs()
    read = read_by(hidden, weight, ids, temperature=0.5)
    expected = (hidden.double() @ weight.double().T / 0.5).logsumexp(1)
    assert worst(read.logsumexp, expected) < 1e-5


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_not_rounded_further(
    dtype: torch.dtype, read_by: Callable[..., Readout]
) -> None:
    hidden, weight, ids = inputs(dtype=dtype)
    read = read_by(hidden, weight, ids)
    assert worst(read.logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-5
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, ids)
    assert worst(rounded, oracle(hidden, weight).gather(1, ids)) > 1e-3


@both
def test_float64_inputs_are_read_in_float64(read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs(dtype=torch.float64)
    read = read_by(hidden, weight, ids, vocab_chunk=10)
    assert worst(read.logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-12


@both
def test_mixed_dtypes_are_read_in_the_wider_one(read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs()
    read = read_by(hidden.bfloat16(), weight, ids)
    assert worst(read.logprobs, oracle(hidden.bfloat16(), weight).gather(1, ids)) < 1e-5


@both
@pytest.mark.parametrize("spread", [1e-3, 5.0, 60.0])
def test_flat_and_extremely_peaked_policies(spread: float, read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs(spread=spread)
    read = read_by(hidden, weight, ids, vocab_chunk=10)
    logprobs = oracle(hidden, weight)
    probs = logprobs.exp()
    # z itself is only known to an ulp of its float32 size.
    allowed = 1e-5 + 4 * torch.finfo(torch.float32).eps * float(logprobs.abs().max())
    assert worst(read.logprobs, logprobs.gather(1, ids)) < allowed
    assert worst(read.entropy, -torch.special.xlogy(probs, probs).sum(1)) < allowed
    assert read.entropy is not None
    assert read.collision is not None
    assert float(read.entropy.min()) >= 0
    assert float(read.collision.max()) <= 1 + 1e-6


@both
@pytest.mark.parametrize("vocab_chunk", [1, 50, 100, 101, 4096])
@pytest.mark.parametrize("token_chunk", [5, 36, 37, 512])
def test_chunk_boundaries_lose_no_id(
    vocab_chunk: int, token_chunk: int, read_by: Callable[..., Readout]
) -> None:
    hidden, weight, _ = inputs()
    every = torch.arange(VOCAB).expand(TOKENS, -1)
    read = read_by(hidden, weight, every, vocab_chunk=vocab_chunk, token_chunk=token_chunk)
    logprobs = oracle(hidden, weight)
    assert worst(read.logprobs, logprobs) < 1e-5
    assert worst(read.logprobs.exp().sum(1), torch.ones(1)) < 1e-6
    assert worst(read.collision, logprobs.exp().square().sum(1)) < 1e-5


@both
def test_one_id(read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs(ids=1)
    assert (
        worst(read_by(hidden, weight, ids).logprobs, oracle(hidden, weight).gather(1, ids)) < 1e-5
    )


@both
def test_the_maximum_may_lie_in_any_tile(read_by: Callable[..., Readout]) -> None:
    hidden = torch.eye(4)
    weight = torch.zeros(12, 4)
    for token, best in enumerate((0, 3, 8, 11)):
        weight[best, token] = 50.0
    ids = torch.tensor([[0], [3], [8], [11]])
    read = read_by(hidden, weight, ids, vocab_chunk=3)
    assert worst(read.logprobs, torch.zeros(1)) < 1e-12
    assert worst(read.collision, torch.ones(1)) < 1e-12


@both
def test_padding_ids_give_nan_and_leave_the_rest(read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs()
    padded = ids.clone()
    padded[:, 3] = -1
    read = read_by(hidden, weight, padded)
    assert bool(read.logprobs[:, 3].isnan().all())
    others = [0, 1, 2, 4, 5, 6]
    assert worst(read.logprobs[:, others], read_by(hidden, weight, ids).logprobs[:, others]) < 1e-6


@both
def test_a_repeated_id_gives_the_same_number(read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs()
    ids[:, -1] = ids[:, 0]
    read = read_by(hidden, weight, ids, vocab_chunk=17)
    assert torch.equal(read.logprobs[:, 0], read.logprobs[:, -1])


@both
def test_minus_infinity_in_the_bias_bars_an_id(read_by: Callable[..., Readout]) -> None:
    hidden, weight, ids = inputs()
    bias = torch.zeros(VOCAB)
    bias[40:] = -torch.inf
    read = read_by(hidden, weight, ids % 40, bias=bias, vocab_chunk=20)
    logprobs = oracle(hidden, weight[:40])
    assert worst(read.logprobs, logprobs.gather(1, ids % 40)) < 1e-5
    assert worst(read.entropy, -(logprobs.exp() * logprobs).sum(1)) < 1e-5


@both
def test_no_tokens(read_by: Callable[..., Readout]) -> None:
    _, weight, _ = inputs()
    none = torch.empty(0, 3, dtype=torch.long)
    read = read_by(torch.empty(0, HIDDEN), weight, none)
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
        ({"temperature": 0.0}, "`temperature` must be positive and finite, got 0.0"),
        ({"temperature": float("nan")}, "`temperature` must be positive"),
        ({"temperature": float("inf")}, "`temperature` must be positive and finite, got inf"),
        ({"softcap": -1.0}, "`softcap` must be positive and finite, got -1.0"),
        ({"scale": float("nan")}, "`scale` must be finite, got nan"),
        ({"token_chunk": 0}, "`token_chunk` must be positive and an integer, got 0"),
        ({"vocab_chunk": 2.0}, "`vocab_chunk` must be positive and an integer, got 2.0"),
        ({"workers": 1.5}, "`workers` must be positive and an integer, got 1.5"),
        ({"ids": torch.zeros(TOKENS, 1)}, "`ids` must be int32 or int64, got torch.float32"),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_is_nearer_to_the_truth_than_rounded_logits(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, _ = inputs(dtype=dtype, spread=0.7, vocab=600)
    ids = likeliest(hidden, weight)
    truth = oracle(hidden, weight, temperature=temperature).gather(1, ids)
    naive = ((hidden @ weight.T).float() / temperature).log_softmax(-1).gather(1, ids)
    read = readout(hidden, weight, ids, temperature=temperature)
    ours, theirs = (each.abs() for each in (read.logprobs - truth, naive - truth))
    assert bool((ours <= theirs + 5e-6 / temperature).all())


SHAPES = st.tuples(
    st.integers(1, 20), st.integers(1, 24), st.integers(2, 70), st.integers(1, 9)
)  # token, hidden, vocab, id


@given(
    shape=SHAPES,
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.01, 0.5, 2.0, 20.0]),
    options=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 1.7]),
            "scale": st.sampled_from([0.25, 1.0]),
            "softcap": st.sampled_from([None, 3.0]),
            "token_chunk": st.integers(1, 25),
            "vocab_chunk": st.integers(1, 80),
        }
    ),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    other=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape_padding_and_repetition(
    shape: tuple[int, int, int, int],
    seed: int,
    spread: float,
    options: dict[str, Any],
    biased: bool,
    dtype: torch.dtype,
    other: torch.dtype,
) -> None:
    tokens, deep, vocab, width = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, deep, generator=generator).to(dtype)
    weight = (torch.randn(vocab, deep, generator=generator) * spread).to(other)
    bias = torch.randn(vocab, generator=generator) if biased else None
    ids = torch.randint(-1, vocab, (tokens, width), generator=generator)
    read = readout(hidden, weight, ids, bias=bias, entropy=True, **options)

    chunks = ("token_chunk", "vocab_chunk")
    named = {key: value for key, value in options.items() if key not in chunks}
    truth = oracle(hidden, weight, bias=bias, **named)
    probs = truth.exp()
    allowed = 1e-5 + 1e-6 * float(truth.abs().max())
    assert torch.equal(read.logprobs.isnan(), ids < 0)
    expected = torch.where(ids < 0, 0.0, truth.gather(1, ids.clamp(min=0)))
    assert worst(read.logprobs.nan_to_num(), expected) < allowed
    assert float(read.logprobs.nan_to_num().max()) <= 1e-12
    assert worst(read.entropy, -torch.special.xlogy(probs, probs).sum(1)) < allowed
    assert worst(read.collision, probs.square().sum(1)) < 1e-5
    plain = reference_readout(hidden, weight, ids, bias=bias, **named)
    assert worst(read.logsumexp, plain.logsumexp) < allowed


def test_all_ids_together_hold_all_of_the_mass() -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16, vocab=400)
    every = torch.arange(400).expand(TOKENS, -1)
    read = readout(hidden, weight, every, vocab_chunk=64)
    assert worst(read.logprobs.exp().sum(1), torch.ones(1)) < 1e-12
    assert worst(read.collision, read.logprobs.exp().square().sum(1)) < 1e-12


def test_ids_and_tail_hold_all_of_the_mass() -> None:
    """The tail of one half of the vocabulary is what the other half holds, and conversely."""
    hidden, weight, _ = inputs(vocab=400)
    halves = [torch.arange(first, first + 200).expand(TOKENS, -1) for first in (0, 200)]
    mass = [readout(hidden, weight, half).logprobs.exp().sum(1) for half in halves]
    assert worst(mass[0] + mass[1], torch.ones(1)) < 1e-6


def test_no_logprob_is_above_zero() -> None:
    """Sure tokens, where rounded logits give probabilities above 1."""
    hidden, weight, _ = inputs(dtype=torch.bfloat16, spread=4.0, tokens=200, vocab=300)
    ids = likeliest(hidden, weight)
    read = readout(hidden, weight, ids)
    assert float(read.logprobs.max()) <= 0.0
    assert float((read.logprobs > -1e-3).double().mean()) > 0.02  # there are sure ones


@pytest.mark.parametrize("low", [20.0, 60.0, 200.0, 1e4])
def test_a_pivot_far_below_the_mode_is_noticed(low: float) -> None:
    """The ids asked for miss the mode by far more than an exponential can hold."""
    hidden = torch.eye(8).bfloat16()
    weight = torch.zeros(300, 8).bfloat16()
    weight[7] = low
    weight[290, :4] = low
    ids = torch.tensor([[0, 1, -1]]).expand(8, -1)
    read = readout(hidden, weight, ids, vocab_chunk=64, entropy=True)
    truth = oracle(hidden, weight)
    assert worst(read.logprobs[:, :2], truth[:, :2]) < 1e-3 * low
    plain = reference_readout(hidden, weight, ids, vocab_chunk=64)
    for name in ("logsumexp", "entropy", "collision"):
        assert worst(getattr(read, name), getattr(plain, name)) < 1e-4 * (1 + low / 100), name
    assert read.error is not None
    assert bool(read.error.logit.isfinite().all() & read.error.tail.isfinite().all())


def test_tokens_without_any_id_still_have_a_logsumexp() -> None:
    hidden, weight, ids = inputs()
    ids[3] = -1
    read = readout(hidden, weight, ids, entropy=True)
    plain = reference_readout(hidden, weight, ids)
    assert bool(read.logprobs[3].isnan().all())
    assert worst(read.logsumexp, plain.logsumexp) < 5e-6
    assert worst(readout(hidden, weight, ids[:, :0]).logsumexp, plain.logsumexp) < 5e-6


def test_more_ids_than_are_multiplied_out() -> None:
    hidden, weight, _ = inputs(vocab=700)
    every = torch.arange(700).expand(TOKENS, -1)
    read = readout(hidden, weight, every, vocab_chunk=300)
    assert worst(read.logprobs, oracle(hidden, weight)) < 1e-5
    assert read.entropy is None
    assert read.error is None


def test_low_rank_adapters_add_to_the_logits() -> None:
    hidden, weight, ids = inputs(dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    pair = torch.randn(TOKENS, 4, generator=generator), torch.randn(VOCAB, 4, generator=generator)
    read = readout(hidden, weight, ids, low_rank=[pair], scale=0.5, vocab_chunk=30)
    logits = 0.5 * (hidden.double() @ weight.double().T + pair[0].double() @ pair[1].double().T)
    assert worst(read.logprobs, logits.log_softmax(1).gather(1, ids)) < 1e-5


def test_what_is_not_asked_for_is_not_there_and_changes_nothing() -> None:
    hidden, weight, ids = inputs()
    bare = readout(hidden, weight, ids, collision=False)
    full = readout(hidden, weight, ids, entropy=True)
    assert bare.collision is bare.entropy is None
    assert torch.equal(bare.logprobs, full.logprobs)


def test_the_same_inputs_give_the_same_bits() -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16, tokens=90)
    ids = likeliest(hidden, weight)
    first, second = (readout(hidden, weight, ids, token_chunk=32, vocab_chunk=40) for _ in range(2))
    assert torch.equal(first.logprobs, second.logprobs)
    assert torch.equal(first.logsumexp, second.logsumexp)


def test_two_workers_give_the_bits_of_one() -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16, tokens=90)
    ids = likeliest(hidden, weight)
    ids[5] = 3  # far from its mode: read by the reference
    one, two = (
        readout(
            hidden,
            weight,
            ids,
            token_chunk=16,
            vocab_chunk=40,
            workers=workers,
            entropy=True,
        )
        for workers in (1, 2)
    )
    for name in ("logsumexp", "logprobs", "entropy", "collision"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_memory_does_not_grow_with_the_tokens() -> None:
    largest = {}
    for tokens in (64, 256):
        hidden, weight, _ = inputs(dtype=torch.bfloat16, tokens=tokens, vocab=900)
        ids = likeliest(hidden, weight)
        with LargestTensor() as seen:
            readout(hidden, weight, ids, token_chunk=32, vocab_chunk=100)
        largest[tokens] = seen.elements
    # The result and what it is made of have a number an id; everything else is a tile.
    assert largest[64] <= max(weight.numel(), 2 * 64 * 7 * HIDDEN)
    assert largest[256] == largest[64]
