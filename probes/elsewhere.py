"""The model at other parameters than its own: forwards, derivatives, differences.

The model's own parameters are never written to. `torch.func.functional_call` puts copies in
their place for the time of a call, and everything that needs them, a backward that recomputes
checkpointed activations too, happens within that time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from deltad.divergence import DIVERGENCES
from deltad.support import topk_support

from .errors import ProbeError
from .forward import again
from .head import Head
from .microbatch import MicroBatch
from .readout import exact_products
from .replay import attention_kernels

T = TypeVar("T")
Parameters = Mapping[str, Tensor]
"""Parameters by their names in the model; one that is tied is named once."""

# flash, memory-efficient, math, cuDNN: of these, math alone has forward-mode derivatives.
_MATH: Final = (False, False, True, False)


class Elsewhere:
    """A model with other values in the place of some of its parameters.

    Parameters
    ----------
    model : nn.Module
        Unwrapped; stays as it is.
    head : Head
        Of the model.
    temperature : float
        Of all policies.
    token_chunk : int
        Rows whose logits are held at once where no graph has to keep them.
    """

    def __init__(
        self, model: nn.Module, head: Head, *, temperature: float, token_chunk: int
    ) -> None:
        self._within = _Within(model)
        self._head = head
        self._temperature = temperature
        self._token_chunk = token_chunk

    def run(self, parameters: Parameters, function: Callable[[], T]) -> T:
        """Call a function while these parameters stand in the place of the model's own."""
        named = {f"model.{name}": value for name, value in parameters.items()}
        result: T = torch.func.functional_call(self._within, named, (function,))
        return result

    def differentiate(self, parameters: Parameters, function: Callable[[], T]) -> T:
        """Call a function that makes forwards and backwards, as `run` does.

        What a checkpoint recomputes in a backward then comes from these parameters and by the
        kernels of the forward.
        """
        with attention_kernels(_MATH):
            return self.run(parameters, function)

    def slope(
        self, batch: MicroBatch, divergence: str, parameters: Parameters, direction: Parameters
    ) -> Tensor:
        """Derivative of every row's D along a direction, by forward-mode differentiation.

        Parameters
        ----------
        batch : MicroBatch
            With its training forward.
        divergence : {"kl", "tv"}
            Of the top-K support, as the dump's D.
        parameters : Parameters
            Where.
        direction : Parameters
            Which way; parameters that it does not name stay.

        Returns
        -------
        Tensor of float64, shape (row,)
            dD/dε at ε = 0 of D(parameters + ε · direction).

        Raises
        ------
        RuntimeError
            A part of the model has no forward-mode derivative.
        """
        autodiff: Any = forward_ad  # torch leaves it untyped

        def read() -> Tensor:
            hidden = self.hidden(batch, None, grad=False)
            selected = batch.select(hidden)
            slopes = []
            for start in range(0, batch.size, self._token_chunk):
                stop = min(start + self._token_chunk, batch.size)
                part = torch.arange(start, stop, device=selected.device)
                logprobs = self.logprobs(batch, selected[part], part)
                value = reduced_divergence(batch, divergence, part, logprobs)
                tangent = autodiff.unpack_dual(value).tangent
                if tangent is None:
                    raise RuntimeError(
                        "a part of the model lets no forward-mode derivative through"
                    )
                slopes.append(tangent.detach())
            return torch.cat(slopes)

        # Not torch.func.jvp, within which generators can be neither read nor put back.
        with autodiff.dual_level():
            with warnings.catch_warnings():  # the first dual makes torch script its own rules
                warnings.simplefilter("ignore", DeprecationWarning)
                duals = {
                    name: autodiff.make_dual(parameters[name].detach(), each)
                    for name, each in direction.items()
                }
            return self.run({**parameters, **duals}, read)

    def hidden(self, batch: MicroBatch, batch_rows: Tensor | None, *, grad: bool) -> Tensor:
        """Make the training forward again, to be differentiated.

        Parameters
        ----------
        batch : MicroBatch
            With its training forward.
        batch_rows : Tensor of int, optional
            Make it of these rows of the batch alone.
        grad : bool
            Whether a backward will follow.

        Returns
        -------
        Tensor
            What enters the head, by attention kernels that can be differentiated in every way.
        """
        forward = batch.forward
        if forward is None:
            raise ProbeError("the micro-batch's training forward is gone")
        if batch_rows is not None:
            forward = forward.of_rows(batch_rows, batch.tokens.response_mask.shape[0])
        forward = dataclasses.replace(
            forward, call=dataclasses.replace(forward.call, attention=_MATH)
        )
        return again(forward, self._head.module, grad=grad, graph=True).hidden

    def logprobs(self, batch: MicroBatch, hidden: Tensor, rows: Tensor) -> Tensor:
        """Log-probs at each row's ids, the sampled token last, differentiable.

        Parameters
        ----------
        batch : MicroBatch
            Whose ids.
        hidden : Tensor, shape (row, hidden)
            What enters the head.
        rows : Tensor of int, shape (row,)
            Which rows of the micro-batch these are.

        Returns
        -------
        Tensor of float64, shape (row, K + 1)
            From float32 logits; without meaning at padding.
        """
        head = self._head
        weight, bias = head.weight, head.bias
        low_rank = head.low_rank(hidden)
        operands = (hidden, weight, *itertools.chain.from_iterable(low_rank))
        with exact_products(*operands, exclusive=head.exclusive) as dtype:
            logits = hidden.to(dtype) @ weight.to(dtype).t()
            for low, high in low_rank:
                logits = logits + low.to(dtype) @ high.to(dtype).t()
            if bias is not None:
                logits = logits + bias.to(dtype)
            logits = logits * head.scale
            if head.softcap is not None:
                logits = (logits / head.softcap).tanh() * head.softcap
            logits = (logits / self._temperature).double()
        ids = batch.ids(rows).to(hidden.device)
        return logits.gather(1, ids.clamp(min=0)) - logits.logsumexp(1, keepdim=True)


