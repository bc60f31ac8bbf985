"""Chained sums: the tiny recipe's task, its model and the pre-training of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .bases import base_weights
from .cache import cached_folder
from .rollout import Problem, stream
from .tiny import NUMBERS, TinyRecipe
from .workers import Report

SIGNS = ("+", "-", "=", ";", "<eos>", "<pad>", "<bos>", "<unused>")
PLUS, MINUS, EQUALS, SEMICOLON, EOS, PAD, BOS = range(NUMBERS, NUMBERS + 7)
VOCABULARY = (*(str(number) for number in range(NUMBERS)), *SIGNS)

PROMPT_LENGTH = 7
"""BOS and `a op b op c =`."""

PRETRAINING_REVISION = 1
"""Raised whenever this file would train other weights from the same fields."""

WEIGHTS = "weights.pt"


def build_model(recipe: TinyRecipe) -> Any:
    """Make the untrained Qwen3, its head tied to the embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads // 2,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(stream(recipe.pretrain_seed or 0, "weights"))
        return Qwen3ForCausalLM(config)


def draw_sum(source: random.Random, operands: int) -> tuple[list[int], list[int]]:
    """Draw the ids of a prompt and of its right response; all running results are numbers."""
    while True:
        first, second, third = (source.randrange(operands) for _ in range(3))
        one, two = (source.choice((PLUS, MINUS)) for _ in range(2))
        running = first + second if one == PLUS else first - second
        result = running + third if two == PLUS else running - third
        if 0 <= running < NUMBERS and 0 <= result < NUMBERS:
            prompt = [BOS, first, one, second, two, third, EQUALS]
            return prompt, [running, SEMICOLON, result, EOS]


def start_weights(recipe: TinyRecipe, report: Report) -> dict[str, Tensor]:
    """What a policy starts from: a shipped base model, or one that the recipe pre-trains.

    The latter is pre-trained where the cache does not have it.
    """
    if recipe.base is not None:
        return base_weights(recipe.base)
    key = recipe.pretraining_key() | {
        "revision": PRETRAINING_REVISION,
        "torch": torch.__version__,
    }
    folder = cached_folder(
        "tiny", key, lambda folder: torch.save(pretrained(recipe, report), folder / WEIGHTS)
    )
    found: dict[str, Tensor] = torch.load(folder / WEIGHTS, weights_only=True)
    return found


def pretrained(recipe: TinyRecipe, report: Report) -> dict[str, Tensor]:
    """Train on right responses, the loss on their tokens only; the weights."""
    seed = recipe.pretrain_seed
    assert seed is not None
    model = build_model(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.pretrain_lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.pretrain_lr, total_steps=recipe.pretrain_steps
    )
    source = random.Random(stream(seed, "sums"))
    slips = random.Random(stream(seed, "slips"))
    for step in range(recipe.pretrain_steps):
        rows = [
            prompt + (_slipped(response) if slips.random() < recipe.careless else response)
            for prompt, response in (
                draw_sum(source, recipe.operands) for _ in range(recipe.pretrain_batch)
            )
        ]
        ids = torch.tensor(rows)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, PROMPT_LENGTH:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        report("pre-training", (step + 1) / recipe.pretrain_steps)
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def _slipped(response: list[int]) -> list[int]:
    """A response whose result is one too high; 63, the last number, becomes 0."""
    running, sign, result, end = response
    return [running, sign, (result + 1) % NUMBERS, end]


class ArithmeticWorld:
    """The pre-trained model with prompts, rewards and names of tokens."""

    def __init__(self, recipe: TinyRecipe) -> None:
        self.operands = recipe.operands
        self.model = build_model(recipe).eval()
        self.model.load_state_dict(start_weights(recipe, lambda text, fraction: None))
        self.vocab_size = len(VOCABULARY)
        self.pad_id = PAD
        self.stop: Tensor = torch.arange(len(VOCABULARY)) == EOS

    def problem(self, source: random.Random) -> Problem:
        """Draw a chained sum."""
        prompt, response = draw_sum(source, self.operands)
        return Problem(
            prompt=" ".join(VOCABULARY[i] for i in prompt[1:]),
            prompt_ids=tuple(prompt),
            answer=VOCABULARY[response[2]],
        )

    def reward(self, problem: Problem, response: Sequence[int], stopped: bool) -> float:
        """Give 1 where EOS ends the response and the number before it is the answer."""
        right = stopped and len(response) > 1 and VOCABULARY[response[-2]] == problem.answer
        return float(right)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Name each token."""
        return [VOCABULARY[i] for i in ids]
