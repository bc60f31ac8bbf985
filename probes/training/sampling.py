"""Rollout batches and evaluations: prompts, responses, rewards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deltad.probes.recipes.rollout import Group, Problem, World, group_advantages, sample, stream

from .options import Training

SEQUENCES_AT_ONCE = 256
"""Responses sampled at once."""


@dataclass(frozen=True)
class HeldOut:
    """Prompts that are never trained on.

    Attributes
    ----------
    problems : tuple of Problem
        Distinct; the same for all seeds and masks.
    """

    problems: tuple[Problem, ...]
    _known: frozenset[tuple[int, ...]] = field(repr=False)

    @classmethod
    def draw(cls, training: Training, world: World) -> HeldOut:
        """Draw them; fewer than asked for where the task does not have so many."""
        source = random.Random(stream(0, "held-out"))
        found: dict[tuple[int, ...], Problem] = {}
        for _ in range(100 * training.eval_prompts):
            problem = world.problem(source)
            found.setdefault(problem.prompt_ids, problem)
            if len(found) == training.eval_prompts:
                break
        return cls(tuple(found.values()), frozenset(found))

    def others(self, world: World, source: random.Random, count: int) -> list[Problem]:
        """Draw prompts that are not held out."""
        drawn: list[Problem] = []
        for _ in range(100 * count + 100):
            problem = world.problem(source)
            if problem.prompt_ids not in self._known:
                drawn.append(problem)
            if len(drawn) == count:
                break
        if len(drawn) < count:
            raise ValueError(
                f"only {len(drawn)} of {count} prompts of the task are not held out: lower "
                "`eval_prompts`"
            )
        return drawn


def roll_out(
    training: Training, world: World, held_out: HeldOut, model: Any, *, seed: int, batch: int
) -> tuple[list[Group], dict[str, float]]:
    """Sample a rollout batch; every group stays in it, whatever its rewards.

    Parameters
    ----------
    training, world, held_out
        What to sample.
    model
        Who samples: a causal language model of transformers.
    seed, batch
        All randomness follows from these two.

    Returns
    -------
    groups : list of Group
        `prompts` times `minibatches` of them, with their advantages.
    sums : dict of str to float
        `responses`, `reward`, `length`, `cut`, `groups`, `mixed`: see `deltad.curves`.
    """
    source = random.Random(stream(seed, f"training/{batch}/prompts"))
    problems = held_out.others(world, source, training.prompts * training.minibatches)
    groups: list[Group] = []
    cut = 0
    for problem, own in _sampled(
        training,
        world,
        model,
        problems,
        training.responses,
        stream(seed, f"training/{batch}/responses"),
    ):
        rewards = tuple(world.reward(problem, ids, stopped) for ids, stopped in own)
        cut += sum(not stopped for _, stopped in own)
        advantages = group_advantages(rewards)
        groups.append(Group(problem, tuple(ids for ids, _ in own), rewards, advantages))
    return groups, {
        "responses": sum(len(group.rewards) for group in groups),
        "reward": sum(sum(group.rewards) for group in groups),
        "length": sum(len(ids) for group in groups for ids in group.responses),
        "cut": cut,
        "groups": len(groups),
        "mixed": sum(any(group.advantages) for group in groups),
    }


def evaluate(
    training: Training, world: World, held_out: HeldOut, model: Any, *, seed: int, batch: int
) -> dict[str, float]:
    """Try the held-out prompts, each `eval_samples` times (avg@n).

    Parameters
    ----------
    training, world, held_out, model, seed, batch
        As in `roll_out`.

    Returns
    -------
    dict of str to float
        `samples`, and `correct`: the sum of their rewards.
    """
    rewards = [
        world.reward(problem, ids, stopped)
        for problem, own in _sampled(
            training,
            world,
            model,
            held_out.problems,
            training.eval_samples,
            stream(seed, f"training/{batch}/evaluation"),
        )
        for ids, stopped in own
    ]
    return {"samples": len(rewards), "correct": sum(rewards)}


def _sampled(
    training: Training,
    world: World,
    model: Any,
    problems: Sequence[Problem],
    responses: int,
    seed: int,
) -> Iterator[tuple[Problem, list[tuple[tuple[int, ...], bool]]]]:
    """Responses to each prompt, some prompts at once."""
    generator = torch.Generator().manual_seed(seed)
    size = max(1, SEQUENCES_AT_ONCE // responses)
    for start in range(0, len(problems), size):
        part = problems[start : start + size]
        found = sample(
            model,
            [problem.prompt_ids for problem in part],
            responses=responses,
            generator=generator,
            temperature=training.temperature,
            max_new_tokens=training.max_new_tokens,
            stop=world.stop,
            pad_id=world.pad_id,
        )
        yield from zip(part, found, strict=True)
