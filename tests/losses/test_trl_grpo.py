"""The loss against the GRPO trainer of the TRL that is installed, its own method called.

The trainer is made without its constructor and given what `_compute_loss` looks at, so nothing of
the formula is written down twice here.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltad.losses import PolicyLoss, trust_region_loss
from deltad.masks import Tokens, rule
from tests.losses.batch import Batch, draw

LOW, HIGH, DELTA, RANKS, ACCUMULATION, LENGTH = 0.2, 0.28, 1.6, 2, 3, 50
STEPS_PER_GENERATION = 6
ENGINE_CAP = 1.5


@pytest.fixture(scope="module")
def grpo() -> Any:
    """TRL's trainer class."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def make_trainer(grpo: Any, loss_type: str, **changes: Any) -> Any:
    """All that the loss looks at, log-probs included; the loss itself is TRL's."""
    trainer = object.__new__(grpo)
    trainer.__dict__.update(
        loss_type=loss_type,
        epsilon_low=LOW,
        epsilon_high=4.0 if loss_type == "cispo" else HIGH,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=ACCUMULATION,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, steps_per_generation=STEPS_PER_GENERATION),
        accelerator=SimpleNamespace(
            num_processes=RANKS,
            is_main_process=False,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    trainer.__dict__.update(changes)
    return trainer


def theirs(trainer: Any, batch: Batch, **inputs: Any) -> tuple[float, Tensor]:
    """TRL's loss and its gradient with respect to log π_k."""
    leaf = batch.log_pi.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        leaf,
        torch.zeros_like(leaf),
        None,
    )
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": torch.zeros(len(batch.mask), 3, dtype=torch.int64),
            "prompt_mask": torch.ones(len(batch.mask), 3),
            "completion_ids": batch.token_ids,
            "completion_mask": batch.mask.double(),
            "advantages": batch.advantage,
            "num_items_in_batch": batch.mask.sum() * 5,
            "old_per_token_logps": batch.log_mu,
        }
        | inputs,
    )
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def ours(batch: Batch, loss_type: str, **options: Any) -> tuple[PolicyLoss, Tensor]:
    """Our loss with the denominators that TRL takes, and its gradient."""
    rows, tokens = len(batch.mask), batch.mask.sum()
    generation = STEPS_PER_GENERATION / ACCUMULATION  # optimizer steps a generation batch
    scale: dict[str, Any] = {
        "grpo": {"aggregation": "grpo", "denominator": rows * ACCUMULATION},
        "bnpo": {"aggregation": "bnpo", "denominator": tokens * ACCUMULATION},
        "dr_grpo": {
            "aggregation": "dr_grpo",
            "denominator": rows * ACCUMULATION,
            "horizon": LENGTH,
        },
        "dapo": {"aggregation": "dapo", "denominator": tokens * 5 / generation, "ranks": RANKS},
        "luspo": {"aggregation": "luspo", "denominator": rows * ACCUMULATION},
    }
    rule: dict[str, Any] = (
        {"criterion": "cispo", "parameters": {"cap": 4.0}}
        if loss_type == "cispo"
        else {"criterion": "clip-higher", "parameters": {"low": LOW, "high": HIGH}}
    )
    leaf = batch.log_pi.clone().requires_grad_()
    result = trust_region_loss(
        leaf,
        batch.log_mu,
        batch.advantage,
        batch.mask,
        convention="trl",
        **(scale["dapo" if loss_type == "cispo" else loss_type] | rule | options),
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return result, leaf.grad


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_agree(grpo: Any, loss_type: str, seed: int) -> None:
    batch = draw(seed, rows=8, columns=12, shift=1.5)
    expected, slope = theirs(make_trainer(grpo, loss_type), batch)
    found, gradient = ours(batch, loss_type)
    assert found.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-12)


