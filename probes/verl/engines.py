"""What the plugin asks of a training engine of verl."""

from __future__ import annotations

from typing import Any, Final

import torch

from deltad.probes.errors import ProbeError
from deltad.probes.sharded.fsdp import is_fsdp1, reshard

from .columns import Layout

HALF: Final = ("bfloat16", "float16")
"""Names of dtypes to which no log-prob should be rounded."""


def layout_of(engine: Any) -> Layout:
    """How an engine lays out its positions."""
    config = engine.engine_config
    if getattr(config, "strategy", None) != "megatron":
        return Layout()
    return Layout("thd" if config.use_remove_padding else "bshd")


def is_policy(engine: Any) -> bool:
    """Whether an engine trains a language model (not a critic)."""
    return getattr(engine.model_config, "model_type", "language_model") == "language_model"


def vocab_size_of(engine: Any) -> int:
    """Number of ids, by the model's config."""
    config = engine.model_config.hf_config
    getter = getattr(config, "get_text_config", None)
    return int((getter() if callable(getter) else config).vocab_size)


def devices() -> list[torch.device]:
    """Where an engine draws random numbers beside the CPU."""
    from verl.utils.device import get_device_id, get_device_name

    name = get_device_name()
    return [torch.device(name, int(get_device_id()))] if name == "cuda" else []


def must_hand_over_logits(engine: Any, data: Any) -> None:
    """Refuse the options of verl under which nobody sees the logits of a batch.

    Raises
    ------
    ProbeError
        Fused kernels, padding to a length, or router replay.
    """
    from verl.utils import tensordict_utils as tu

    config = engine.engine_config
    fused = tu.get_non_tensor_data(
        data,
        key="use_fused_kernels",
        default=getattr(config, "use_fused_kernels", False),
    )
    if fused:
        raise ProbeError(
            "the logits, which deltad's plugin reads, are never made under fused kernels: set "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )
    if getattr(engine, "enable_routing_replay", False):
        raise ProbeError(
            "the forwards in which deltad's plugin reads the policy would use up the routes that "
            "router replay keeps for the training: set router_replay.mode=disabled"
        )
    if getattr(config, "pad_to_length", False):
        raise ProbeError(
            "verl does not hand over logits of packed batches that it pads to a length: set "
            "actor_rollout_ref.actor.fsdp_config.pad_to_length=False (or the Megatron engine's)"
        )


def computes_in_half(engine: Any) -> bool:
    """Whether an engine's products are of half precision, so that its logits are rounded.

    Some models and Megatron's wrapper hand logits on as float32 that were bfloat16 before.
    """
    dtype = getattr(engine, "_autocast_dtype", None)  # the FSDP engine's
    if dtype is None:
        dtype = getattr(engine.engine_config, "dtype", None)  # Megatron's
    return str(dtype).removeprefix("torch.") in HALF


def leave_sharded(engine: Any) -> None:
    """Leave no weight gathered after a forward: the optimizer would pass it by."""
    module: Any = engine.module
    if not isinstance(module, torch.nn.Module):
        return  # Megatron's list of chunks, whose weights stay where they are
    reshard(module)
    if is_fsdp1(module) and torch.distributed.get_world_size() > 1:
        handle: Any = module._handle
        handle.reshard(True)
