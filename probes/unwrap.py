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
        "FSDP1 has no way to give weights back after a forward beside the training step, which "
        "would corrupt it; use fully_shard (FSDP2)"
    ),
    "DeepSpeedEngine": "DeepSpeed steps inside backward, where no optimizer hook fires",
}

# Wrappers of models, and their attribute that holds what they wrap.
_WITHIN = {"DistributedDataParallel": "module", "_FabricModule": "_forward_module"}


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
        Without the wrappers of torch.compile, DistributedDataParallel and Lightning Fabric.

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
        elif (inner := _WITHIN.get(type(model).__name__)) is not None:
            model = getattr(model, inner)
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
    optimizer : Optimizer, or accelerate's or Lightning Fabric's wrapper of one
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
    # These wrappers are Optimizers by name only: they never call Optimizer.__init__.
    while True:
        held = getattr(optimizer, "__dict__", {})
        if "optimizer" in held:  # accelerate
            scaler = scaler or getattr(optimizer, "scaler", None)
            optimizer = held["optimizer"]
        elif "_optimizer" in held and "_strategy" in held:  # Lightning Fabric
            precision = getattr(held["_strategy"], "precision", None)
            scaler = scaler or getattr(precision, "scaler", None)
            optimizer = held["_optimizer"]
        else:
            break
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
