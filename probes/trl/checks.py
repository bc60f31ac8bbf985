"""Which trainers and settings the probe can be attached to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from deltad.probes.errors import ProbeError

Behavior = Literal["auto", "engine", "policy"]
"""Where μ comes from: vLLM's log-probs, or the policy read again when it had generated."""

MARK: Final = "_deltad_attached"
"""Attribute of a trainer that the probe is attached to."""

_AUTOCAST: Final = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}

_NEEDED: Final = (
    "_prepare_inputs",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
    "_buffered_inputs",
    "_metrics",
    "temperature",
    "num_generations",
)


def check_trainer(trainer: Any) -> None:
    """Refuse what the probe cannot be attached to.

    Raises
    ------
    ProbeError
        One sentence says why, and what to do.
    """
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ProbeError(
            f"`trainer` must be a trl.GRPOTrainer (TRL 1.8 to 1.16 were tried), got "
            f"{type(trainer).__name__}, which has no {', '.join(missing)}"
        )
    if MARK in vars(trainer):
        raise ProbeError("a probe is attached to this trainer already: call its `detach()` first")
    if getattr(trainer, "_is_vlm", False):
        raise ProbeError("vision-language models are not supported: their forward has other inputs")
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ProbeError(
            "DeepSpeed makes its step within backward, where no optimizer hook fires: use DDP"
        )
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ProbeError(
            "TRL under FSDP is not supported, since it could not be tried: use DDP, or a loop of "
            "your own with UpdateProbe, which knows fully_shard"
        )
    if getattr(getattr(trainer, "args", None), "torch_compile", False):
        raise ProbeError(
            "args.torch_compile is not supported: hooks within a compiled model are ignored, so "
            "its hidden states at the time of generation cannot be seen"
        )
    if not 0 < trainer.temperature < math.inf:
        raise ProbeError(
            f"args.temperature must be positive, got {trainer.temperature}: log-probs are at it"
        )


def behavior_of(trainer: Any, asked: Behavior) -> Literal["engine", "policy"]:
    """Decide where the behavior policy's log-probs come from.

    Raises
    ------
    ProbeError
        An unknown word, or no engine that can tell.
    """
    if asked not in ("auto", "engine", "policy"):
        raise ProbeError(f"`behavior` must be auto, engine or policy, got {asked!r}")
    rollouts = getattr(trainer, "rollout_func", None) is not None
    if asked == "policy" or (asked == "auto" and not (trainer.use_vllm or rollouts)):
        return "policy"
    if not trainer.use_vllm:
        raise ProbeError(
            "the top-K log-probs of the engine behind this trainer are not known (use_vllm is "
            "False or a rollout_func samples): attach with behavior='policy', which reads the "
            "trained model at the time of generation"
        )
    if trainer.tools or rollouts:
        raise ProbeError(
            "rollouts of several turns or of a rollout_func call vLLM in ways that its top-K "
            "cannot be put together from: attach with behavior='policy', which reads the trained "
            "model at the time of generation"
        )
    return "engine"


def check_logps(
    read: np.ndarray[Any, Any], given: Tensor, readout: Mapping[str, Any], mixed_precision: str
) -> None:
    """Hold the probe's log-probs of one forward against the trainer's of the same.

    Parameters
    ----------
    read : array, shape (row,)
        log π_k as the probe read it, in nats.
    given : Tensor, shape (row,)
        As the trainer computed it.
    readout : mapping
        `UpdateProbe.readout_metadata`.
    mixed_precision : str
        As accelerate names it: the trainer's own product may be rounded to it.

    Raises
    ------
    ProbeError
        They differ by more than rounding explains, on the mean.
    """
    given = given.detach()
    names = [readout["hidden_dtype"], readout["head_dtype"], _AUTOCAST.get(mixed_precision)]
    dtypes = [given.dtype, *(getattr(torch, name) for name in names if name)]
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
    off = float((given.double().cpu() - torch.from_numpy(read).double()).abs().mean())
    allowed = 1e-3 + 16 * rounding
    if not off <= allowed:
        raise ProbeError(
            f"the log-probs that the probe read differ from the trainer's by {off:.3g} nats on the "
            f"mean, more than rounding explains ({allowed:.3g}): the model does something to its "
            "logits that the probe does not know; give `scale` or `softcap`"
        )
