"""Models under `fully_shard` (FSDP2) and FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_fsdp2(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether this is a FullyShardedDataParallel."""
    return type(module).__name__ == "FullyShardedDataParallel"


def reshard(model: nn.Module) -> None:
    """Give back every weight that a forward gathered.

    What stays gathered after a forward is registered as the model's parameters: optimizers,
    `zero_grad` and the next forward would then see weights that no step reaches.
    """
    for part in model.modules():
        if is_fsdp2(part):
            sharded: Any = part
            sharded.reshard()


def gather(modules: list[nn.Module]) -> None:
    """Gather the weights of those modules that `fully_shard` was applied to; a collective.

    In the precision that forwards run in. What is gathered already is left as it is.
    """
    for module in modules:
        if is_fsdp2(module):
            sharded: Any = module
            sharded.unshard()


def lineage(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The model, the modules that hold `module`, and itself, from the outside in."""
    for name, each in model.named_modules(remove_duplicate=False):
        if each is module:
            found = [model]
            for part in name.split(".") if name else []:
                found.append(getattr(found[-1], part))
            return found
    return [module]