def test_two_sided_clipping_is_the_dual_clip(grpo: Any) -> None:
    batch = draw(4, rows=8, columns=12, shift=1.5)
    args = SimpleNamespace(delta=DELTA, steps_per_generation=STEPS_PER_GENERATION)
    expected, slope = theirs(make_trainer(grpo, "grpo", args=args), batch)
    parameters = {"low": LOW, "high": HIGH, "dual": DELTA}
    found, gradient = ours(batch, "grpo", parameters=parameters)
    plain, _ = ours(batch, "grpo")
    assert found.loss.item() != plain.loss.item()
    assert found.loss.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-12)


def test_clipped_tokens_are_counted_alike(grpo: Any) -> None:
    batch = draw(5, rows=8, columns=12, shift=1.5)
    trainer = make_trainer(grpo, "grpo")
    theirs(trainer, batch)
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
    found, _ = ours(batch, "grpo")
    assert found.metrics["masked"].value == pytest.approx(logged["clip_ratio/region_mean"])
    assert found.metrics["masked_positive"].value == pytest.approx(logged["clip_ratio/high_mean"])
    assert found.metrics["masked_negative"].value == pytest.approx(logged["clip_ratio/low_mean"])
    assert 0 < found.metrics["masked"].value < 1


def test_the_correction_for_the_engine_is_a_token_weight(grpo: Any) -> None:
    batch = draw(6, rows=8, columns=12)
    correction = torch.rand(batch.mask.shape, dtype=torch.float64) + 0.5
    expected, slope = theirs(
        make_trainer(grpo, "dapo", use_vllm=True), batch, importance_sampling_ratio=correction
    )
    found, gradient = ours(batch, "dapo", token_weight=correction)
    assert found.loss.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "bounds", "name", "parameters"),
    [
        ("token_truncate", (None, ENGINE_CAP), "tis", {"cap": ENGINE_CAP}),
        ("token_mask", (None, ENGINE_CAP), "mis", {"cap": ENGINE_CAP}),
        ("token_mask", (0.7, ENGINE_CAP), "icepop", {"low": 0.7, "high": ENGINE_CAP}),
    ],
)
def test_weights_against_the_engine_are_trls(
    grpo: Any,
    mode: str,
    bounds: tuple[float | None, float],
    name: str,
    parameters: dict[str, Any],
) -> None:
    """A weight times r is the correction that TRL makes of r = π_old/μ.

    The correction stands in the middle of a method that also generates, so that part of its source
    is taken from the installed file and run.
    """
    batch = draw(7, rows=8, columns=12, shift=1.5)
    correction = run_correction(grpo, batch, mode, bounds)
    tokens = Tokens(batch.advantage.flatten(), batch.log_mu.flatten(), batch.log_pi.flatten())
    found = rule(name).with_parameters(parameters).weigh(tokens) * tokens.ratio
    used = batch.mask.flatten()
    assert (tokens.ratio[used] > ENGINE_CAP).any()
    torch.testing.assert_close(found[used], correction.flatten()[used], rtol=1e-12, atol=0)


def run_correction(
    grpo: Any, batch: Batch, mode: str, bounds: tuple[float | None, float]
) -> Tensor:
    """The importance ratio of TRL's engine correction, by its own lines."""
    import ast
    import inspect
    import math
    import textwrap

    source = textwrap.dedent(inspect.getsource(grpo._generate_and_score_completions))
    blocks: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
        and any("per_token_logps_diff" in ast.unparse(line) for line in node.body)
    ]
    assert len(blocks) == 1
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=bounds[0],
            vllm_importance_sampling_clip_max=bounds[1],
        ),
        "completion_mask": batch.mask.double(),
        "tool_mask": None,
        "old_per_token_logps": batch.log_pi,
        "sampling_per_token_logps": batch.log_mu,
    }
    exec(compile(ast.Module(blocks, []), "grpo_trainer.py", "exec"), names)
    correction: Tensor = names["vllm_importance_sampling_ratio"]
    return correction
