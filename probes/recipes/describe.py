"""What a recorded file says about itself: the start policy, the arithmetic, the recipe, prompts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltad.dumps import Metadata
from deltad.probes.arms import ZERO_STEP

from .recipe import Recipe
from .rollout import Group

UNMASKED = "none"
"""The arm that keeps every token."""


def policy_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of a policy's weights: their names, dtypes, shapes and bytes, sorted by name.

    Parameters
    ----------
    weights : mapping of str to Tensor
        A `state_dict`.

    Returns
    -------
    str
        Hexadecimal; the same on every machine.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def start_of(recipe: Recipe, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which policy all seeds start from, for the metadata: a shipped base's number and the hash."""
    base = getattr(recipe, "base", None)
    return ({} if base is None else {"base": base}) | {"policy_sha256": policy_hash(weights)}


def arithmetic() -> dict[str, Any]:
    """By what this process computes, for the metadata: on it the rounding depends."""
    forced = {"ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"} & set(os.environ)
    return {
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    } | {name: os.environ[name] for name in sorted(forced)}


def describe(
    recipe: Recipe,
    arm: str,
    *,
    vocab_size: int,
    readout: Mapping[str, Any],
    stored: Mapping[str, Any],
    start: Mapping[str, Any],
    ladder: Mapping[str, Any] | None = None,
    behavior: Mapping[str, Any] | None = None,
) -> Metadata:
    """Describe an arm's files: the dump's metadata, with the whole recipe.

    Parameters
    ----------
    recipe
        What was done.
    arm
        The update that was applied.
    vocab_size
        Of the model.
    readout
        How the policy was read, as the probe tells it.
    stored
        Which rows are kept.
    start
        The start policy, as `start_of` gives it.
    ladder
        How the arm's ladder was measured, as the probe tells it; None without one.
    behavior
        What is told of the behavior policy, where another engine than the trainer sampled.

    Returns
    -------
    Metadata
        The recipe's fields are under the key `recipe`, the ladder under `ladder`, the start
        policy under `start`, and what computed it under `arithmetic`.
    """
    facts = recipe.model_facts()
    return Metadata(
        top_k=recipe.top_k,
        vocab_size=vocab_size,
        temperature=recipe.temperature,
        model=facts["model"],
        tokenizer=facts["tokenizer"],
        behavior=dict(behavior)
        if behavior is not None
        else {
            "engine": "transformers, key-value cache; log-probs by one forward",
            "precision": facts["precision"],
            "staleness": "the policy moved by the earlier minibatches of the rollout batch",
            "logprobs_mode": "processed_logprobs",
            "top_p": 1.0,
            "top_k": -1,
            "support": "union",
        },
        readout=readout,
        update={
            "mask": UNMASKED if arm == ZERO_STEP else arm,
            "threshold": recipe.threshold,
            "divergence": recipe.divergence,
            "optimizer": recipe.optimizer,
            "lr": 0.0 if arm == ZERO_STEP else recipe.lr,
            "batch": recipe.prompts * recipe.responses,
        },
        stored=dict(stored),
        versions={
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")
        }
        | {"python": platform.python_version()},
        extra={"recipe": recipe.to_json(), "start": dict(start), "arithmetic": arithmetic()}
        | ({} if ladder is None else {"ladder": dict(ladder)}),
    )


def prompt_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Rows of the dump's prompts."""
    return [
        {
            "group": number,
            "prompt": group.problem.prompt,
            "prompt_ids": list(group.problem.prompt_ids),
            "answer": group.problem.answer,
        }
        for number, group in enumerate(groups)
    ]
