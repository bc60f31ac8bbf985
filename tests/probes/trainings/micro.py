"""A training small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltad.probes.training import Training

WORLD: dict[str, Any] = {
    "operands": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "layers": 1,
    "heads": 2,
    "pretrain_seed": 0,
    "pretrain_steps": 60,
    "pretrain_batch": 32,
    "pretrain_lr": 2e-2,
}

MICRO: dict[str, Any] = {
    **WORLD,
    "batches": 3,
    "minibatches": 2,
    "prompts": 2,
    "responses": 4,
    "lr": 1e-2,
    "warmup_steps": 2,
    "top_k": 5,
    "max_new_tokens": 5,
    "eval_every": 2,
    "eval_prompts": 4,
    "eval_samples": 2,
    "checkpoint_every": 1,
}


def micro(**overrides: Any) -> Training:
    return Training.of("tiny", **(MICRO | overrides))


def contents(run: Path) -> dict[str, bytes]:
    """Every file of the log and of the steps."""
    paths = (*run.glob("_training/mask=*/*.jsonl"), *run.glob("_steps/*/*/*.jsonl"))
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}
