"""One call of a model, kept so that it can be made again as it was."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ProbeError
from .random_state import RandomState

_CACHES = ("past_key_values", "cache", "past_key_value")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SDP = ("flash", "mem_efficient", "math", "cudnn")

Copies = dict[int, tuple[Tensor, Tensor]]
"""Tensors by id, each with its copy; the tensor itself is held so that the id stays its own."""


def in_backward() -> bool:
    """Whether autograd is running: a forward there is a checkpoint being recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of this module itself goes through torch.compile."""
    return is_optimized_module(module) or module._compiled_call_impl is not None


def is_optimized_module(module: nn.Module) -> bool:
    """Whether this is what torch.compile(module) returns."""
    # Without the import, which takes a second, nothing has been compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


@dataclass(frozen=True)
class Call:
    """Inputs and surroundings of one call of a module.

    Attributes
    ----------
    module : nn.Module
        What was called.
    args, kwargs : tuple and dict
        Its inputs as they were given, copied: a caller may reuse its tensors for the next batch.
    parameters : tuple of str
        Names of the positional parameters.
    can_shorten : bool
        Whether the module promises to cope with logits of some positions only.
    random : RandomState
        Before the call.
    autocast : tuple of (device type, enabled, dtype)
        State for each device type.
    attention : tuple of bool
        Which kernels of scaled_dot_product_attention were allowed.
    grad : bool
        Whether gradients were on, which decides between kernels.
    training : tuple of bool
        Train or eval mode of every submodule.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[str, ...]
    can_shorten: bool
    random: RandomState
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    attention: tuple[bool, ...]
    grad: bool
    training: tuple[bool, ...]

    @classmethod
    def capture(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copies: Copies,
    ) -> Call:
        """Keep a call that is about to be made.

        Parameters
        ----------
        module : nn.Module
            What is called.
        args, kwargs
            Its inputs.
        copies : Copies
            Those made so far, shared between the calls of one forward.

        Returns
        -------
        Call
            Independent of the caller's tensors.

        Raises
        ------
        ProbeError
            The call carries a cache or gradients of an earlier forward, which would be stale
            after the step.
        """
        found = inspect.signature(module.forward).parameters
        parameters = tuple(name for name, each in found.items() if each.kind in _POSITIONAL)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        for name in _CACHES:
            if given.get(name) is not None:
                raise ProbeError(
                    f"the training forward was called with `{name}`, which the old weights "
                    "filled; call the model on the whole sequence"
                )
        devices = {tensor.device for tensor in module.parameters()}
        return cls(
            module,
            tuple(
                _copy(value, parameters[i] if i < len(parameters) else str(i), copies)
                for i, value in enumerate(args)
            ),
            {name: _copy(value, name, copies) for name, value in kwargs.items()},
            parameters,
            "logits_to_keep" in found or "num_logits_to_keep" in found,
            RandomState.capture(devices),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({"cpu"} | {device.type for device in devices})
            ),
            tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDP),
            torch.is_grad_enabled(),
            tuple(part.training for part in module.modules()),
        )

    def argument(self, name: str) -> Any:
        """Look up an argument by name; None where it was not given."""
        return {**dict(zip(self.parameters, self.args, strict=False)), **self.kwargs}.get(name)

    def of_rows(self, rows: Tensor, batch: int) -> Call:
        """Take some rows of the batch alone.

        Parameters
        ----------
        rows : Tensor of int, shape (row,)
            Which.
        batch : int
            Rows in the batch: arguments of two axes or more, of which the first is as long, are
            taken apart; others stay. Whether that was right shows in what the call gives.

        Returns
        -------
        Call
            Of the same module in the same surroundings.
        """

        def few(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch:
                return value.index_select(0, rows.to(value.device))
            return value

        return dataclasses.replace(
            self,
            args=tuple(few(value) for value in self.args),
            kwargs={name: few(value) for name, value in self.kwargs.items()},
        )

    def again(
        self,
        *,
        grad: bool,
        without_labels: bool,
        buffers: dict[int, Tensor] | None = None,
        graph: bool = False,
    ) -> Any:
        """Make the call again with the weights as they are now.

        Nothing of it stays: generators, buffers, modes and autocast are put back, and no
        activation is kept for a backward unless a graph is asked for.

        Parameters
        ----------
        grad : bool
            Whether gradients are on, so that the same kernels run as in training.
        without_labels : bool
            Leave `labels` out, so that no loss is computed from logits that are not all there.
        buffers : dict of id to Tensor, optional
            Values that buffers had at some earlier time.
        graph : bool
            Whether the result will be differentiated.

        Returns
        -------
        Any
            What the module returns.
        """
        args, kwargs = self.args, self.kwargs
        if without_labels and "labels" in kwargs:
            kwargs = {**kwargs, "labels": None}
        elif without_labels and "labels" in self.parameters[: len(args)]:
            at = self.parameters.index("labels")
            args = (*args[:at], None, *args[at + 1 :])
        after = RandomState.capture(self.random.cuda)
        with ExitStack() as stack:
            stack.callback(after.restore)
            stack.enter_context(own_buffers(self.module, buffers))
            stack.enter_context(_modes(self.module, self.training))
            stack.enter_context(attention_kernels(self.attention))
            for kind, enabled, dtype in self.autocast:
                # Without its cache: it may hold casts of the weights before the step, and must
                # not be left with casts that carry no gradient.
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    if enabled
                    else torch.autocast(kind, enabled=False, cache_enabled=False)
                )
            if not graph:  # no activation is kept, also where gradients are on
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_forget, _unpack))
            stack.enter_context(torch.set_grad_enabled(grad))
            if any(is_compiled(part) for part in self.module.modules()):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self.random.restore()
            return self.module(*args, **kwargs)


