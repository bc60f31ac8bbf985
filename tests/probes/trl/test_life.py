"""Checkpoints, evaluations, trainings that stop, and what TRL masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deltad.probes import ProbeError
from tests.probes.trl import laws, trainers

COLUMNS = ["step", "position", "token_id", "behavior_logprob", "pre_logprob", "post_logprob"]


def test_a_resumed_training_goes_on_in_the_dump(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    saving = {"save_strategy": "steps", "save_steps": 2, "num_iterations": 2, "max_steps": 4}
    whole = laws.build(tmp_path / "whole", **saving)
    attach(whole, tmp_path / "one")
    laws.train(whole)
    assert len(list((tmp_path / "one/arm=actual/seed=3").glob("part-*"))) == 2

    again = laws.build(tmp_path / "again", **saving)
    attach(again, tmp_path / "two")

    def stop(original: Any, *args: Any, **kwargs: Any) -> Any:
        if again.state.global_step == 3:
            raise RuntimeError("out of memory")
        return original(*args, **kwargs)

    from deltad.probes.trl.patches import Patches

    patches = Patches()
    patches.around(again, "training_step", stop)
    with pytest.raises(RuntimeError, match="out of memory"):
        laws.train(again)
    assert sorted(set(trainers.rows(tmp_path / "two").step)) == [0, 1, 2]

    resumed = laws.build(tmp_path / "again", **saving)
    attach(resumed, tmp_path / "two")
    laws.train(resumed, resume_from_checkpoint=str(tmp_path / "again/checkpoint-2"))
    first, second = (trainers.rows(tmp_path / name)[COLUMNS] for name in ("one", "two"))
    assert sorted(set(second.step)) == [0, 1, 2, 3]
    assert first.reset_index(drop=True).equals(second.reset_index(drop=True))
    laws.the_dump_is_in_order(tmp_path / "two")


@pytest.mark.slow
def test_evaluations_in_between_change_nothing(tmp_path: Path) -> None:
    found = laws.pair(
        tmp_path,
        evaluate=True,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        steps_per_generation=4,
        loss_type="grpo",
    )
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, (0, 2))
    laws.rows_are_those_of_a_forward_of_our_own(found, {0: 0, 1: 0, 2: 2, 3: 2})
    laws.the_dump_is_in_order(found.run)
    logged = found.probed.state.log_history
    assert any("eval_loss" in entry for entry in logged)
    assert not any(name.startswith("eval_deltad") for entry in logged for name in entry)


@pytest.mark.slow
def test_training_twice_numbers_the_steps_on(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    made = laws.build(tmp_path / "made", max_steps=1)
    with attach(made, tmp_path / "run") as attached:
        laws.train(made)
        assert set(trainers.rows(tmp_path / "run").step) == {0}
        laws.train(made)
    assert set(trainers.rows(tmp_path / "run").step) == {0, 1}
    laws.the_dump_is_in_order(tmp_path / "run")
    left = {"train", "compute_loss", "_prepare_inputs", "_generate_and_score_completions"}
    assert not left & vars(made).keys()
    assert attached.unknown_batches == 0
    laws.train(made)  # without the probe
    assert set(trainers.rows(tmp_path / "run").step) == {0, 1}


@pytest.mark.slow
def test_what_was_generated_before_is_left_out(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    made = laws.build(tmp_path / "made", max_steps=1, num_iterations=2)
    laws.train(made)
    attached = attach(made, tmp_path / "run")
    made.args.max_steps = 2
    laws.train(made)
    assert attached.unknown_batches == 2
    assert set(trainers.rows(tmp_path / "run").step) == {1}
    attached.detach()
    masked = laws.build(tmp_path / "masked", max_steps=1, num_iterations=2)
    laws.train(masked)
    attach(masked, criterion="ratio")
    with pytest.raises(ProbeError, match="generated before the probe was attached"):
        laws.train(masked)


@pytest.mark.slow
def test_attaching_to_a_running_training_is_refused(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from deltad.probes.trl import attach

    made = laws.build(tmp_path / "made", max_steps=3)

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                attach(made, tmp_path / "run")

    made.add_callback(Late())
    with pytest.raises(ProbeError, match=r"while `train\(\)` was running.*attach before it"):
        laws.train(made)
    assert made.state.global_step == 1


@pytest.mark.slow
def test_a_dump_of_another_training_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    made = laws.build(tmp_path / "made", max_steps=1)
    with attach(made, tmp_path / "run"):
        laws.train(made)
    again = laws.build(tmp_path / "made", max_steps=1)
    attach(again, tmp_path / "run")
    with pytest.raises(ProbeError, match="exists already"):
        laws.train(again)
    assert again.state.global_step == 0
    assert set(trainers.rows(tmp_path / "run").step) == {0}


def test_masked_completions_and_tools_are_not_recorded(tmp_path: Path) -> None:
    def with_tools(made: Any) -> None:
        from deltad.probes.trl.patches import Patches

        def generated(original: Any, *args: Any) -> Any:
            batch = original(*args)
            batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
            batch["tool_mask"][:, 2:4] = 0
            return batch

        Patches().around(made, "_generate_and_score_completions", generated)

    found = laws.pair(
        tmp_path,
        prepare=with_tools,
        mask_truncated_completions=True,
        max_completion_length=24,
        policy=lambda: trainers.ending(),
        num_iterations=2,
    )
    laws.nothing_changes(found)
    laws.a_stale_step_begins_where_the_last_ended(found, 0, least=10)
    laws.the_dump_is_in_order(found.run)
    for step, batches in found.witness.batches.items():
        rows = found.rows[found.rows.step == step]
        wanted = sum(int((b["completion_mask"] * b["tool_mask"]).sum()) for b in batches)
        assert len(rows) == wanted
    masks = [b["completion_mask"] for each in found.witness.batches.values() for b in each]
    assert any((mask.sum(1) == 0).any() for mask in masks)


def test_a_step_that_the_scaler_skips_is_dropped(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from deltad.probes.trl import attach

    class Overflow(TrainerCallback):
        """Gradients that are not finite in one step, under a scaler."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            made.accelerator.scaler = made.optimizer.scaler = scaler
            made.optimizer._accelerate_step_called = False
            inner = made.optimizer.optimizer
            made.optimizer._optimizer_original_step_method = inner.step
            from accelerate.optimizer import patch_optimizer_step

            made.optimizer._optimizer_patched_step_method = patch_optimizer_step(
                made.optimizer, inner.step
            )

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                next(made.model.parameters()).grad[0, 0] = torch.inf

    made = laws.build(tmp_path / "made", callbacks=[Overflow()], max_grad_norm=0.0, max_steps=3)
    attached = attach(made, tmp_path / "run")
    laws.train(made)
    assert attached.dropped_steps == 1
    assert sorted(set(trainers.rows(tmp_path / "run").step)) == [0, 2]
