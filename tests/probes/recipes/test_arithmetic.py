"""The tiny recipe's task and model."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deltad.probes.recipes import TinyRecipe
from deltad.probes.recipes.arithmetic import (
    EOS,
    MINUS,
    PLUS,
    PROMPT_LENGTH,
    SEMICOLON,
    VOCABULARY,
    ArithmeticWorld,
    build_model,
    draw_sum,
)
from deltad.probes.recipes.rollout import Problem
from deltad.probes.recipes.tiny import NUMBERS

from .micro import micro


def test_default_model_has_the_size_that_is_told() -> None:
    model = build_model(TinyRecipe())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(128_000, rel=0.01)
    assert model.config.vocab_size == len(VOCABULARY) == 72
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_weights_before_training_follow_from_their_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (build_model(micro(pretrain_seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    first, second, third = (m.get_input_embeddings().weight for m in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("operands", [2, 32, 64])
def test_right_responses_are_the_running_results(operands: int) -> None:
    source = random.Random(0)
    for _ in range(200):
        prompt, response = draw_sum(source, operands)
        assert len(prompt) == PROMPT_LENGTH
        _, first, one, second, two, third, _ = prompt
        assert max(first, second, third) < operands
        assert {one, two} <= {PLUS, MINUS}
        running = first + second * (1 if one == PLUS else -1)
        result = running + third * (1 if two == PLUS else -1)
        assert response == [running, SEMICOLON, result, EOS]
        assert 0 <= min(running, result) <= max(running, result) < NUMBERS


@pytest.mark.parametrize(
    ("response", "stopped", "reward"),
    [
        ((3, SEMICOLON, 7, EOS), True, 1.0),
        ((9, SEMICOLON, 7, EOS), True, 1.0),
        ((7, EOS), True, 1.0),
        ((7,), False, 0.0),
        ((3, SEMICOLON, 7), False, 0.0),
        ((3, SEMICOLON, 8, EOS), True, 0.0),
        ((7, SEMICOLON, EOS), True, 0.0),
        ((EOS,), True, 0.0),
    ],
)
def test_reward_wants_the_final_number_and_eos(
    cache: object, response: tuple[int, ...], stopped: bool, reward: float
) -> None:
    recipe = micro()
    recipe.prepare(lambda text, fraction: None)
    world = ArithmeticWorld(recipe)
    assert world.reward(Problem("", (), "7"), response, stopped) == reward


def test_pretraining_learns(cache: object) -> None:
    """The right response is far likelier than to a model that knows nothing."""
    recipe = micro()
    recipe.prepare(lambda text, fraction: None)
    world = ArithmeticWorld(recipe)
    source = random.Random(1)
    rows = [prompt + response for prompt, response in (draw_sum(source, 2) for _ in range(200))]
    ids = torch.tensor(rows)
    with torch.no_grad():
        logprobs = world.model(input_ids=ids[:, :-1]).logits[:, PROMPT_LENGTH - 1 :].log_softmax(-1)
    loss = -logprobs.gather(2, ids[:, PROMPT_LENGTH:, None]).mean()
    assert float(loss) < math.log(len(VOCABULARY)) / 2


def test_prompts_are_written_as_people_do(cache: object) -> None:
    recipe = micro()
    recipe.prepare(lambda text, fraction: None)
    world = ArithmeticWorld(recipe)
    problem = world.problem(random.Random(3))
    prompt, response = draw_sum(random.Random(3), 2)
    assert problem.prompt_ids == tuple(prompt)
    assert problem.prompt == " ".join(world.pieces(prompt[1:]))
    assert problem.answer == world.pieces(response)[2]
