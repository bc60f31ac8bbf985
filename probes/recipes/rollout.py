"""Rollouts: sampling with a key-value cache, groups with mixed rewards, their advantages."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from deltad.probes.engines import EngineResponse

    from .engine import RolloutEngine

SAMPLING_BATCH = 64
"""Sequences sampled at once."""

ADVANTAGE_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as GRPO implementations do."""


@dataclass(frozen=True)
class Problem:
    """A prompt and what its scorer needs."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    entry: Any = None


@dataclass(frozen=True)
class Group:
    """Responses to one prompt, with their rewards and advantages.

    `said` is what the engine reported of each, where another engine than the trainer sampled.
    """

    problem: Problem
    responses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    said: tuple[EngineResponse, ...] = ()


class World(Protocol):
    """A policy with its task: all that the loop needs of a recipe's model and data."""

    model: Any
    vocab_size: int
    pad_id: int
    stop: Tensor
    """Ids that end a response, shape (vocab,), bool; the last id is part of the response."""

    def problem(self, source: random.Random) -> Problem:
        """Draw a prompt."""

    def reward(self, problem: Problem, response: Sequence[int], stopped: bool) -> float:
        """Score a response; `stopped` tells that it ended by itself."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Decode each id by itself."""


def stream(seed: int, purpose: str) -> int:
    """Seed of one of the independent random streams of a recipe's seed, below 2^63."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def group_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """Rewards of a group, centred and divided by their standard deviation (GRPO).

    Parameters
    ----------
    rewards
        Of all responses to one prompt.

    Returns
    -------
    tuple of float
        (R − mean) / (std + 1e-4) with the sample's standard deviation; zeros where all rewards
        are equal.

    Examples
    --------
    >>> [round(a, 2) for a in group_advantages([1.0, 0.0, 0.0, 0.0])]
    [1.5, -0.5, -0.5, -0.5]
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or (values == values[0]).all():
        return (0.0,) * len(values)
    centred = (values - values.mean()) / (values.std(ddof=1) + ADVANTAGE_EPSILON)
    return tuple(float(value) for value in centred)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix of all sequences that leaves each at least one id."""
    shortest = min(len(sequence) for sequence in sequences)
    length = 0
    while length < shortest - 1 and len({sequence[length] for sequence in sequences}) == 1:
        length += 1
    return length


def cache_argument(model: Any) -> str:
    """Name of the argument by which a transformers model takes a key-value cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def prefix_cache(model: Any, prefix: Tensor, batch: int) -> Any:
    """Keys and values of a prefix that a whole batch shares, computed once.

    Parameters
    ----------
    model
        A causal language model of transformers.
    prefix
        Ids, shape (prefix,); may be empty.
    batch
        Sequences that go on from it.

    Returns
    -------
    Cache
        A `DynamicCache` of that batch size; gradients flow back through it.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if len(prefix):
        body = model.base_model
        body(input_ids=prefix[None], use_cache=True, **{cache_argument(body): cache})
        cache.batch_repeat_interleave(batch)
    return cache


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows aligned at their end, each of shape (row, longest)."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    present = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        present[i, width - len(row) :] = True
    return ids, present


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    responses: int,
    generator: torch.Generator,
    temperature: float,
    max_new_tokens: int,
    stop: Tensor,
    pad_id: int,
) -> list[list[tuple[tuple[int, ...], bool]]]:
    """Sample responses to each prompt with a key-value cache.

    What all prompts begin with is computed once, and what a prompt adds to it once for all of
    its responses.

    Parameters
    ----------
    model
        A causal language model of transformers.
    prompts
        Ids of each.
    responses
        Responses to a prompt.
    generator
        Where the randomness comes from; the result depends on nothing else.
    temperature, max_new_tokens
        As in `Recipe`.
    stop
        Ids that end a response, shape (vocab,), bool.
    pad_id
        Any id, for padding.

    Returns
    -------
    list of list of (ids, stopped)
        A list a prompt; `ids` ends with the stopping id where `stopped`.
    """
    shared = common_prefix(prompts)
    cache = prefix_cache(model, torch.tensor(prompts[0][:shared], dtype=torch.long), len(prompts))
    ids, present = pad_left([prompt[shared:] for prompt in prompts], pad_id)
    mask = torch.cat([torch.ones(len(prompts), shared, dtype=torch.bool), present], dim=1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, shared:]
    count = len(prompts) * responses
    drawn: list[list[int]] = [[] for _ in range(count)]
    stopped = [False] * count
    active = torch.arange(count)
    argument = cache_argument(model)
    for index in range(max_new_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{argument: cache},
        ).logits[:, -1]
        if index == 0:
            logits, mask, positions = (
                each.repeat_interleave(responses, dim=0) for each in (logits, mask, positions)
            )
            cache.batch_repeat_interleave(responses)
        chosen = draw(logits.double() / temperature, generator)
        for row, token in zip(active.tolist(), chosen.tolist(), strict=True):
            drawn[row].append(token)
            stopped[row] = bool(stop[token])
        going_on = ~stop[chosen]
        if not going_on.any():
            break
        if not going_on.all():
            kept = going_on.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            active, chosen, mask, positions = (
                each[kept] for each in (active, chosen, mask, positions)
            )
        ids = chosen[:, None]
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.bool)], dim=1)
        positions = positions[:, -1:] + 1
    found = [(tuple(ids), ended) for ids, ended in zip(drawn, stopped, strict=True)]
    return [found[start : start + responses] for start in range(0, count, responses)]


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an id from each row of logits: the first whose cumulative probability exceeds u.

    One uniform float64 u per row is all the randomness, and `torch.rand` makes the same ones on
    every CPU; `torch.multinomial` draws by random numbers that depend on the build of torch.

    Parameters
    ----------
    logits : Tensor of float64, shape (row, vocab)
        At the temperature.
    generator : torch.Generator
        On the CPU.

    Returns
    -------
    Tensor of int64, shape (row,)

    Raises
    ------
    RecipeError
        A row holds no distribution: a NaN, +∞ or nothing but −∞.
    """
    cumulative = torch.softmax(logits, -1).cumsum(-1)
    total = cumulative[:, -1:]  # 1 but for rounding
    if not bool(total.isfinite().all()):
        raise RecipeError(
            "the policy gives logits that are no distribution (NaN or infinite): nothing can be "
            "sampled from it"
        )
    u = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator)
    below = total.nextafter(torch.zeros_like(total))  # a product with 1 - 2^-53 may round up
    return (cumulative <= torch.minimum(u * total, below)).sum(-1)


