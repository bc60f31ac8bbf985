"""The configuration of the paper's scale against verl's own: composed, built, never run."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.probes.verl.verl_here import imported

pytestmark = pytest.mark.verl

FOLDER = Path(__file__).parents[3] / "examples" / "paper_scale"
SIZES, MASKS, PRECISIONS = (
    sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
    for group in ("size", "mask", "precision")
)
GPUS = 8


def composed(**chosen: str) -> Any:
    """The whole configuration, as `main_ppo` gets it."""
    from hydra import compose, initialize_config_dir

    overrides = [f"{group}={name}" for group, name in chosen.items()]
    with initialize_config_dir(version_base=None, config_dir=str(FOLDER)):
        return compose(
            "paper", overrides=["hydra.searchpath=[pkg://verl.trainer.config]", *overrides]
        )


@pytest.mark.filterwarnings("ignore")
def test_every_choice_builds_verls_dataclasses() -> None:
    imported("deltad.probes.verl")
    utils = imported("verl.utils.config")
    build = utils.omega_conf_to_dataclass
    loss_of = imported("verl.trainer.ppo.core_algos").get_policy_loss_fn
    names = set()
    choices = [
        *itertools.product(SIZES, MASKS[:1], PRECISIONS),
        *((SIZES[0], m, "bf16") for m in MASKS),
    ]
    for size, mask, precision in choices:
        config = composed(size=size, mask=mask, precision=precision)
        names.add(config.trainer.experiment_name)
        assert config.trainer.experiment_name == f"{size}-{mask}-{precision}"
        actor = build(config.actor_rollout_ref.actor)
        rollout = build(config.actor_rollout_ref.rollout)
        build(config.algorithm)
        utils.validate_config(config, use_reference_policy=False, use_critic=False)
        assert type(actor).__name__ == "McoreActorConfig"
        assert callable(loss_of(actor.policy_loss.loss_mode))
        world = config.trainer.nnodes * GPUS
        model = (
            actor.megatron.tensor_model_parallel_size * actor.megatron.pipeline_model_parallel_size
        )
        assert world % model == 0
        assert world % rollout.tensor_model_parallel_size == 0
        assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
        assert rollout.n * actor.ppo_mini_batch_size % (world // model) == 0
    assert len(names) == len(SIZES) * len(PRECISIONS) + len(MASKS) - 1


def test_verls_own_command_composes_it() -> None:
    """As in the README; `--cfg job` prints what it would run with, and runs nothing."""
    imported("verl")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(FOLDER)]
    chosen = ["--config-name", "paper", "size=8b", "mask=dppo", "precision=fp8_rollout"]
    shown = subprocess.run(
        [*command, *chosen, "--cfg", "job", "--resolve"], capture_output=True, text=True, check=True
    ).stdout
    assert "experiment_name: 8b-dppo-fp8_rollout" in shown
    assert "loss_mode: dppo_topk_kl" in shown
    assert "path: Qwen/Qwen3-8B-Base" in shown
    assert "strategy: megatron" in shown


@pytest.mark.filterwarnings("ignore")
def test_it_asks_for_what_the_probe_and_the_masks_need() -> None:
    imported("verl")
    for mask in MASKS:
        config = composed(mask=mask)
        rollout = config.actor_rollout_ref.rollout
        assert config.actor_rollout_ref.model.use_fused_kernels is False
        assert rollout.calculate_log_probs
        assert rollout.temperature == 1
        assert rollout.agent.default_agent_loop == "deltad_rescored"
        assert rollout.val_kwargs.n == 16
        assert config.algorithm.rollout_correction.bypass_mode
        assert config.actor_rollout_ref.actor.ppo_epochs == 1
        variables = config.ray_kwargs.ray_init.runtime_env.env_vars
        assert variables.DELTAD_VERL_TOPK == "20"
        assert variables.VERL_USE_EXTERNAL_MODULES == "deltad.probes.verl"
        low, high = (config.actor_rollout_ref.actor[f"clip_ratio_{end}"] for end in ("low", "high"))
        assert (low, high) == (0.2, 0.28) if mask == "clip_higher" else low == high
