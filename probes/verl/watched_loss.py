"""Stands around verl's loss while an engine trains: top-K in, keep masks out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltad.probes.errors import ProbeError

from .columns import Columns, Layout, read_logits, unpack
from .fields import ROW, TOPK_IDS, TOPK_LOGPROBS, is_distillation, padded, responses_of
from .policy_losses import LOSSES, TopKFields, offer_topk


@dataclass
class Kept:
    """Which tokens' gradients took part in the update, gathered over its micro-batches.

    Attributes
    ----------
    keep : Tensor of bool, shape (response, token)
        Of the rank's batch; False until a micro-batch says otherwise.
    seen : Tensor of bool, shape (response,)
        Responses whose loss was computed.
    """

    keep: Tensor
    seen: Tensor

    @classmethod
    def none_of(cls, mask: Tensor) -> Kept:
        """Before the first micro-batch."""
        return cls(torch.zeros_like(mask), torch.zeros(mask.shape[0], dtype=torch.bool))

    def take(self, rows: Tensor, keep: Tensor) -> None:
        """Take what one micro-batch says of its responses."""
        self.keep[rows, : keep.shape[1]] = keep
        self.seen[rows] = True


class WatchedLoss:
    """What an engine is given in place of its loss function, for one optimizer step.

    Parameters
    ----------
    loss_function : callable
        verl's: a partial of `ppo_loss` that holds the actor's config.
    layout : Layout
        Of the engine.
    vocab_size : int
        n of the model's config.
    kept : Kept, optional
        Filled on the way.
    """

    def __init__(
        self,
        loss_function: Callable[..., Any],
        *,
        layout: Layout,
        vocab_size: int,
        kept: Kept | None,
    ) -> None:
        self._inner = loss_function
        self._layout = layout
        self._vocab_size = vocab_size
        self._kept = kept
        self.loss_mode = loss_mode_of(loss_function)

    @property
    def wants_topk(self) -> bool:
        """Whether the policy loss judges by both policies at μ's top-K."""
        return self.loss_mode in LOSSES and LOSSES[self.loss_mode].wants_topk

    def __call__(self, *args: Any, student_logits: Tensor | None = None, **kwargs: Any) -> Any:
        """Answer the engine: columns for its logits, else the loss."""
        if student_logits is not None:
            return self._on_logits(student_logits, **kwargs)
        model_output, data = kwargs["model_output"], kwargs["data"]
        if self._kept is not None:
            model_output = self._watch_gradient(model_output, data)
        topk = self._topk(model_output, data) if self.wants_topk else None
        with offer_topk(topk):
            return self._inner(*args, **{**kwargs, "model_output": model_output})

    def _on_logits(self, logits: Tensor, *, data: Any, **options: Any) -> Columns:
        """The engine asks what is to be made of its logits."""
        found: Columns = {}
        if is_distillation(data) and not self.wants_topk:
            found = self._inner(student_logits=logits, data=data, **options)
        if self.wants_topk:
            found = read_logits(logits.detach(), data, self._layout, vocab_size=self._vocab_size)
        return found

    def _topk(self, model_output: Any, data: Any) -> TopKFields:
        """Both policies at μ's top-K, shape (response, token, topk)."""
        found = unpack(model_output, data)
        if found.topk is None:
            raise ProbeError("the engine's output lacks the policy at μ's top-K")
        return TopKFields(
            token_ids=padded(data["responses"]).long(),
            topk_ids=responses_of(data[TOPK_IDS], data).long(),
            behavior=responses_of(data[TOPK_LOGPROBS], data),
            policy=found.topk,
            collision=found.collision,
            vocab_size=self._vocab_size,
        )

    def _watch_gradient(self, model_output: Any, data: Any) -> Any:
        """See at the log-probs of which tokens the loss pulls; nothing is changed."""
        logprobs = model_output["log_probs"]
        values = logprobs.values() if logprobs.is_nested else logprobs
        advantages = padded(data["advantages"])
        rows, kept = data[ROW].cpu(), self._kept

        def take(gradient: Tensor) -> None:
            # A token of no advantage has no gradient, masked or not.
            keep = (responses_of(gradient, data) != 0) | (advantages == 0)
            if kept is not None:
                kept.take(rows, keep.cpu())

        if values.requires_grad:
            values.register_hook(take)
        if logprobs.is_nested:
            logprobs = torch.nested.nested_tensor_from_jagged(values, logprobs.offsets())
        return {**model_output, "log_probs": logprobs}


def loss_mode_of(loss_function: Any) -> str:
    """Name of the policy loss in the actor's config; empty where there is none."""
    config = getattr(loss_function, "keywords", {}).get("config")
    policy_loss = getattr(config, "policy_loss", None)
    return "" if policy_loss is None else str(policy_loss.get("loss_mode", "vanilla"))


def config_of(loss_function: Any) -> Any:
    """The actor's config, or None."""
    return getattr(loss_function, "keywords", {}).get("config")
