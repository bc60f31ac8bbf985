"""The laws under the settings that people train with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltad.dumps import Dump
from tests.probes.trl import laws


def lora(*targets: str) -> Any:
    """Low-rank adapters on these layers."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=0.0)


def test_lora_with_checkpointed_gradients(tmp_path: Path) -> None:
    found = laws.pair(
        tmp_path,
        peft=lora("q_proj", "v_proj"),
        gradient_checkpointing=True,
        num_iterations=2,
        max_steps=2,
        learning_rate=5e-2,
        temperature=1.3,
    )
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, (0,))
    laws.a_stale_step_begins_where_the_last_ended(found, 0)
    laws.the_dump_is_in_order(found.run)


@pytest.mark.slow
def test_bfloat16(tmp_path: Path) -> None:
    found = laws.pair(tmp_path, bf16=True, num_iterations=2, max_steps=2, loss_type="grpo")
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, (0,))
    laws.a_stale_step_begins_where_the_last_ended(found, 0)
    laws.the_dump_is_in_order(found.run)
    readout = Dump.open(found.run).metadata("actual").readout
    assert readout["verified"]


@pytest.mark.slow
def test_a_generation_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    found = laws.pair(tmp_path, gradient_accumulation_steps=4, steps_per_generation=2, max_steps=1)
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, (0,))
    laws.rows_are_those_of_a_forward_of_our_own(found, {0: 0})
    laws.groups_are_prompts(found)
    laws.the_dump_is_in_order(found.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "on_policy", "stale"),
    [
        ({"temperature": 1.0, "beta": 0.1, "num_iterations": 2, "peft": True}, (0, 2), (0, 2)),
        ({"num_iterations": 3, "gradient_accumulation_steps": 1, "max_steps": 6}, (0, 3), (0, 1)),
        ({"top_entropy_quantile": 0.5, "num_iterations": 2}, (0, 2), (0, 2)),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, (0, 1, 2, 3), ()),
        ({"loss_type": "cispo", "epsilon_high": 2.0, "num_iterations": 2}, (0, 2), (0, 2)),
        ({"per_device_train_batch_size": 8, "num_train_epochs": 1, "max_steps": -1}, (0, 7), ()),
        ({"optim": "sgd", "learning_rate": 0.5, "num_iterations": 2}, (0, 2), (0, 2)),
        ({"pad_to_multiple_of": 4, "num_iterations": 2}, (0, 2), (0, 2)),
    ],
    ids=["beta", "iterations", "entropy", "sequence", "cispo", "epoch", "sgd", "padded"],
)
def test_more_settings(
    tmp_path: Path, options: dict[str, Any], on_policy: tuple[int, ...], stale: tuple[int, ...]
) -> None:
    if "peft" in options:
        options = {**options, "peft": lora("q_proj", "v_proj")}
    found = laws.pair(tmp_path, **options)
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, on_policy, least=20)
    for step in stale:
        laws.a_stale_step_begins_where_the_last_ended(found, step, least=20)
    laws.the_dump_is_in_order(found.run)
