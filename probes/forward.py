"""One training forward, kept so that it can be made again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ProbeError
from .replay import Call
from .sharded.tensors import like, whole

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
    logits : Tensor, optional
        What the head made of `hidden`, without graph, where that was asked for.
    """

    call: Call
    from_head: bool
    hidden: Tensor | None
    buffers: dict[int, Tensor] | None
    logits: Tensor | None = None

    @property
    def shortens(self) -> bool:
        """Whether the model can be made to give the logits of some positions only."""
        return self.from_head and self.call.can_shorten

    def of_rows(self, rows: Tensor, batch: int) -> Forward:
        """Take some rows of the batch alone; see `Call.of_rows`."""
        return Forward(self.call.of_rows(rows, batch), self.from_head, None, self.buffers)


@dataclass(frozen=True)
class Replayed:
    """What a forward made again gave.

    Attributes
    ----------
    hidden : Tensor
        Hidden states, without graph unless it was asked for.
    output : Any
        What the call returned.
    dtypes : set of torch.dtype
        Of the logits as they left the head, before a wrapper turned them into another.
    """

    hidden: Tensor
    output: Any
    dtypes: set[torch.dtype]


def again(
    forward: Forward,
    head: nn.Module,
    *,
    grad: bool,
    columns: Tensor | None = None,
    graph: bool = False,
) -> Replayed:
    """Make a forward again with the weights as they are now.

    Parameters
    ----------
    forward : Forward
        As it was seen.
    head : nn.Module
        The output head of the model.
    grad : bool
        Whether gradients are on.
    columns : Tensor of int, optional
        Positions of the head's input at which the model's own logits are wanted; where the
        model can leave positions out, it gets no others. By default one.
    graph : bool
        Give the hidden states as the model made them, to be differentiated; otherwise cut off,
        and nothing is kept for a backward.

    Returns
    -------
    Replayed
        Hidden states of the shape of the training forward's.

    Raises
    ------
    ProbeError
        The head was not called exactly once.
    """
    inputs: list[Tensor] = []
    dtypes: set[torch.dtype] = set()

    def look(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden = head_input(args, kwargs)
        inputs.append(hidden if graph else hidden.detach())
        if not forward.shortens:
            return None
        wanted = torch.zeros(1, dtype=torch.long) if columns is None else columns
        few = hidden.index_select(hidden.ndim - 2, wanted.to(hidden.device))
        few = like(few, args[0] if args else next(iter(kwargs.values())))
        return ((few, *args[1:]), kwargs) if args else ((few,), {})

    def note(module: nn.Module, args: tuple[Any, ...], logits: Any) -> None:
        if isinstance(logits, Tensor):
            dtypes.add(logits.dtype)

    handles = (
        head.register_forward_pre_hook(look, with_kwargs=True),
        head.register_forward_hook(note),
    )
    try:
        output = forward.call.again(
            grad=grad, without_labels=forward.shortens, buffers=forward.buffers, graph=graph
        )
    finally:
        for handle in handles:
            handle.remove()
    if not forward.from_head:
        return Replayed(body_output(output, graph=graph), output, dtypes)
    if len(inputs) != 1:
        raise ProbeError(f"the head was called {len(inputs)} times in one forward, expected once")
    return Replayed(inputs[0], output, dtypes)


def own_logits(model: nn.Module, forward: Forward) -> Tensor | None:
    """Logits of the whole model where only its body was called.

    Parameters
    ----------
    model : nn.Module
        With its head.
    forward : Forward
        A call of its body.

    Returns
    -------
    Tensor or None
        Shape (B, L, vocab); None if the model gives none.
    """
    if "forward" in vars(model):
        return None  # a forward that was replaced may not give logits any more
    given = {name: forward.call.argument(name) for name in _PLAIN_INPUTS}
    call = Call.capture(
        model, (), {name: value for name, value in given.items() if value is not None}, {}
    )
    call = dataclasses.replace(
        call,
        random=forward.call.random,
        autocast=forward.call.autocast,
        attention=forward.call.attention,
    )
    output = call.again(grad=False, without_labels=False, buffers=forward.buffers)
    logits = getattr(output, "logits", None)
    return logits.detach() if isinstance(logits, Tensor) else None


def body_output(output: Any, *, graph: bool = False) -> Tensor:
    """Last hidden state in what a body returns, without graph unless it is asked for."""
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None and isinstance(output, tuple):
        hidden = output[0]
    if hidden is None:
        hidden = output
    if not isinstance(hidden, Tensor):
        raise ProbeError(
            f"the model's body returned {type(hidden).__name__}, which holds no hidden states"
        )
    found: Tensor = whole(hidden)
    return found if graph else found.detach()


def head_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Hidden states among the arguments of a head, all of them."""
    value = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(value, Tensor):
        raise ProbeError(f"the head got {type(value).__name__}, expected hidden states")
    found: Tensor = whole(value)
    return found
