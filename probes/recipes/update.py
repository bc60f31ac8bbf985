"""One optimizer step of a recipe, and the optimizer that takes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltad.losses import policy_loss
from deltad.probes.behavior import ResponseTokens

from .batch import Minibatch, SharedPrefix
from .recipe import Recipe


def make_optimizer(recipe: Recipe, policy: SharedPrefix) -> torch.optim.Optimizer:
    """Make a recipe's optimizer, without state."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(policy.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    return torch.optim.AdamW(
        policy.parameters(),
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        fused=True,  # one pass over the state instead of eight
    )


def take_step(
    recipe: Recipe,
    policy: SharedPrefix,
    optimizer: torch.optim.Optimizer,
    minibatch: Minibatch,
    tokens: ResponseTokens | None,
    keep: Callable[[], Tensor | None],
) -> None:
    """Make one optimizer step.

    Parameters
    ----------
    recipe
        Temperature and ratio cap.
    policy, optimizer
        What is updated.
    minibatch
        On which tokens.
    tokens
        What the behavior policy said of them; None takes the policy itself (ratio 1).
    keep
        Asked for the mask, shape (token,), once the forward is made; None keeps every token.
    """
    optimizer.zero_grad(set_to_none=True)
    logits = minibatch.logits(policy(**minibatch.inputs)).float() / recipe.temperature
    logprob = logits.gather(1, minibatch.sampled()[:, None])[:, 0] - logits.logsumexp(1)
    rows, positions = minibatch.response_mask.nonzero(as_tuple=True)
    kept = keep()
    loss = policy_loss(
        logprob,
        logprob if tokens is None else tokens.behavior_logprobs[rows, positions],
        minibatch.advantages[rows],
        torch.ones(len(rows), dtype=torch.bool) if kept is None else kept,
        denominator=len(rows),
        ratio_cap=recipe.ratio_cap,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
