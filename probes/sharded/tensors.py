"""Tensors that are spread over ranks, and what this rank holds of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deltad.probes.errors import ProbeError


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor, without importing what defines it."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Any) -> Any:
    """All of a DTensor as a plain tensor; a collective where it is sharded. Others as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_rows(tensor: Tensor) -> Tensor:
    """Rows of a tensor that this rank holds: the tensor itself, or its part of a DTensor.

    Raises
    ------
    ProbeError
        A DTensor that is cut along another axis than its first, or over several of them.
    """
    if not is_sharded(tensor):
        return tensor
    shards: Any = tensor
    cut = [each for each in shards.placements if not each.is_replicate()]
    if len(cut) > 1 or any(not each.is_shard(0) for each in cut):
        raise ProbeError(
            "a sharded head must be cut along its rows, the ids of the vocabulary, by one group "
            f"of ranks; its placements are {shards.placements}"
        )
    local: Tensor = shards.to_local()
    return local


def like(value: Tensor, other: Any) -> Tensor:
    """Make a plain tensor, the same on all ranks, a DTensor where the other is one."""
    if not is_sharded(other):
        return value
    made: Tensor = type(other).from_local(value, other.device_mesh, other.placements)
    return made
