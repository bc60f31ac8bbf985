"""One micro-batch of TRL and what the behavior policy said of its response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deltad.probes.behavior import ResponseTokens

ROW: Final = "deltad_row"
"""Key of a generation batch: a number of each completion, which TRL shuffles with the rest."""

KNOWN: Final = "deltad_behavior"
"""Key of a micro-batch: its `BehaviorRows`."""


@dataclass(frozen=True)
class BehaviorRows:
    """The behavior policy at the response tokens of one micro-batch (B completions of length T).

    Attributes
    ----------
    mask : Tensor of bool, shape (B, T)
        Completion tokens that are in the loss and that the behavior policy scored.
    logprobs : Tensor, shape (row,)
        log μ of the sampled tokens in the order of `mask.nonzero()`, in nats.
    topk_ids : Tensor of int, shape (row, K)
        Rank order, −1 is padding.
    topk_logprobs : Tensor, shape (row, K)
        log μ there, in nats; NaN at padding.
    sequence, group : Tensor of int, shape (B,)
        Number of the completion and of its prompt, each unique within the run.
    """

    mask: Tensor
    logprobs: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor
    sequence: Tensor
    group: Tensor

    def tokens(self, inputs: Mapping[str, Any]) -> ResponseTokens:
        """Lay everything out like the `input_ids` of the training forward.

        Parameters
        ----------
        inputs : mapping
            The micro-batch that TRL computes its loss of.

        Returns
        -------
        ResponseTokens
            Of shape (B, P + T), P being the length of the prompts.
        """
        prompt = inputs["prompt_ids"].shape[1]
        ids = joined_ids(inputs)
        b, t = self.mask.nonzero(as_tuple=True)
        where = (b, t + prompt)
        top_k = self.topk_ids.shape[1]
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        logprobs = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        topk_ids = torch.full((*ids.shape, top_k), -1, dtype=torch.int64, device=ids.device)
        topk_logprobs = torch.full(
            (*ids.shape, top_k), torch.nan, dtype=torch.float64, device=ids.device
        )
        mask[where] = True
        logprobs[where] = self.logprobs
        topk_ids[where] = self.topk_ids
        topk_logprobs[where] = self.topk_logprobs
        advantages = inputs["advantages"].detach()
        if advantages.ndim == 2:
            laid = torch.zeros(ids.shape, dtype=advantages.dtype, device=ids.device)
            laid[:, prompt:] = advantages
            advantages = laid
        return ResponseTokens(
            response_mask=mask,
            advantages=advantages,
            behavior_logprobs=logprobs,
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            sequence=self.sequence,
            group=self.group,
            input_ids=ids,
        )


def joined_ids(inputs: Mapping[str, Any]) -> Tensor:
    """Prompts and completions as the model gets them, shape (B, P + T)."""
    return torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Completion tokens that TRL's loss is over, bool of shape (B, T)."""
    mask: Tensor = inputs["completion_mask"].bool()
    tool = inputs.get("tool_mask")
    return mask if tool is None else mask & tool.bool()


def without_ours(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a micro-batch without the keys of this package."""
    return {name: value for name, value in inputs.items() if name not in (ROW, KNOWN)}