def ask(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    *,
    responses: int,
    generator: torch.Generator,
) -> list[tuple[EngineResponse, ...]]:
    """Let an engine sample, every request from a seed of its own.

    Parameters
    ----------
    engine
        What samples.
    prompts
        Ids of each.
    responses
        Responses to a prompt.
    generator
        Draws the seeds.

    Returns
    -------
    list of tuple of EngineResponse
        A tuple a prompt.
    """
    count = len(prompts) * responses
    seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    said = engine.generate([prompt for prompt in prompts for _ in range(responses)], seeds)
    return [tuple(said[start : start + responses]) for start in range(0, count, responses)]


def ids_of(response: EngineResponse, stop: Tensor) -> tuple[tuple[int, ...], bool]:
    """Ids of a response, and whether it ended by itself."""
    ids = tuple(response.token_ids.tolist())
    return ids, bool(stop[ids[-1]])


def mixed_groups(
    recipe: Recipe,
    world: World,
    count: int,
    *,
    source: random.Random,
    generator: torch.Generator,
    watch: Callable[[int], None] = lambda found: None,
    engine: RolloutEngine | None = None,
) -> list[Group]:
    """Sample until there are `count` groups whose rewards differ (dynamic sampling).

    Parameters
    ----------
    recipe, world
        What to sample and from whom.
    count
        Groups wanted.
    source, generator
        Randomness of the prompts and of the responses.
    watch
        Told the number of groups found so far.
    engine
        What samples, each request from a seed that `generator` draws; by default the world's
        own model.

    Returns
    -------
    list of Group
        `count` groups in the order in which their prompts were drawn.

    Raises
    ------
    RecipeError
        Too few groups have mixed rewards after `max_attempts` prompts per group wanted.
    """
    found: list[Group] = []
    tried = 0
    rewards_seen = 0.0
    for problems in _problem_batches(recipe, world, count, source):
        prompts = [problem.prompt_ids for problem in problems]
        said: list[tuple[EngineResponse, ...]] = [()] * len(prompts)
        if engine is None:
            sampled = sample(
                world.model,
                prompts,
                responses=recipe.responses,
                generator=generator,
                temperature=recipe.temperature,
                max_new_tokens=recipe.max_new_tokens,
                stop=world.stop,
                pad_id=world.pad_id,
            )
        else:
            said = ask(engine, prompts, responses=recipe.responses, generator=generator)
            sampled = [[ids_of(each, world.stop) for each in own] for own in said]
        for problem, own, heard in zip(problems, sampled, said, strict=True):
            rewards = tuple(world.reward(problem, ids, stopped) for ids, stopped in own)
            tried += 1
            rewards_seen += sum(rewards) / len(rewards)
            advantages = group_advantages(rewards)
            if any(advantages):
                responses = tuple(ids for ids, _ in own)
                found.append(Group(problem, responses, rewards, advantages, heard))
        watch(min(len(found), count))
        if len(found) >= count:
            return found[:count]
    raise RecipeError(
        f"{len(found)} of {count} groups with mixed rewards after {tried} prompts "
        f"(mean reward {rewards_seen / tried:.3f}): the task is too hard or too easy for this "
        "model; choose another task, more responses to a prompt or a higher --max-attempts"
    )


def _problem_batches(
    recipe: Recipe, world: World, count: int, source: random.Random
) -> Iterator[list[Problem]]:
    """Prompts in batches of about `SAMPLING_BATCH` sequences, up to the limit on attempts."""
    size = max(1, SAMPLING_BATCH // recipe.responses)
    left = count * recipe.max_attempts
    while left > 0:
        yield [world.problem(source) for _ in range(min(size, left))]
        left -= size
