"""Hooks that see a training forward, and the same forward made again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import ProbeError
from .replay import (
    Call,
    Copies,
    buffer_copies,
    buffer_versions,
    in_backward,
    is_compiled,
    is_optimized_module,
)

_PLAIN_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass
class Forward:
    """One training forward, with what is needed to make it again.

    Attributes
    ----------
    call : Call
        The call that gives the hidden states: of the whole model, or of its body where the
        head was not called on what the body gave (fused losses, a caller with a head of its
        own).
    from_head : bool
        Whether the hidden states are what enters the head; else they are the body's output.
    hidden : Tensor or None
        Hidden states of the training forward itself, shape (B, L', H) or (rows, H), without
        graph; None where they cannot be seen (compiled models).
    buffers : dict of id to Tensor, or None
        Copies of the buffers where the forward wrote to them.
    """

    call: Call
    from_head: bool
    hidden: Tensor | None
    buffers: dict[int, Tensor] | None

    @property
    def shortens(self) -> bool:
        """Whether the model can be made to give the logits of some positions only."""
        return self.from_head and self.call.can_shorten


@dataclass(frozen=True)
class Replayed:
    """What a forward made again gave.

    Attributes
    ----------
    hidden : Tensor
        Hidden states, without graph.
    output : Any
        What the call returned.
    dtypes : set of torch.dtype
        Of the logits as they left the head, before a wrapper turned them into another.
    """

    hidden: Tensor
    output: Any
    dtypes: set[torch.dtype]


@dataclass
class _Trace:
    """A training forward that is under way."""

    owner: nn.Module
    copies: Copies
    versions: dict[int, int]
    root: Call | None = None
    body: Call | ProbeError | None = None
    body_calls: int = 0
    body_output: Tensor | None = None
    head_inputs: list[Tensor] = field(default_factory=list)


class Watcher:
    """Sees the calls of a model, its body and its head, and makes them again.

    Parameters
    ----------
    outer : nn.Module
        What is called in training: the model or its torch.compile'd wrapper.
    model : nn.Module
        The model itself.
    head : nn.Module
        Its output head.
    wanted : callable
        Whether the next forward is one to look at.
    seen : callable
        Takes each such forward right after it.

    Notes
    -----
    Hooks inside a compiled model are either traced into its graph or silently ignored, so
    there only the call from outside is watched.
    """

    def __init__(
        self,
        outer: nn.Module,
        model: nn.Module,
        head: nn.Module,
        *,
        wanted: Callable[[], bool],
        seen: Callable[[Forward], None],
    ) -> None:
        self.model = model
        self.compiled = is_compiled(outer) or any(is_compiled(part) for part in model.modules())
        self._outer = outer
        self._head = head
        self._body = None if self.compiled else _body(model)
        self._wanted = wanted
        self._seen = seen
        self._trace: _Trace | None = None
        self._paused = False
        self._handles: list[RemovableHandle] = []
        self._compiled_call: Callable[..., Any] | None = None

    def install(self) -> None:
        """Put the hooks in place."""
        outer = self._outer
        if outer._compiled_call_impl is not None and not is_optimized_module(outer):
            # `module.compile()` traces the module's own hooks, so the call is wrapped instead.
            self._compiled_call = outer._compiled_call_impl
            outer._compiled_call_impl = self._around_compiled
        else:
            self._handles += [
                outer.register_forward_pre_hook(self._enter, with_kwargs=True),
                outer.register_forward_hook(self._leave),
            ]
        if not self.compiled:
            self._handles.append(
                self._head.register_forward_pre_hook(self._enter_head, with_kwargs=True)
            )
        if self._body is not None:
            self._handles += [
                self._body.register_forward_pre_hook(self._enter_body, with_kwargs=True),
                self._body.register_forward_hook(self._leave_body),
            ]

    def remove(self) -> None:
        """Take away these hooks and no others."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._compiled_call is not None:
            if self._outer._compiled_call_impl == self._around_compiled:
                self._outer._compiled_call_impl = self._compiled_call
            self._compiled_call = None
        self._trace = None

    def again(self, forward: Forward, *, grad: bool, columns: Tensor | None = None) -> Replayed:
        """Make a forward again with the weights as they are now.

        Parameters
        ----------
        forward : Forward
            As it was seen.
        grad : bool
            Whether gradients are on.
        columns : Tensor of int, optional
            Positions of the head's input at which the model's own logits are wanted; where the
            model can leave positions out, it gets no others. By default one.

        Returns
        -------
        Replayed
            Hidden states of the shape of the training forward's.

        Raises
        ------
        ProbeError
            The head was not called exactly once.
        """
        call, inputs = forward.call, list[Tensor]()
        dtypes: set[torch.dtype] = set()
        shorten = forward.shortens

        def look(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if torch.compiler.is_compiling():
                return None
            hidden = _first(args, kwargs)
            inputs.append(hidden.detach())
            if not shorten:
                return None
            axis = hidden.ndim - 2
            wanted = torch.zeros(1, dtype=torch.long) if columns is None else columns
            few = hidden.index_select(axis, wanted.to(hidden.device))
            return ((few, *args[1:]), kwargs) if args else ((few,), {})

        def note(module: nn.Module, args: tuple[Any, ...], logits: Any) -> None:
            if isinstance(logits, Tensor):
                dtypes.add(logits.dtype)

        handles = (
            self._head.register_forward_pre_hook(look, with_kwargs=True),
            self._head.register_forward_hook(note),
        )
        try:
            with self._pause():
                output = call.again(grad=grad, without_labels=shorten, buffers=forward.buffers)
        finally:
            for handle in handles:
                handle.remove()
        if not forward.from_head:
            return Replayed(_body_output(output), output, dtypes)
        if len(inputs) != 1:
            raise ProbeError(
                f"the head was called {len(inputs)} times in one forward, expected once"
            )
        return Replayed(inputs[0], output, dtypes)

    def own_logits(self, forward: Forward) -> Tensor | None:
        """Logits of the whole model where only its body was called; None if it gives none."""
        if forward.from_head or "forward" in vars(self.model):
            return None  # a forward that was replaced may not give logits any more
        given = {name: forward.call.argument(name) for name in _PLAIN_INPUTS}
        call = Call.capture(
            self.model, (), {name: value for name, value in given.items() if value is not None}, {}
        )
        call = dataclasses.replace(
            call,
            random=forward.call.random,
            autocast=forward.call.autocast,
            attention=forward.call.attention,
        )
        with self._pause():
            output = call.again(grad=False, without_labels=False, buffers=forward.buffers)
        logits = getattr(output, "logits", None)
        return logits.detach() if isinstance(logits, Tensor) else None

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Ignore the probe's own forwards."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _ignored(self) -> bool:
        """Whether a call is the probe's own, a recomputation, or traced by a compiler."""
        return torch.compiler.is_compiling() or self._paused or in_backward()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model."""
        if self._ignored() or not self._wanted():
            return
        trace = _Trace(module, {}, buffer_versions(self.model))
        trace.root = Call.capture(self.model, args, kwargs, trace.copies)
        self._trace = trace

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the model."""
        if not self._ignored() and self._trace is not None and self._trace.owner is module:
            self._finish()

    def _around_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Stand around a call of a model compiled in place."""
        if self._compiled_call is None:
            raise ProbeError("the probe is no longer in place")
        self._enter(self._outer, args, kwargs)
        output = self._compiled_call(*args, **kwargs)
        self._leave(self._outer, args, output)
        return output

    def _enter_body(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the body, within the model or called alone."""
        if self._ignored():
            return
        if self._trace is None:
            if not self._wanted():
                return
            self._trace = _Trace(module, {}, buffer_versions(self.model))
        self._trace.body_calls += 1
        try:
            self._trace.body = Call.capture(module, args, kwargs, self._trace.copies)
        except ProbeError as error:
            self._trace.body = error  # matters only if the hidden states must come from here

    def _leave_body(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the body."""
        if self._ignored() or self._trace is None:
            return
        self._trace.body_output = _body_output(output)
        if self._trace.owner is module:
            self._finish()

    def _enter_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the head."""
        if not self._ignored() and self._trace is not None:
            self._trace.head_inputs.append(_first(args, kwargs).detach())

    def _finish(self) -> None:
        """Decide where the hidden states come from, and hand the forward on."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        changed = trace.versions != buffer_versions(self.model)
        buffers = buffer_copies(self.model) if changed else None
        if trace.root is not None and (self.compiled or len(trace.head_inputs) == 1):
            hidden = trace.head_inputs[0] if trace.head_inputs else None
            self._seen(Forward(trace.root, True, hidden, buffers))
        elif trace.body_calls == 1 and isinstance(trace.body, Call):
            self._seen(Forward(trace.body, False, trace.body_output, buffers))
        elif isinstance(trace.body, ProbeError):
            raise trace.body
        else:
            raise ProbeError(
                f"in the training forward the head was called {len(trace.head_inputs)} times and "
                f"the body {trace.body_calls} times, expected once: the hidden states cannot be "
                "told apart"
            )


def _body(model: nn.Module) -> nn.Module | None:
    """Find the model without its head, where transformers can tell."""
    getter = getattr(model, "get_decoder", None)
    body = getter() if callable(getter) else None
    return body if isinstance(body, nn.Module) and body is not model else None


def _body_output(output: Any) -> Tensor:
    """Last hidden state in what a body returns."""
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None and isinstance(output, tuple):
        hidden = output[0]
    if hidden is None:
        hidden = output
    if not isinstance(hidden, Tensor):
        raise ProbeError(
            f"the model's body returned {type(hidden).__name__}, which holds no hidden states"
        )
    return hidden.detach()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Input of the head."""
    value = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(value, Tensor):
        raise ProbeError(f"the head got {type(value).__name__}, expected hidden states")
    return value
