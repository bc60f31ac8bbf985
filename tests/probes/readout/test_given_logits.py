"""The hybrid: exact dots, and the tail of logits that exist already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deltad.probes import ProbeError
from deltad.probes.readout import read_logits, readout, reference_readout
from tests.probes.tiny import LargestTensor

from .plain import HIDDEN, TOKENS, VOCAB, inputs, likeliest, oracle, worst

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"scale": 0.5, "softcap": 9.0, "temperature": 0.8},
    {"bias": torch.linspace(-3, 3, VOCAB), "scale": 2.0},
]


def raw(hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """What a head's module gives, in the dtype of the hidden states."""
    bias = options.get("bias")
    return torch.nn.functional.linear(
        hidden, weight, None if bias is None else bias.to(hidden.dtype)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_of_float32_logits_gives_what_the_readout_gives(options: dict[str, Any]) -> None:
    hidden, weight, ids = inputs()
    logits = raw(hidden, weight, options)
    read = read_logits(
        hidden, weight, logits, ids, entropy=True, token_chunk=8, vocab_chunk=23, **options
    )
    truth = oracle(hidden, weight, **options)
    assert worst(read.logprobs, truth.gather(1, ids)) < 1e-5
    assert worst(read.entropy, -(truth.exp() * truth).sum(1)) < 2e-5
    assert worst(read.collision, truth.exp().square().sum(1)) < 2e-6


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_of_bfloat16_logits_is_nearer_to_the_truth_than_these(temperature: float) -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16, vocab=3000)
    ids = likeliest(hidden, weight, 20)
    logits = hidden @ weight.T
    truth = oracle(hidden, weight, temperature=temperature).gather(1, ids)
    naive = (logits.float() / temperature).log_softmax(-1).gather(1, ids)
    ours = read_logits(hidden, weight, logits, ids, temperature=temperature).logprobs
    assert float((ours - truth).abs().mean()) < 0.1 * float((naive - truth).abs().mean())


def test_positions_are_picked_without_a_copy_of_their_logits() -> None:
    hidden, weight, _ = inputs(tokens=90, vocab=500)
    logits = hidden @ weight.T
    rows = torch.tensor([3, 88, 89, 0, 41] * 8)
    ids = likeliest(hidden[rows], weight)
    with LargestTensor() as seen:
        picked = read_logits(
            hidden[rows], weight, logits, ids, rows=rows, token_chunk=16, vocab_chunk=50
        )
    assert seen.elements <= 16 * 7 * HIDDEN * 10
    assert seen.elements < len(rows) * 500
    whole = read_logits(hidden[rows], weight, logits[rows], ids, token_chunk=16, vocab_chunk=50)
    assert torch.equal(picked.logprobs, whole.logprobs)


def test_ids_far_from_the_mode_are_read_by_the_reference() -> None:
    hidden = torch.eye(4)
    weight = torch.zeros(50, 4)
    weight[40] = 300.0
    ids = torch.tensor([[0, -1]]).expand(4, -1)
    read = read_logits(hidden, weight, hidden @ weight.T, ids, entropy=True)
    plain = reference_readout(hidden, weight, ids)
    assert torch.equal(read.logprobs.nan_to_num(), plain.logprobs.nan_to_num())
    assert worst(read.logprobs[:, 0], torch.full((4,), -300.0)) < 1e-4


def test_two_workers_give_the_bits_of_one_and_logits_stay_as_they_are() -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16, tokens=90)
    ids = likeliest(hidden, weight)
    logits = hidden @ weight.T
    before = logits.clone()
    one, two = (
        read_logits(hidden, weight, logits, ids, token_chunk=16, workers=workers)
        for workers in (1, 2)
    )
    assert torch.equal(one.logprobs, two.logprobs)
    assert torch.equal(logits, before)


def test_rounded_logits_make_the_error_of_the_tail_larger() -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16, vocab=3000)
    ids = likeliest(hidden, weight)
    exact = readout(hidden, weight, ids).error
    given = read_logits(hidden, weight, hidden @ weight.T, ids).error
    assert exact is not None
    assert given is not None
    assert torch.equal(exact.logit, given.logit)
    assert bool((given.tail > 100 * exact.tail).all())


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((TOKENS, VOCAB - 1), None), ((TOKENS - 1, VOCAB), None), ((TOKENS, VOCAB), TOKENS - 1)],
)
def test_refuses_logits_of_other_positions_or_ids(shape: tuple[int, int], rows: int | None) -> None:
    hidden, weight, ids = inputs()
    with pytest.raises(ProbeError, match=r"`logits` must have shape \(position, 101\)"):
        read_logits(
            hidden,
            weight,
            torch.zeros(shape),
            ids,
            rows=None if rows is None else torch.arange(rows),
        )
