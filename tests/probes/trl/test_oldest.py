"""The central laws once more, in an environment with the oldest TRL that is supported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.probes.trl import (
    laws,
    test_attach,
    test_distributed,
    test_life,
    test_loss,
    test_settings,
)

pytestmark = pytest.mark.trl18


def test_two_iterations(tmp_path: Path) -> None:
    found = laws.pair(tmp_path, num_iterations=2)
    for law in (
        test_attach.test_logs_and_weights_are_those_without_the_probe,
        test_attach.test_a_policy_that_has_not_moved_has_no_divergence,
        test_attach.test_a_stale_step_begins_where_the_last_ended,
        test_attach.test_rows_are_those_of_a_forward_of_our_own,
        test_attach.test_the_dump_is_in_order_and_says_what_it_is_of,
    ):
        law(found)


def test_lora_on_the_head_too(tmp_path: Path) -> None:
    """Newer versions refuse it themselves."""
    found = laws.pair(
        tmp_path, peft=test_settings.lora("q_proj", "lm_head"), num_iterations=2, learning_rate=5e-2
    )
    laws.nothing_changes(found)
    laws.on_policy_steps_have_no_divergence(found, (0, 2))
    laws.a_stale_step_begins_where_the_last_ended(found, 0)
    laws.the_dump_is_in_order(found)


def test_gradients_are_those_of_the_losses(tmp_path: Path) -> None:
    for loss_type, how in (
        ("dapo", {"criterion": "predictive-kl-aggregated"}),
        ("grpo", {"criterion": "ratio", "divergence": "tv", "ratio_cap": 1.1}),
    ):
        test_loss.test_gradients_are_those_of_the_losses(tmp_path / loss_type, loss_type, how)


def test_no_criterion_on_policy_is_trls_own_loss_bit_for_bit(tmp_path: Path) -> None:
    test_loss.test_no_criterion_on_policy_is_trls_own_loss_bit_for_bit(tmp_path)


def test_evaluations_in_between_change_nothing(tmp_path: Path) -> None:
    test_life.test_evaluations_in_between_change_nothing(tmp_path)


def test_training_twice_numbers_the_steps_on(tmp_path: Path) -> None:
    test_life.test_training_twice_numbers_the_steps_on(tmp_path)


def test_bfloat16(tmp_path: Path) -> None:
    test_settings.test_bfloat16(tmp_path)


def test_a_generation_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    test_settings.test_a_generation_in_the_middle_of_an_accumulation(tmp_path)


def test_no_criterion_is_trls_loss_with_the_clip_out_of_reach(tmp_path: Path) -> None:
    test_loss.test_no_criterion_is_trls_loss_with_the_clip_out_of_reach(tmp_path)


def test_two_ranks(tmp_path: Path) -> None:
    test_distributed.holds_on_two_ranks(tmp_path)
