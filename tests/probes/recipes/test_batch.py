"""Minibatches lose nothing: a shared prefix and padding leave logits and gradients as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from deltad.probes.recipes.batch import Minibatch, SharedPrefix, read_behavior, split
from deltad.probes.recipes.rollout import Group, Problem, group_advantages

from .micro import small_model

PAD = 0
PROMPTS = [(5, 6, 7, 8), (5, 6, 9), (5, 6, 7, 1, 2), (5, 6, 3)]
RESPONSES = [(11, 12, 13), (14,), (15, 16)]
REWARDS = (1.0, 0.0, 0.0)


def rollout(prompts: list[tuple[int, ...]] | None = None) -> list[Group]:
    return [
        Group(
            Problem("", ids, ""),
            tuple(tuple(token + i for token in response) for response in RESPONSES),
            REWARDS,
            group_advantages(REWARDS),
        )
        for i, ids in enumerate(prompts or PROMPTS)
    ]


def alone(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """Logits that predict each token of one response, by one unpadded forward."""
    logits: Tensor = model(input_ids=torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1]


def every_row(groups: list[Group]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(g.problem.prompt_ids, response) for g in groups for response in g.responses]


@pytest.mark.parametrize("prompts", [PROMPTS, [(5, 6), (7, 8, 9)], [(5,), (6,)]])
def test_logits_are_those_of_each_sequence_alone(prompts: list[tuple[int, ...]]) -> None:
    model = copy.deepcopy(small_model()).double()
    groups = rollout(prompts)
    (minibatch,) = split(groups, len(groups), PAD)
    found = minibatch.logits(SharedPrefix(model)(**minibatch.inputs))
    expected = torch.cat([alone(model, *row) for row in every_row(groups)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_flow_through_the_shared_prefix() -> None:
    model = copy.deepcopy(small_model()).double()
    groups = rollout()
    (minibatch,) = split(groups, len(groups), PAD)
    assert len(minibatch.inputs["prefix_ids"]) == 2
    weights = torch.randn(minibatch.size, 72, dtype=torch.float64)
    loss = (minibatch.logits(SharedPrefix(model)(**minibatch.inputs)) * weights).sum()
    found = torch.autograd.grad(loss, list(model.parameters()))
    loss = (torch.cat([alone(model, *row) for row in every_row(groups)]) * weights).sum()
    for one, other in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_are_numbered_through_the_rollout() -> None:
    parts = list(split(rollout(), 2, PAD))
    assert [part.group.tolist() for part in parts] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
    assert [part.sequence.tolist() for part in parts] == [[*range(6)], [*range(6, 12)]]
    for part in parts:
        assert part.advantages.tolist() == pytest.approx(list(group_advantages(REWARDS)) * 2)
        assert part.size == 2 * sum(len(response) for response in RESPONSES)


def test_sampled_ids_are_the_responses_in_order() -> None:
    groups = rollout()
    (minibatch,) = split(groups, len(groups), PAD)
    expected = [token for _, response in every_row(groups) for token in response]
    assert minibatch.sampled().tolist() == expected


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [3, 72, 80])
def test_behavior_is_what_the_policy_gives(top_k: int, temperature: float) -> None:
    policy = SharedPrefix(small_model())
    (minibatch,) = split(rollout(), 4, PAD)
    said = read_behavior(policy, minibatch, temperature=temperature, top_k=top_k)
    logprobs = (minibatch.logits(policy(**minibatch.inputs)).double() / temperature).log_softmax(1)
    mask = minibatch.response_mask
    assert torch.equal(said.response_mask, mask)
    sampled = logprobs.gather(1, minibatch.sampled()[:, None])[:, 0]
    torch.testing.assert_close(said.behavior_logprobs[mask], sampled, rtol=0, atol=1e-5)
    kept = min(top_k, 72)
    best = logprobs.topk(kept, dim=1)
    assert torch.equal(said.topk_ids[mask][:, :kept], best.indices)
    torch.testing.assert_close(said.topk_logprobs[mask][:, :kept], best.values, rtol=0, atol=1e-5)
    assert (said.topk_ids[mask][:, kept:] == -1).all()


def test_minibatch_keeps_logits_of_responses_only() -> None:
    (minibatch,) = split(rollout(), 4, PAD)
    output = SharedPrefix(small_model())(**minibatch.inputs)
    assert output.logits.shape[1] == max(len(response) for response in RESPONSES) + 1


def test_mask_is_true_at_responses_only() -> None:
    minibatch: Minibatch
    (minibatch,) = split(rollout(), 4, PAD)
    counts = minibatch.response_mask.sum(1).tolist()
    assert counts == [3, 1, 2] * 4
    assert not minibatch.response_mask[:, 0].any()
