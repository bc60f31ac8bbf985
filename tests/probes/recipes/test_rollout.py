"""Sampling, advantages and groups, against slow and plain ways to do the same."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deltad.probes.recipes import RecipeError
from deltad.probes.recipes.rollout import (
    Problem,
    common_prefix,
    draw,
    group_advantages,
    mixed_groups,
    sample,
    stream,
)

from .micro import micro, small_model

GOLDEN = [4, 4, 5, 5, 5, 5, 4, 5, 5, 5, 3, 3, 4, 2, 3, 5, 1, 5, 3, 5, 5, 5, 5, 4]
"""Ids drawn by the first 24 numbers of a generator of seed 7, on every machine."""

NEVER = torch.zeros(72, dtype=torch.bool)


def drawn(
    prompts: list[list[int]], seed: int = 0, **options: Any
) -> list[list[tuple[tuple[int, ...], bool]]]:
    settings: dict[str, Any] = {
        "responses": 1,
        "temperature": 1.0,
        "max_new_tokens": 5,
        "stop": NEVER,
        "pad_id": 0,
    } | options
    generator = torch.Generator().manual_seed(seed)
    return sample(small_model(), prompts, generator=generator, **settings)


def test_advantages_are_centred_and_scaled_rewards() -> None:
    rewards = [0.0, 1.0, 0.5, 0.0]
    mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (spread + 1e-4) for reward in rewards]
    assert group_advantages(rewards) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.1, 0.1, 0.1], [1.0], []])
def test_equal_rewards_have_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards) == (0.0,) * len(rewards)


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2, 3]], 2),
        ([[1], [1, 2]], 0),
        ([[1, 2], [3, 2]], 0),
    ],
)
def test_prefix_leaves_each_row_something(rows: list[list[int]], length: int) -> None:
    assert common_prefix(rows) == length


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 1, 2]],
        [[5, 6, 7, 8, 9, 1], [5, 6], [5, 6, 3]],
        [[1, 2, 3], [4, 5], [6]],
    ],
)
def test_cold_sampling_is_greedy_decoding_of_each_prompt_alone(prompts: list[list[int]]) -> None:
    """Prefix cache, padding and key-value cache change nothing."""
    model = small_model()
    cold = drawn(prompts, temperature=1e-4, responses=2)
    for prompt, ((response, stopped), twin) in zip(prompts, cold, strict=True):
        assert twin == (response, stopped)
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(5):
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert list(response) == ids[len(prompt) :]
        assert not stopped


def test_responses_end_with_a_stopping_id_and_others_go_on_unharmed() -> None:
    stop = torch.arange(72) % 3 == 0
    prompts = [[5, 6, i % 60] for i in range(40)]
    found = [each for part in drawn(prompts, stop=stop, max_new_tokens=6) for each in part]
    assert {stopped for _, stopped in found} == {True, False}
    for response, stopped in found:
        assert stopped == (response[-1] % 3 == 0)
        assert all(token % 3 for token in response[:-1])
        assert stopped or len(response) == 6


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_first_tokens_follow_the_policy(temperature: float) -> None:
    count = 4000
    with torch.no_grad():
        logits = small_model()(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    expected = torch.softmax(logits.double() / temperature, 0) * count
    (found,) = drawn([[5, 6, 7]], responses=count, max_new_tokens=1, temperature=temperature)
    observed = torch.bincount(torch.tensor([r[0] for r, _ in found]), minlength=72)
    large = expected > 5
    chi_square = float((((observed - expected) ** 2) / expected)[large].sum())
    degrees = int(large.sum())
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_responses_depend_on_the_generator_alone() -> None:
    prompts = [[5, 6, 7]] * 8
    torch.manual_seed(1)
    first = drawn(prompts)
    before = torch.get_rng_state()
    torch.manual_seed(1)
    torch.rand(3)
    middle = torch.get_rng_state()
    assert drawn(prompts) == first
    assert torch.equal(torch.get_rng_state(), middle)
    assert not torch.equal(before, middle)
    assert drawn(prompts, seed=1) != first


def test_streams_differ_by_seed_and_purpose() -> None:
    values = {stream(seed, purpose) for seed in range(20) for purpose in ("a", "b")}
    assert len(values) == 40
    assert all(0 <= value < 2**63 for value in values)


class Counting:
    """A world whose rewards are scripted: prompt i is right in `right(i)` of its responses."""

    def __init__(self, right: Sequence[int]) -> None:
        self.model = small_model()
        self.vocab_size, self.pad_id, self.stop = 72, 0, NEVER
        self.right = right
        self.drawn = 0
        self.asked: dict[str, int] = {}

    def problem(self, source: random.Random) -> Problem:
        number = self.drawn
        self.drawn += 1
        return Problem(str(number), (5, source.randrange(60)), "")

    def reward(self, problem: Problem, response: Sequence[int], stopped: bool) -> float:
        seen = self.asked[problem.prompt] = self.asked.get(problem.prompt, 0) + 1
        return float(seen <= self.right[int(problem.prompt) % len(self.right)])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(i) for i in ids]


def groups_of(world: Counting, count: int, **overrides: Any) -> list[Any]:
    return mixed_groups(
        micro(**overrides),
        world,
        count,
        source=random.Random(0),
        generator=torch.Generator().manual_seed(0),
    )


def test_only_groups_with_mixed_rewards_are_kept_in_order() -> None:
    groups = groups_of(Counting([0, 1, 4, 3]), 5)
    assert [group.problem.prompt for group in groups] == ["1", "3", "5", "7", "9"]
    assert groups[0].rewards == (1.0, 0.0, 0.0, 0.0)
    assert groups[1].rewards == (1.0, 1.0, 1.0, 0.0)
    assert groups[0].advantages == group_advantages(groups[0].rewards)
    assert all(len(group.responses) == 4 for group in groups)


def test_giving_up_says_what_was_tried() -> None:
    world = Counting([4, 4, 4, 4, 4, 4, 4, 2])
    with pytest.raises(RecipeError, match=r"1 of 4 groups .* after 12 prompts.*0\.958.*too easy"):
        groups_of(world, 4, max_attempts=3)
    assert world.drawn == 12


def test_the_same_numbers_draw_the_same_ids_on_every_machine() -> None:
    logits = torch.linspace(-2, 3, 6, dtype=torch.float64).repeat(24, 1)
    assert draw(logits, torch.Generator().manual_seed(7)).tolist() == GOLDEN


def test_ids_are_drawn_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    count = 20_000
    ids = draw(probabilities.log().repeat(count, 1), torch.Generator().manual_seed(0))
    shares = torch.bincount(ids, minlength=6) / count
    assert torch.equal(shares == 0, probabilities == 0)
    # Five standard deviations of a share of one half.
    assert float((shares - probabilities).abs().max()) < 5 * math.sqrt(0.25 / count)


@pytest.mark.parametrize("values", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_what_is_no_distribution_is_refused(values: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0], values], dtype=torch.float64)
    with pytest.raises(RecipeError, match="no distribution"):
        draw(logits, torch.Generator())
