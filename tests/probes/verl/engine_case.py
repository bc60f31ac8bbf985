"""Trainings of verl's own worker and FSDP2 engine, with and without the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltad.dumps import Dump, check_dump
from deltad.probes.verl import plugin
from examples import verl_cpu
from tests.probes.verl.verl_here import imported


@dataclass
class Training:
    """What is left of one.

    Attributes
    ----------
    metrics
        As the worker returned them, by name.
    weights
        Whole, after each mini-batch; the first are those before.
    worker
        verl's.
    """

    metrics: dict[str, Any]
    weights: list[dict[str, torch.Tensor]]
    worker: Any


@contextmanager
def variables(**values: Any) -> Iterator[None]:
    """Environment variables of the plugin, set within the block."""
    names = {f"DELTAD_VERL_{name.upper()}": str(value) for name, value in values.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ |= names
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def whole_weights(worker: Any) -> dict[str, torch.Tensor]:
    """All weights, gathered."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in worker.engine.module.state_dict().items()
    }


def train(
    model: str,
    run: Path | None = None,
    *,
    batch: Any = None,
    settings: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    flags: Mapping[str, Any] | None = None,
    plugged: bool = True,
    **options: Any,
) -> Training:
    """Two mini-batches of one rollout; with a run the plugin records them."""
    engines = imported("verl.workers.engine.base")
    tensordict_utils = imported("verl.utils.tensordict_utils")
    (plugin.install if plugged else plugin.uninstall)()
    assert plugin.is_wrapped(engines) == plugged
    torch.manual_seed(0)
    worker = verl_cpu.worker(model, **options)
    data = (verl_cpu.rollout(model) if batch is None else batch).copy()
    for name in drop:
        del data[name]
    tensordict_utils.assign_non_tensor(data, **(flags or {}))
    weights = [whole_weights(worker)]
    step = worker.engine.optimizer.step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        weights.append(whole_weights(worker))
        return result

    worker.engine.optimizer.step = stepping
    with variables(**({} if run is None else {"run": run}), **(settings or {})):
        output = worker.train_mini_batch(data)
    metrics = dict(tensordict_utils.get(output, "metrics"))
    for name in [*metrics]:
        if name.startswith("perf/") or name == "mfu":
            del metrics[name]
    return Training(metrics, weights, worker)


def same(left: Training, right: Training) -> bool:
    """Whether two trainings are the same to the last bit."""
    assert len(left.weights) == len(right.weights) > 1
    return left.metrics == right.metrics and all(
        torch.equal(one[name], other[name])
        for one, other in zip(left.weights, right.weights, strict=True)
        for name in one
    )


def recorded(run: Path, arm: str = "actual", seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """All rows of a checked dump by column: rank by rank, in the order of writing."""
    check_dump(run)
    batches = list(Dump.open(run).batches(arm, seed))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0].columns}


@torch.no_grad()
def expected_rows(
    model: str, weights: Mapping[str, torch.Tensor], data: Any, rows: slice, temperature: float
) -> dict[str, np.ndarray[Any, Any]]:
    """What transformers says of the responses with these weights, in float64."""
    from transformers import Qwen3ForCausalLM

    policy: Any = Qwen3ForCausalLM.from_pretrained(model)
    policy.eval()
    policy.load_state_dict(weights)
    policy.double()
    found: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("logprob", "topk", "collision", "entropy", "token_id")
    }
    for prompt, ids, listed in zip(
        data["prompts"].unbind()[rows],
        data["input_ids"].unbind()[rows],
        data["teacher_ids"].unbind()[rows],
        strict=True,
    ):
        at = slice(len(prompt) - 1, len(ids) - 1)
        each = (policy(ids[None]).logits[0, at] / temperature).log_softmax(-1)
        found["logprob"].append(each.gather(1, ids[len(prompt) :, None])[:, 0])
        found["topk"].append(each.gather(1, listed[at].long()))
        found["collision"].append(each.exp().square().sum(1))
        found["entropy"].append(-(each.exp() * each).sum(1))
        found["token_id"].append(ids[len(prompt) :])
    return {name: torch.cat(values).numpy() for name, values in found.items()}
