"""One real update of SmolLM2-135M: hidden states and head before and after it, in bfloat16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from deltad.divergence import kl
from deltad.losses import policy_loss
from deltad.probes.behavior import ResponseTokens
from deltad.probes.head import Head
from deltad.probes.recipes import SmolLM2Recipe
from deltad.probes.recipes.batch import Minibatch, SharedPrefix, read_behavior, split
from deltad.probes.recipes.language_model import LanguageModelWorld
from deltad.probes.recipes.rollout import Group, Problem, group_advantages, sample, stream
from deltad.probes.recipes.update import make_optimizer, take_step
from deltad.support import topk_support

STEP: Final = 1e-6
"""Learning rate of the update that ΔD is measured under, as in training LLMs by RL."""

Policy = tuple[Tensor, Tensor]
"""Hidden states (token, hidden) and head (vocab, hidden)."""


@dataclass(frozen=True)
class RealStep:
    """What two policies, a small update apart, are read from.

    Attributes
    ----------
    before, after : (Tensor, Tensor)
        bfloat16, as a trainer in mixed precision casts them.
    ids : Tensor of int, shape (token, K + 1)
        The behavior policy's top-K and the sampled token.
    behavior : ndarray, shape (token, K + 1)
        log μ there, in nats.
    """

    before: Policy
    after: Policy
    ids: Tensor
    behavior: np.ndarray[Any, np.dtype[np.float64]]

    def d(self, logprobs: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        """D(μ‖π) with an aggregated tail, KL in nats, from log π at the ids."""
        policy = logprobs.double().numpy()
        ids = self.ids.numpy()
        support = topk_support(
            ids[:, :-1],
            self.behavior[:, :-1],
            policy[:, :-1],
            ids[:, -1],
            self.behavior[:, -1],
            policy[:, -1],
            vocab_size=len(self.before[1]),
            check=False,  # heads that round give log-probs above 0
        )
        found: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(kl(support))
        return found


_ATTEMPTS: Final = 20


def real_step(
    *, groups: int, prompts: int, tokens: int, drift: int, lr: float, seed: int = 0
) -> RealStep:
    """Roll out, drift away from the behavior policy, then take the step that is measured.

    Parameters
    ----------
    groups : int
        Prompts with 8 responses each; all of their tokens are measured.
    prompts : int
        Groups in a minibatch.
    tokens : int
        Of each response: its first line answers the question and is rewarded, and the model goes
        on writing, so that a response has more tokens than an answer.
    drift : int
        AdamW steps through the minibatches, again from the first where there are fewer.
    lr : float
        Their learning rate. The step after them is over all minibatches, with the optimizer's
        state, at 1e-6.
    seed : int
        Everything random follows from it.

    Returns
    -------
    RealStep
        Forward and backward in float32; what enters the head, and the head, are cast.
    """
    recipe = SmolLM2Recipe(prompts=prompts, lr=lr, max_new_tokens=tokens)
    recipe.prepare(lambda text, fraction: None)
    world = LanguageModelWorld(recipe)
    policy = SharedPrefix(world.model)
    optimizer = make_optimizer(recipe, policy)
    sampled = _rollout(world, recipe, groups, seed)
    batches = [
        (
            minibatch,
            read_behavior(policy, minibatch, temperature=recipe.temperature, top_k=recipe.top_k),
        )
        for minibatch in split(sampled, prompts, world.pad_id)
    ]
    for index in range(drift):
        minibatch, behavior = batches[index % len(batches)]
        take_step(recipe, policy, optimizer, minibatch, behavior, lambda: None)
    optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        group["lr"] = STEP
    before = _policy(policy, batches, train=True)
    optimizer.step()
    after = _policy(policy, batches, train=False)

    told = [_told(*batch) for batch in batches]
    return RealStep(
        before,
        after,
        torch.cat([ids for ids, _ in told]),
        torch.cat([logprobs for _, logprobs in told]).numpy(),
    )


def _rollout(
    world: LanguageModelWorld, recipe: SmolLM2Recipe, groups: int, seed: int
) -> list[Group]:
    """Sample responses that never stop, and reward the first line of each.

    Drawn again until some group has mixed rewards, without which there is no gradient.
    """
    source = random.Random(stream(seed, "rollout/prompts"))
    generator = torch.Generator().manual_seed(stream(seed, "rollout/responses"))
    for _ in range(_ATTEMPTS):
        problems = [world.problem(source) for _ in range(groups)]
        drawn = sample(
            world.model,
            [problem.prompt_ids for problem in problems],
            responses=recipe.responses,
            generator=generator,
            temperature=recipe.temperature,
            max_new_tokens=recipe.max_new_tokens,
            stop=torch.zeros_like(world.stop),
            pad_id=world.pad_id,
        )
        found = []
        for problem, own in zip(problems, drawn, strict=True):
            responses = tuple(ids for ids, _ in own)
            rewards = tuple(_reward(world, problem, ids) for ids in responses)
            found.append(Group(problem, responses, rewards, group_advantages(rewards)))
        if any(advantage for group in found for advantage in group.advantages):
            return found
    raise RuntimeError(f"no group had mixed rewards in {_ATTEMPTS} rollouts: take another seed")


def _reward(world: LanguageModelWorld, problem: Problem, response: tuple[int, ...]) -> float:
    """Of the ids up to the first newline; 0 without one."""
    ends = world.stop[list(response)].nonzero()
    return world.reward(problem, response[: int(ends[0]) + 1], True) if len(ends) else 0.0


def _told(minibatch: Minibatch, tokens: ResponseTokens) -> tuple[Tensor, Tensor]:
    """Ids and log μ of a minibatch's tokens, the top-K and then the sampled one."""
    rows, positions = tokens.response_mask.nonzero(as_tuple=True)
    listed, logprobs = tokens.topk_ids, tokens.topk_logprobs
    if listed is None or logprobs is None:
        raise RuntimeError("the behavior policy was read without its top-K")
    sampled, own = minibatch.sampled(), tokens.behavior_logprobs
    return (
        torch.cat([listed[rows, positions], sampled[:, None]], 1),
        torch.cat([logprobs[rows, positions], own[rows, positions, None]], 1).double(),
    )


def _policy(
    policy: SharedPrefix, batches: Sequence[tuple[Minibatch, ResponseTokens]], *, train: bool
) -> Policy:
    """What enters the head at all response tokens, and the head; with gradients to step along."""
    head = Head.of(policy)
    entered: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        entered.append(args[0].detach())

    handle = head.module.register_forward_pre_hook(look)
    denominator = sum(minibatch.size for minibatch, _ in batches)
    found = []
    try:
        for minibatch, tokens in batches:
            rows, positions = tokens.response_mask.nonzero(as_tuple=True)
            output = policy(**minibatch.inputs)
            hidden = entered.pop()
            left_out = minibatch.response_mask.shape[1] - hidden.shape[1]
            found.append(hidden[rows, positions - 1 - left_out].bfloat16())
            if train:
                logits = minibatch.logits(output).float()
                logprob = logits.log_softmax(1).gather(1, minibatch.sampled()[:, None])[:, 0]
                policy_loss(
                    logprob,
                    tokens.behavior_logprobs[rows, positions],
                    minibatch.advantages[rows],
                    torch.ones(len(rows), dtype=torch.bool),
                    denominator=denominator,
                ).backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
    return torch.cat(found), head.weight.detach().bfloat16()
