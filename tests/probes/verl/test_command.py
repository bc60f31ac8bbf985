"""The command of docs/verl.md, as far as it goes without GPUs: hydra's configuration of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from deltad.probes.verl import LOSSES
from deltad.probes.verl.rescored import NAME
from deltad.probes.verl.settings import Settings
from tests.probes.verl.verl_here import imported

PAGE = (Path(__file__).parents[3] / "docs" / "verl.md").read_text()


def overrides() -> list[str]:
    """What the page's command gives to verl."""
    (command,) = re.findall(r"```bash\n(python -m verl\.trainer\.main_ppo.*?)```", PAGE, re.DOTALL)
    words = shlex.split(command.partition("...")[0].replace("\\\n", " "))
    return words[3:]


def test_the_page_names_every_variable_and_every_loss() -> None:
    for field in Settings.__dataclass_fields__:
        assert f"| `DELTAD_VERL_{field.upper()}` |" in PAGE
    table = PAGE.partition("| `loss_mode` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)`", table)) - {"ratio"} == set(LOSSES)


@pytest.mark.verl
def test_hydra_takes_the_command_and_verl_its_configuration() -> None:
    hydra, root = imported("hydra"), Path(str(imported("verl").__file__)).parent
    with hydra.initialize_config_dir(str(root / "trainer" / "config"), version_base=None):
        config = hydra.compose("ppo_trainer", overrides())
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert Settings.from_environment(variables).every == 10
    assert all(isinstance(value, str) for value in variables.values())
    assert config.algorithm.rollout_correction.bypass_mode is True
    rollout = config.actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == NAME
    assert rollout.calculate_log_probs is True
    make = imported("verl.utils.config").omega_conf_to_dataclass
    with imported("omegaconf").open_dict(config):
        config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    actor = make(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode in LOSSES
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.15, 0.15, 20.0)
