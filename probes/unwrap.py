"""What stands behind wrapped models and optimizers, and what is not supported."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from .errors import ProbeError
from .replay import is_optimized_module

_REFUSED = {
    "DataParallel": "torch.nn.DataParallel runs replicas in threads; use DistributedDataParallel",
    "FullyShardedDataParallel": (
        "FSDP1 keeps the weights flat and sharded, and a forward beside the training step "
        "corrupts them; use DistributedDataParallel or one device"
    ),
    "DeepSpeedEngine": "DeepSpeed steps inside backward, where no optimizer hook fires",
}


def unwrap_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Find the model within its wrappers.

    Parameters
    ----------
    model : nn.Module
        As it is called in training.

    Returns
    -------
    outer : nn.Module
        What to watch: the outermost torch.compile'd wrapper if there is one, else the model.
    model : nn.Module
        Without torch.compile's and DistributedDataParallel's wrappers.

    Raises
    ------
    ProbeError
        A wrapper or a kind of parameter that is not supported.
    """
    outer: nn.Module | None = None
    while True:
        _refuse(model)
        if is_optimized_module(model):
            outer = model if outer is None else outer
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__name__ == "DistributedDataParallel":
            model = model.module  # type: ignore[assignment]
        else:
            break
    for part in model.modules():
        _refuse(part)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ProbeError(f"parameter {name} is on the meta device and has no values")
    return (model if outer is None else outer), model


def unwrap_optimizer(optimizer: Any, model: nn.Module) -> tuple[Optimizer, Any]:
    """Find the torch optimizer within its wrappers.

    Parameters
    ----------
    optimizer : Optimizer or a wrapper with an attribute `optimizer`
        As it is stepped in training.
    model : nn.Module
        Unwrapped; must own every parameter of the optimizer.

    Returns
    -------
    optimizer : Optimizer
        The one whose hooks fire.
    scaler : GradScaler or None
        What the wrapper carries.

    Raises
    ------
    ProbeError
        Not a torch optimizer, or parameters of another model.
    """
    scaler = None
    # accelerate's wrapper is an Optimizer by name only: it never calls Optimizer.__init__.
    while "optimizer" in getattr(optimizer, "__dict__", {}):
        scaler = scaler or getattr(optimizer, "scaler", None)
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ProbeError(
            f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if "_optimizer_step_post_hooks" not in vars(optimizer):
        raise ProbeError(
            f"{type(optimizer).__name__} has no step hooks, since it never called "
            "Optimizer.__init__; give the optimizer that it wraps"
        )
    own = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = sum(id(parameter) not in own for parameter in group["params"])
        if foreign:
            raise ProbeError(
                f"parameter group {index} of the optimizer holds {foreign} parameters that are "
                "not the model's: one step must be the update of this model alone (was the "
                "optimizer made before the model was moved or wrapped?)"
            )
    return optimizer, scaler


def _refuse(module: nn.Module) -> None:
    """Refuse wrappers by the names of their classes, which need not be imported."""
    for kind in type(module).__mro__:
        if kind.__name__ in _REFUSED:
            raise ProbeError(f"{kind.__name__}: {_REFUSED[kind.__name__]}")
