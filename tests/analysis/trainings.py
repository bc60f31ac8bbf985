"""Trainings made by hand, with numbers that can be checked by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltad.curves import FORMAT, BatchLine, log_path, options_path

OPTIONS: dict[str, Any] = {
    "recipe": "tiny",
    "precision": "fp32",
    "threshold": 0.15,
    "divergence": "kl",
    "top_k": 20,
    "batches": 2,
    "minibatches": 4,
    "prompts": 8,
    "responses": 8,
    "optimizer": "adamw",
    "lr": 1e-3,
    "eval_samples": 16,
    "eval_prompts": 5,
}


def write_training(
    run: Path, accuracies: Mapping[str, Sequence[Sequence[float]]], **options: Any
) -> Path:
    """A training whose runs have these accuracies (of 80 samples) at each evaluation, by seed."""
    path = options_path(run)
    path.parent.mkdir(parents=True)
    whole = {"format": FORMAT, "options": OPTIONS | options, "model": "made by hand"}
    path.write_text(json.dumps(whole))
    for mask, seeds in accuracies.items():
        for seed, values in enumerate(seeds):
            log = log_path(run, mask, seed)
            log.parent.mkdir(parents=True, exist_ok=True)
            lines = [line(mask, seed, batch, value) for batch, value in enumerate(values)]
            log.write_text("".join(each.to_json() + "\n" for each in lines))
    return run


def line(mask: str, seed: int, batch: int, accuracy: float) -> BatchLine:
    """A line whose sums differ from each other, and from batch to batch."""
    sums: dict[str, float] = {"samples": 80, "correct": 80 * accuracy}
    if batch < OPTIONS["batches"]:
        sums |= {
            "responses": 64, "reward": 16 + batch, "length": 256, "cut": 3, "groups": 8,
            "mixed": 6, "tokens": 100 * (batch + 1), "outside": 10, "outside_determined": 8,
            "disagreement": 2,
            "masked": 0 if mask == "none" else 5, "clipped": 7, "clip_tokens": 90, "kl": 1.5,
            "outside_increase": 4, "delta_d": -0.5, "delta_d_outside": 0.25, "entropy": 50,
        }  # fmt: skip
    return BatchLine(mask, seed, batch, 4 * batch, sums)