def buffer_copies(module: nn.Module) -> dict[int, Tensor]:
    """Copies of all buffers by the id of the buffer."""
    return {id(buffer): buffer.detach().clone() for buffer in module.buffers()}


def buffer_versions(module: nn.Module) -> dict[int, int]:
    """What changes when a buffer is written to or replaced."""
    return {id(buffer): buffer._version for buffer in module.buffers()}


@contextmanager
def own_buffers(module: nn.Module, values: dict[int, Tensor] | None = None) -> Iterator[None]:
    """Let the module work on copies of its buffers, so that its own stay as they are."""
    values = values or {}
    copies: dict[int, Tensor] = {}
    before = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
    try:
        for buffers, kept in before:
            for name, buffer in kept.items():
                if buffer is not None:
                    source = values.get(id(buffer), buffer)
                    copies.setdefault(id(buffer), source.detach().clone())
                    buffers[name] = copies[id(buffer)]
        yield
    finally:
        for buffers, kept in before:
            buffers.clear()
            buffers.update(kept)


@contextmanager
def _modes(module: nn.Module, training: tuple[bool, ...]) -> Iterator[None]:
    """Train or eval mode a submodule."""
    parts = list(module.modules())
    before = [part.training for part in parts]
    try:
        for part, mode in zip(parts, training, strict=True):
            part.training = mode
        yield
    finally:
        for part, mode in zip(parts, before, strict=True):
            part.training = mode


@contextmanager
def attention_kernels(allowed: tuple[bool, ...]) -> Iterator[None]:
    """Allow these kernels of scaled_dot_product_attention within the block, and no others."""
    cuda = torch.backends.cuda
    before = [getattr(cuda, f"{name}_sdp_enabled")() for name in _SDP]
    try:
        for name, value in zip(_SDP, allowed, strict=True):
            getattr(cuda, f"enable_{name}_sdp")(value)
        yield
    finally:
        for name, value in zip(_SDP, before, strict=True):
            getattr(cuda, f"enable_{name}_sdp")(value)


def _forget(tensor: Tensor) -> None:
    """Keep nothing for a backward."""


def _unpack(packed: None) -> Tensor:
    """Never reached: nobody has the output of a probe's forward."""
    raise ProbeError("the probe's own forward has no backward")


def _copy(value: Any, name: str, copies: Copies) -> Any:
    """Copy the tensors in an argument."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ProbeError(
                f"argument `{name}` of the training forward carries gradients: computed from "
                "the weights before the step, it would be stale after it; call the model on "
                "input_ids"
            )
        if id(value) not in copies:
            copies[id(value)] = (value, value.detach().clone())
        return copies[id(value)][1]
    if isinstance(value, dict):
        return type(value)({key: _copy(item, name, copies) for key, item in value.items()})
    if isinstance(value, list):
        return [_copy(item, name, copies) for item in value]
    if type(value) is tuple:
        return tuple(_copy(item, name, copies) for item in value)
    return value