def reduced_divergence(
    batch: MicroBatch, divergence: str, rows: Tensor, logprobs: Tensor
) -> Tensor:
    """D of the top-K support at some rows, differentiable in the policy's log-probs.

    Parameters
    ----------
    batch : MicroBatch
        What the behavior policy said.
    divergence : {"kl", "tv"}
        Which D.
    rows : Tensor of int, shape (row,)
        Rows of the micro-batch.
    logprobs : Tensor of float64, shape (row, K + 1)
        The policy's, as `Elsewhere.logprobs` gives them.

    Returns
    -------
    Tensor of float64, shape (row,)
        What the dump's D is, from these log-probs.
    """
    given, at = batch.rows, rows.cpu().numpy()

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(given[name][at]).to(logprobs.device, dtype)

    support = topk_support(
        tensor("topk_ids", torch.int64),
        tensor("topk_behavior_logprobs", torch.float64),
        logprobs[:, :-1],
        tensor("token_id", torch.int64),
        tensor("behavior_logprob", torch.float64),
        logprobs[:, -1],
        vocab_size=batch.vocab_size,
        check=False,
    )
    found: Tensor = DIVERGENCES[divergence].value(support)
    return found


def moved(parameters: Parameters, direction: Parameters, by: float) -> dict[str, Tensor]:
    """Parameters + by · direction; those that the direction does not name as they are.

    They want gradients, as the model's own do: that may decide which kernels run.
    """
    with torch.no_grad():
        found = {
            name: torch.add(value, direction[name], alpha=by)
            if name in direction
            else value.detach()
            for name, value in parameters.items()
        }
    return {name: each.requires_grad_(each.is_floating_point()) for name, each in found.items()}


def length(direction: Parameters) -> float:
    """Euclidean length of a direction."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in direction.values()))


def inner(first: tuple[Tensor | None, ...], second: tuple[Tensor | None, ...]) -> float:
    """Inner product of two gradients; what is None is 0."""
    return sum(
        float((a * b).sum(dtype=torch.float64))
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None
    )


class _Within(nn.Module):
    """Calls a function: what `functional_call` swaps is swapped while it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call it."""
        return function()
