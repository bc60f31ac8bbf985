"""Several updates from one and the same state."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from .errors import ProbeError
from .probe import UpdateProbe
from .random_state import RandomState
from .unwrap import unwrap_model, unwrap_optimizer

ZERO_STEP: Final = "zero-step"
"""The arm whose update has length zero: what moves there is noise."""


class Snapshot:
    """One copy of everything that an update changes, and the way back to it.

    Parameters
    ----------
    model : nn.Module
        Parameters, buffers, gradients, train or eval modes.
    optimizer : torch.optim.Optimizer
        Its state and the options of its groups.
    scaler : GradScaler, optional
        Scale and what it has found so far.
    extra : iterable, optional
        More objects to take along: anything with `state_dict` and `load_state_dict` (learning
        rate schedules), and torch.Generator.

    Notes
    -----
    Python's, NumPy's and torch's global random number generators belong to the state. Tensors
    are restored in place, so that parameters stay the objects that they are, tied or not.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, scaler: Any = None, *, extra: Iterable[Any] = ()
    ) -> None:
        _, self._model = unwrap_model(model)
        self._optimizer, found = unwrap_optimizer(optimizer, self._model)
        self._scaler = found if scaler is None else scaler
        parameters = list(self._model.parameters())
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._grads = [
            (p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters
        ]
        self._buffers = [
            (part._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in self._model.modules()
            for name, buffer in part._buffers.items()
        ]
        self._modes = [(part, part.training) for part in self._model.modules()]
        # Parameters that optimizer state refers to are not state but names for it.
        self._shared = {id(p): p for p in parameters}
        self._state = {
            key: _copy(value, dict(self._shared)) for key, value in self._optimizer.state.items()
        }
        self._groups = [
            (group, list(group["params"]), _copy(_options(group), dict(self._shared)))
            for group in self._optimizer.param_groups
        ]
        self._scaling = _scaling(self._scaler) if self._scaler else None
        self._extra = [(item, _extra_state(item)) for item in extra]
        self._random = RandomState.capture({p.device for p in parameters})

    def restore(self) -> None:
        """Put everything back, in place; can be called any number of times."""
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
            for parameter, grad, saved in self._grads:
                parameter.grad = grad
                if grad is not None and saved is not None:
                    grad.copy_(saved)
            for buffers, name, buffer, saved in self._buffers:
                buffers[name] = buffer
                if buffer is not None and saved is not None:
                    buffer.copy_(saved)
            state = self._optimizer.state
            for key in [key for key in state if key not in self._state]:
                del state[key]
            for key, value in self._state.items():
                state[key] = _put(state.get(key), value, dict(self._shared))
            self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
            for group, parameters, options in self._groups:
                group["params"][:] = parameters
                for name in _options(group).keys() - options.keys():
                    del group[name]
                for name, value in options.items():
                    group[name] = _put(group.get(name), value, dict(self._shared))
        for part, mode in self._modes:
            part.training = mode
        if self._scaling is not None:
            _set_scaling(self._scaler, self._scaling)
        for item, value in self._extra:
            _set_extra_state(item, value)
        self._random.restore()

    def moved(self) -> str | None:
        """Name of the first parameter that differs from the snapshot; None if none does."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        for parameter, value in self._parameters:
            if not _equal(parameter, value):
                return names[id(parameter)]
        return None


def branch(
    model: nn.Module,
    optimizer: Any,
    arms: Sequence[str],
    update: Callable[[str], object],
    *,
    go_on: str | None = "none",
    scaler: Any = None,
    probe: UpdateProbe | None = None,
    extra: Iterable[Any] = (),
) -> None:
    """Apply several updates from one state, and go on along one of them.

    Parameters
    ----------
    model, optimizer
        As in training.
    arms : sequence of str
        Names of the updates; "zero-step" is made with every learning rate set to 0.
    update : callable
        Makes the whole update of an arm: forward, backward, `optimizer.step()`. It is called
        with the arm's name, from the same parameters, buffers, gradients, optimizer state and
        random numbers each time.
    go_on : str or None
        The arm whose result stays; it runs last, so that one copy of the state is enough. None
        goes back to the state before.
    scaler : GradScaler, optional
        Belongs to the state.
    probe : UpdateProbe, optional
        Told the arm before each update; all arms count as one step.
    extra : iterable, optional
        See `Snapshot`.

    Raises
    ------
    ProbeError
        Repeated arms, `go_on` that is not one of them, or a step of length zero in which a
        parameter moved.

    Notes
    -----
    If an update raises, the state before all arms is put back and the exception passes.
    """
    names = list(arms)
    if not names or len(set(names)) != len(names):
        raise ProbeError(f"`arms` must name at least one update, each once; got {names}")
    if go_on is not None and go_on not in names:
        raise ProbeError(f"`go_on` must be one of the arms {', '.join(names)}, got {go_on!r}")
    order = [name for name in names if name != go_on] + ([] if go_on is None else [go_on])
    snapshot = Snapshot(model, optimizer, scaler, extra=extra)
    step, arm_before = (probe.step, probe.arm) if probe else (0, "")
    try:
        for index, name in enumerate(order):
            if index:
                snapshot.restore()
            if probe:
                probe.step, probe.arm = step, name
            if name == ZERO_STEP:
                _zero_step(optimizer, snapshot, update)
            else:
                update(name)
    except BaseException:
        if probe:
            probe.discard()
            probe.step = step
        snapshot.restore()
        raise
    finally:
        if probe:
            probe.arm = arm_before
    if go_on is None:
        snapshot.restore()


def _zero_step(optimizer: Any, snapshot: Snapshot, update: Callable[[str], object]) -> None:
    """Update with every learning rate 0, and see that nothing moved."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        update(ZERO_STEP)
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
    moved = snapshot.moved()
    if moved is not None:
        raise ProbeError(
            f"parameter {moved} moved in the step of length zero: with learning rate 0, "
            f"{type(optimizer).__name__} (or a schedule stepped within the update) still changes "
            "the weights, so it has no zero-step arm"
        )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Equal everywhere, NaN with NaN and −0 with 0; bytes where torch compares no such type."""
    if first.is_floating_point() and first.dtype.itemsize == 1:
        return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says beside its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Copy nested state; what `memo` holds stays itself."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        memo[id(value)] = value.detach().clone()
        return memo[id(value)]
    if isinstance(value, dict):
        return {key: _copy(item, memo) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        items = [_copy(item, memo) for item in value]
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.deepcopy(value, memo)


def _put(live: Any, saved: Any, memo: dict[int, Any]) -> Any:
    """Saved state in the tensors that live state has, where they fit; else in new ones."""
    if isinstance(saved, Tensor) and id(saved) not in memo:
        fits = (
            isinstance(live, Tensor)
            and live.shape == saved.shape
            and live.dtype == saved.dtype
            and live.device == saved.device
            and not live.requires_grad
        )
        if fits:
            live.copy_(saved)
            return live
    if isinstance(saved, dict) and isinstance(live, dict):
        for key in live.keys() - saved.keys():
            del live[key]
        for key, item in saved.items():
            live[key] = _put(live.get(key), item, memo)
        return live
    return _copy(saved, memo)


def _scaling(scaler: Any) -> tuple[dict[str, Any], dict[int, Any]]:
    """State of a GradScaler."""
    found = {key: _copy(dict(value), {}) for key, value in scaler._per_optimizer_states.items()}
    return dict(scaler.state_dict()), found


def _set_scaling(scaler: Any, saved: tuple[dict[str, Any], dict[int, Any]]) -> None:
    """Put a GradScaler back."""
    state, found = saved
    if state:  # a scaler that is switched off has none
        scaler.load_state_dict(state)
    scaler._per_optimizer_states.clear()
    for key, value in found.items():
        scaler._per_optimizer_states[key] = _copy(value, {})


def _extra_state(item: Any) -> Any:
    """State of an extra object."""
    if isinstance(item, torch.Generator):
        return item.get_state()
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        return _copy(item.state_dict(), {})
    raise ProbeError(
        f"`extra` takes objects with state_dict and load_state_dict and torch.Generator, got "
        f"{type(item).__name__}"
    )


def _set_extra_state(item: Any, saved: Any) -> None:
    """Put an extra object back."""
    if isinstance(item, torch.Generator):
        item.set_state(saved)
    else:
        item.load_state_dict(_copy(saved, {}))
