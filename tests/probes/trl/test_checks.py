from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltad.probes import ProbeError
from deltad.probes.trl import attach
from deltad.probes.trl.checks import MARK, behavior_of, check_logps, check_trainer

READOUT = {"hidden_dtype": "float32", "head_dtype": "float32"}


def trainer(**options: Any) -> Any:
    """As much of a trainer as is looked at."""
    return SimpleNamespace(
        **{
            **dict.fromkeys(
                (
                    "_prepare_inputs",
                    "_generate_and_score_completions",
                    "_get_per_token_logps_and_entropies",
                    "compute_loss",
                    "_buffered_inputs",
                    "_metrics",
                )
            ),
            "temperature": 1.0,
            "num_generations": 4,
            "use_vllm": False,
            "tools": [],
            "rollout_func": None,
            **options,
        }
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"_is_vlm": True}, "vision-language"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed.*use DDP"),
        ({"is_fsdp_enabled": True}, "FSDP.*use DDP"),
        ({"args": SimpleNamespace(torch_compile=True)}, "torch_compile is not supported"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({MARK: object()}, r"attached to this trainer already.*detach"),
    ],
)
def test_what_is_not_supported_is_refused_in_a_sentence(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProbeError, match=message):
        check_trainer(trainer(**options))


def test_another_trainer_is_refused_by_name() -> None:
    with pytest.raises(ProbeError, match=r"trl.GRPOTrainer .*, got dict, which has no _prepare"):
        check_trainer({})


@pytest.mark.parametrize("name", ["keep", "sequences", "every"])
def test_what_would_leave_tokens_out_of_the_trainers_numbers_is_refused(name: str) -> None:
    with pytest.raises(ProbeError, match=f"`{name}` leaves out tokens"):
        attach(trainer(), **{name: 1})  # type: ignore[arg-type]


def test_a_trainer_is_taken() -> None:
    check_trainer(trainer())


@pytest.mark.parametrize(
    ("options", "asked", "found"),
    [
        ({}, "auto", "policy"),
        ({"use_vllm": True}, "auto", "engine"),
        ({"use_vllm": True}, "engine", "engine"),
        ({"use_vllm": True, "tools": [print]}, "policy", "policy"),
        ({"rollout_func": print}, "policy", "policy"),
    ],
)
def test_the_engine_is_asked_where_there_is_one(
    options: dict[str, Any], asked: Any, found: str
) -> None:
    assert behavior_of(trainer(**options), asked) == found


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({}, "engine", "behavior='policy'"),
        ({"rollout_func": print}, "auto", "behavior='policy'"),
        ({"use_vllm": True, "tools": [print]}, "auto", r"several turns.*behavior='policy'"),
        ({}, "vllm", "must be auto, engine or policy, got 'vllm'"),
    ],
)
def test_an_engine_that_cannot_tell_is_refused(
    options: dict[str, Any], asked: Any, message: str
) -> None:
    with pytest.raises(ProbeError, match=message):
        behavior_of(trainer(**options), asked)


def test_log_probs_at_another_temperature_are_refused() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    one, other = (float(t) for t in (1.0, 0.9))
    read = (logits / one).log_softmax(-1)[:, 0].numpy()
    check_logps(read, (logits / one).log_softmax(-1)[:, 0], READOUT, "no")
    with pytest.raises(ProbeError, match="more than rounding explains"):
        check_logps(read, (logits / other).log_softmax(-1)[:, 0], READOUT, "no")


def test_rounding_of_the_trainers_own_product_is_allowed() -> None:
    read = np.linspace(-6, -0.1, 40, dtype=np.float32)
    rounded = torch.from_numpy(read).bfloat16()
    check_logps(read, rounded, READOUT, "no")
    check_logps(read, rounded.float(), READOUT, "bf16")
    with pytest.raises(ProbeError):
        check_logps(read, rounded.float(), READOUT, "no")
