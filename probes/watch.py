"""Hooks that see a training forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import ProbeError
from .forward import Forward, body_output, head_input
from .replay import (
    Call,
    Copies,
    buffer_copies,
    buffer_versions,
    in_backward,
    is_compiled,
    is_optimized_module,
)


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
    head_output: Tensor | None = None


class Watcher:
    """Sees the calls of a model, its body and its head.

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
    logits : bool
        Keep what the head makes, too.

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
        logits: bool = False,
    ) -> None:
        self.model = model
        self.compiled = is_compiled(outer) or any(is_compiled(part) for part in model.modules())
        self._outer = outer
        self._head = head
        self._body = None if self.compiled else _body(model)
        self._wanted = wanted
        self._seen = seen
        self._logits = logits
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
            if self._logits:
                self._handles.append(self._head.register_forward_hook(self._leave_head))
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what is called within: the probe's own forwards."""
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
        self._trace.body_output = body_output(output)
        if self._trace.owner is module:
            self._finish()

    def _enter_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the head."""
        if not self._ignored() and self._trace is not None:
            self._trace.head_inputs.append(head_input(args, kwargs).detach())

    def _leave_head(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the head."""
        if not self._ignored() and self._trace is not None and isinstance(output, Tensor):
            self._trace.head_output = output.detach()

    def _finish(self) -> None:
        """Decide where the hidden states come from, and hand the forward on."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        changed = trace.versions != buffer_versions(self.model)
        buffers = buffer_copies(self.model) if changed else None
        if trace.root is not None and (self.compiled or len(trace.head_inputs) == 1):
            hidden = trace.head_inputs[0] if trace.head_inputs else None
            self._seen(Forward(trace.root, True, hidden, buffers, trace.head_output))
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
