from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from deltad.analysis.doctor import Sample, examine
from tests.analysis.doctor.made import made_sample


def with_advantage(sample: Sample, values: np.ndarray) -> Sample:
    return sample.replace(advantage=np.asarray(values, np.float32))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda a, group: np.zeros_like(a), "zero everywhere"),
        (lambda a, group: np.full_like(a, 0.7), "constant"),
        (lambda a, group: np.where(group == 3, np.nan, a), "not finite"),
        (lambda a, group: np.abs(a), "none is negative: no baseline was taken off, or the sign "
         "was lost"),
        (lambda a, group: np.where(group % 2, 1.0, -1.0),
         "the same for all responses of a prompt"),
    ],
)  # fmt: skip
def test_advantages_that_teach_nothing_are_found(change: object, pattern: str) -> None:
    sample = made_sample()
    values = change(sample["advantage"], sample["group"])  # type: ignore[operator]
    found = examine(with_advantage(sample, values)).findings[0]
    assert (found.cause, found.evidence["pattern"]) == ("advantage", pattern)


def test_groups_of_equal_rewards_are_no_fault() -> None:
    sample = made_sample()
    values = np.where(sample["group"] % 3 == 0, 0, sample["advantage"])
    assert examine(with_advantage(sample, values)).healthy


def masked(sample: Sample, keep: np.ndarray) -> Sample:
    arms = {**sample.in_loss, "ratio": keep}
    masks = {**sample.masks, "ratio": {"mask": "ratio"}}
    return dataclasses.replace(sample, in_loss=arms, masks=masks)


def test_a_mask_that_drops_everything_is_found_with_its_arm() -> None:
    sample = made_sample()
    found = examine(masked(sample, np.zeros(len(sample), np.bool_))).findings[0]
    assert (found.cause, found.evidence["arm"]) == ("advantage", "ratio")


def test_a_mask_that_hits_two_ids_is_concentrated() -> None:
    sample = made_sample()
    few = np.isin(sample["token_id"], [3, 8])
    found = examine(masked(sample, ~few)).findings[0]
    assert found.cause == "concentration"
    assert set(found.evidence["ids"][:2]) == {3, 8}
    assert found.estimate == 1.0


def test_a_mask_at_random_is_not() -> None:
    sample = made_sample()
    assert examine(masked(sample, np.random.default_rng(1).random(len(sample)) > 0.1)).healthy


def test_r_equal_to_one_everywhere_is_recomputed() -> None:
    sample = made_sample()
    both = sample.replace(
        behavior_logprob=sample["pre_logprob"],
        topk_behavior_logprobs=sample["topk_pre_logprobs"],
    )
    scalar = sample.replace(behavior_logprob=sample["pre_logprob"])
    for broken in (both, scalar):
        found = examine(broken).findings[0]
        assert (found.cause, found.estimate) == ("recomputed", 1.0)
