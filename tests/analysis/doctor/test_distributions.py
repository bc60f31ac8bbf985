"""What the two distributions give away where lists are short, noisy or share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from deltad.analysis.doctor import examine
from deltad.analysis.doctor.diagnosis import explained_away
from deltad.analysis.doctor.findings import Finding

from .made import Floats, made_sample


def test_a_cut_beyond_the_lists_is_truncation_by_one_offset() -> None:
    def flat(logits: Floats) -> Floats:
        return logits * 0.3

    def cut(logits: Floats) -> Floats:
        least = np.sort(flat(logits), axis=1)[:, -30][:, None]
        return np.where(flat(logits) >= least, flat(logits), -np.inf)

    sample = made_sample(update=0.002, top_k=12, behavior=cut, policy=flat)
    (found,) = examine(sample).findings
    assert found.cause == "truncation"
    assert found.evidence["side"] == "behavior"
    assert found.estimate is not None
    assert 0.5 < found.estimate < 0.95


def test_entropies_tell_a_shift_where_lists_share_no_ids() -> None:
    sample = made_sample(vocab_size=3000, top_k=20, groups=8, update=0.02)
    p = np.exp(sample["topk_pre_logprobs"].astype(np.float64))
    rest = np.maximum(1 - p.sum(axis=1), 1e-12)
    entropy = (-(p * np.log(p)).sum(axis=1) - rest * np.log(rest)).astype(np.float32)
    sound = sample.replace(pre_entropy=entropy)
    assert examine(sound).healthy
    before = np.arange(len(sample)) - np.where(sample["position"] > 0, 1, 0)
    unrelated = np.random.default_rng(0).normal(-9, 1, p.shape).astype(np.float32)
    shifted = sound.replace(
        pre_entropy=entropy[before],
        topk_pre_logprobs=unrelated,
        topk_post_logprobs=unrelated,
        pre_logprob=unrelated[:, 0] - 0.5,
        post_logprob=unrelated[:, 0] - 0.5,
    )
    found = examine(shifted).findings[0]
    assert (found.cause, found.estimate) == ("shift", 1.0)
    assert found.evidence["pattern"] == "entropies"


@pytest.mark.parametrize("size", [0.05, 0.15, 0.4])
def test_even_noise_of_an_engine_that_declares_nothing_is_no_finding(size: float) -> None:
    def noisy(logits: Floats) -> Floats:
        return logits + np.random.default_rng(5).normal(0, size, logits.shape)

    sample = made_sample(update=1e-3, policy=noisy, steps=5, metadata={"behavior": {}})
    # Every row has a prompt of its own, or its siblings' noise would differ.
    sample = sample.replace(group=np.arange(len(sample), dtype=np.int32))
    assert examine(sample).healthy
    declared = sample.with_metadata(behavior={"precision": "float32"})
    assert [found.cause for found in examine(declared).findings] == ["precision"]


def finding(cause: str, confidence: float) -> Finding:
    return Finding(cause, confidence, 100, None, {})


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([("stale", 0.75), ("temperature", 0.97)], ["temperature"]),
        ([("stale", 0.9), ("temperature", 0.97)], ["stale"]),
        ([("truncation", 0.75), ("temperature", 0.97)], ["temperature"]),
        ([("sentinel", 0.9), ("advantage", 0.95)], ["advantage", "sentinel"]),
        ([("recomputed", 0.5), ("topk-convention", 0.99)], ["recomputed"]),
        ([], []),
    ],
)
def test_the_order_settles_what_explains_what_unless_a_later_cause_is_much_surer(
    given: list[tuple[str, float]], left: list[str]
) -> None:
    found = explained_away(finding(*each) for each in given)
    assert [each.cause for each in found] == left
