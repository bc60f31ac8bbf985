"""The behavior policy read from the trained model itself, at the time of generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltad.probes.behavior import ResponseTokens
from deltad.probes.errors import ProbeError
from deltad.probes.forward import Forward
from deltad.probes.head import Head
from deltad.probes.microbatch import MicroBatch
from deltad.probes.random_state import RandomState
from deltad.probes.readout import exact_products
from deltad.probes.replay import own_buffers
from deltad.probes.unwrap import unwrap_model
from deltad.probes.watch import Watcher

from .batch import joined_ids, loss_mask

_LOGITS_AT_ONCE: Final = 1 << 25  # 128 MB in float32

Score = Callable[..., tuple[Any, ...]]
"""`GRPOTrainer._get_per_token_logps_and_entropies`, bound."""


class PolicyAsBehavior:
    """Reads μ of a micro-batch with the weights as they are now.

    The forward is the trainer's own, in the very shapes and kernels in which the micro-batch
    will be trained on, so that a policy that has not moved since gives the same bits: then D is
    exactly 0. Dropout is off: it is the policy's and not one draw of a thinned network's.

    Parameters
    ----------
    model : nn.Module
        The trainer's, unwrapped.
    head : Head
        Of the model.
    score : callable
        The trainer's function that makes the forward.
    surroundings : callable
        Gives the context in which the trainer computes its loss (autocast).
    top_k : int
        K.
    temperature, token_chunk, vocab_chunk
        As the probe reads.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head,
        score: Score,
        surroundings: Callable[[], AbstractContextManager[Any]],
        *,
        top_k: int,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
    ) -> None:
        self._model = model
        self._head = head
        self._score = score
        self._surroundings = surroundings
        self._top_k = top_k
        self._reading: dict[str, Any] = {
            "temperature": temperature,
            "token_chunk": token_chunk,
            "vocab_chunk": vocab_chunk,
        }

    def read(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read one micro-batch.

        Parameters
        ----------
        inputs : mapping
            As TRL computes its loss of.

        Returns
        -------
        mask : Tensor of bool, shape (B, T)
            Which tokens were read.
        logprobs : Tensor of float64, shape (row,)
        topk_ids : Tensor of int, shape (row, K)
        topk_logprobs : Tensor of float64, shape (row, K)
        """
        mask = loss_mask(inputs)
        batch = MicroBatch(_unscored(inputs, mask))
        if not batch.size:
            empty = torch.zeros(0, self._top_k, dtype=torch.float64, device=mask.device)
            return mask, empty[:, 0], empty.long(), empty
        forward = self._forward(inputs)
        batch.receive(forward, self._head.vocab_size)
        if forward.hidden is None:
            raise ProbeError(
                "the hidden states of a compiled model cannot be seen: do not compile the model "
                "that is probed"
            )
        hidden = batch.select(forward.hidden)
        rows = torch.arange(batch.size)
        sampled = batch.ids(rows)[:, -1:].to(hidden.device)
        best = self._best(hidden)
        read = self._head.read(hidden, torch.cat([best, sampled], 1), **self._reading).logprobs
        # The tiles round in their own way: what was almost equal may have changed places.
        values, order = read[:, :-1].sort(dim=1, descending=True, stable=True)
        ids = best.gather(1, order)
        missing = self._top_k - ids.shape[1]
        return (
            mask,
            read[:, -1].to(mask.device),
            nn.functional.pad(ids, (0, missing), value=-1).to(mask.device),
            nn.functional.pad(values, (0, missing), value=torch.nan).to(mask.device),
        )

    def _forward(self, inputs: Mapping[str, Any]) -> Forward:
        """Make the trainer's forward; nothing of it stays."""
        seen: list[Forward] = []
        outer, model = unwrap_model(self._model)
        watcher = Watcher(
            outer, model, self._head.module, wanted=lambda: not seen, seen=seen.append
        )
        devices = {tensor.device for tensor in model.parameters()}
        with ExitStack() as stack:
            stack.callback(RandomState.capture(devices).restore)
            stack.enter_context(own_buffers(model))
            stack.callback(_modes(model))
            stack.callback(watcher.remove)
            stack.enter_context(self._surroundings())
            # With gradients on, as in training: that decides between kernels.
            stack.enter_context(torch.enable_grad())
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda packed: packed)
            )
            watcher.install()
            self._score(
                self._model,
                joined_ids(inputs),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].shape[1],
            )
        return seen[0]

    @torch.no_grad()
    def _best(self, hidden: Tensor) -> Tensor:
        """Ids of the K largest logits, shape (row, K) or all ids where there are fewer."""
        weight, bias = self._head.weight, self._head.bias
        width = min(self._top_k, self._head.vocab_size)
        found = []
        with exact_products(hidden, weight, exclusive=self._head.exclusive) as dtype:
            for part in torch.split(hidden, max(1, _LOGITS_AT_ONCE // self._head.vocab_size)):
                logits = nn.functional.linear(
                    part.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
                )
                for inner, outer in self._head.low_rank(part):
                    logits += nn.functional.linear(inner.to(dtype), outer.to(dtype))
                # Softcap and temperature keep the order.
                found.append((logits * self._head.scale).topk(width, dim=1).indices)
        return torch.cat(found)


def _unscored(inputs: Mapping[str, Any], mask: Tensor) -> ResponseTokens:
    """Which tokens are meant, of which nothing is known yet."""
    ids = joined_ids(inputs)
    prompt = ids.shape[1] - mask.shape[1]
    nothing = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
    numbers = torch.arange(ids.shape[0], device=ids.device)
    return ResponseTokens(
        response_mask=nn.functional.pad(mask, (prompt, 0)),
        advantages=nothing[:, 0],
        behavior_logprobs=nothing,
        topk_ids=torch.full((*ids.shape, 1), -1, device=ids.device),
        topk_logprobs=nothing[..., None],
        sequence=numbers,
        group=numbers,
        input_ids=ids,
    )


def _modes(model: nn.Module) -> Callable[[], None]:
    """Turn dropout off; the function returned puts every module's mode back."""
    before = [(part, part.training) for part in model.modules()]
    model.eval()

    def restore() -> None:
        for part, training in before:
            part.training = training

    return restore
