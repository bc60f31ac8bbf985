"""A recipe small enough for tests: a few steps of pre-training, a few minibatches."""

from __future__ import annotations

import functools
from typing import Any

import torch

from deltad.probes.recipes import TinyRecipe

MICRO: dict[str, Any] = {
    "operands": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "layers": 1,
    "heads": 2,
    "pretrain_seed": 0,
    "pretrain_steps": 60,
    "pretrain_batch": 32,
    "pretrain_lr": 2e-2,
    "minibatches": 4,
    "prompts": 2,
    "responses": 4,
    "lr": 1e-2,
    "top_k": 5,
    "zero_step_seeds": 1,
}


def micro(**overrides: Any) -> TinyRecipe:
    return TinyRecipe(**(MICRO | overrides))


@functools.cache
def small_model() -> Any:
    """An untrained Qwen3 with 72 ids, wide awake: its logits spread over several nats."""
    from deltad.probes.recipes.arithmetic import build_model

    model = build_model(micro()).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    return model
