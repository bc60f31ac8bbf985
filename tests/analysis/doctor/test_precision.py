from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltad.analysis.doctor import examine
from deltad.analysis.doctor.distance import declared, twin_noise
from deltad.analysis.doctor.evidence import Evidence
from tests.analysis.doctor.made import log_softmax, made_sample


def noisy(size: float) -> Any:
    return lambda x: x + size * np.random.default_rng(8).normal(size=x.shape)


def rounded_logits(logits: Any) -> Any:
    values = (logits + 18).astype(np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32).astype(np.float64)


def test_twins_measure_the_noise() -> None:
    noise, pairs, side = twin_noise(Evidence(made_sample(policy=noisy(0.1))))
    assert noise == pytest.approx(0.1, rel=0.2)
    assert pairs >= 75
    assert side == "policy"
    assert twin_noise(Evidence(made_sample()))[0] == 0


@pytest.mark.parametrize("size", [0.03, 0.1, 0.3])
def test_noise_beyond_the_declared_precision_is_found_with_its_size(size: float) -> None:
    found = examine(made_sample(update=1e-4, policy=noisy(size))).findings[0]
    assert found.cause == "precision"
    assert found.estimate == pytest.approx(size, rel=0.2)


def test_noise_that_its_precision_explains_is_none() -> None:
    behavior = {"precision": "bfloat16"}
    sample = made_sample(update=1e-4, policy=noisy(0.03), metadata={"behavior": behavior})
    assert examine(sample).healthy


def test_rounded_logits_are_found_unless_declared() -> None:
    found = examine(made_sample(behavior=rounded_logits)).findings[0]
    assert found.cause == "precision"
    assert found.evidence["pattern"] == "logits rounded before the log-softmax"
    said = {"behavior": {"precision": "bfloat16"}}
    assert examine(made_sample(behavior=rounded_logits, metadata=said)).healthy


def test_rounded_log_probs_are_found() -> None:
    sample = made_sample()
    bits = sample["topk_behavior_logprobs"].view(np.uint32)
    values = (bits & 0xFFFF0000).view(np.float32)
    found = examine(sample.replace(topk_behavior_logprobs=values)).findings
    assert "bfloat16" in {each.evidence.get("fit_into") for each in found}


def test_few_rows_far_out_of_an_even_noise_are_outliers() -> None:
    def routed(logits: Any) -> Any:
        rng = np.random.default_rng(4)
        size = np.where(rng.random((len(logits), 1)) < 0.04, 1.5, 0.03)
        return logits + size * rng.normal(size=logits.shape)

    said = {"behavior": {"precision": "bfloat16"}}
    found = examine(made_sample(update=1e-4, policy=routed, metadata=said)).findings[0]
    assert found.cause == "precision"
    assert found.evidence["pattern"] == "few rows far out, the rest even"
    assert found.evidence["share"] == pytest.approx(0.04, abs=0.02)


@pytest.mark.parametrize(
    ("behavior", "name"),
    [
        ({"precision": "fp8"}, "fp8"),
        ({"dtype": "torch.bfloat16"}, "torch.bfloat16"),
        ({}, "not declared"),
    ],
)
def test_the_coarsest_declared_precision_counts(behavior: dict[str, str], name: str) -> None:
    sample = made_sample(metadata={"behavior": behavior})
    assert declared(Evidence(sample))[0] == name


def test_the_noise_of_the_tests_is_on_logits() -> None:
    logits = np.zeros((1, 3))
    assert np.exp(log_softmax(noisy(0.1)(logits))).sum() == pytest.approx(1)
