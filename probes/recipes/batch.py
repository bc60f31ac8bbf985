"""Minibatches of a rollout: padded, a common prefix split off, the behavior policy read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltad.probes.behavior import ResponseTokens
from deltad.probes.head import Head

from .rollout import Group, cache_argument, common_prefix, pad_left, prefix_cache

TOKEN_CHUNK = 512
VOCAB_CHUNK = 4096
"""Tiles of the readout; the probe must use the same, so that equal policies read equal."""


class SharedPrefix(nn.Module):
    """A causal language model called on what follows a prefix that all rows share.

    The prefix is computed once for the whole batch, within the same forward, so gradients and
    a forward made again see the weights as they are now.

    Parameters
    ----------
    inner
        A causal language model of transformers.
    """

    constant_arguments = ("prefix_ids",)
    """All rows have the same, for a forward that the probe cuts."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    @property
    def config(self) -> Any:
        """Config of the model."""
        return self.inner.config

    def get_output_embeddings(self) -> nn.Module:
        """Give the model's head."""
        head: nn.Module = self.inner.get_output_embeddings()
        return head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        prefix_ids: Tensor,
        logits_to_keep: int = 0,
    ) -> Any:
        """Call the model.

        Parameters
        ----------
        input_ids, position_ids
            What follows the prefix, shape (B, L).
        attention_mask
            Of prefix and rest, shape (B, prefix + L).
        prefix_ids
            Shape (prefix,); may be empty.
        logits_to_keep
            Positions at the end that logits are wanted for; 0 for all.

        Returns
        -------
        CausalLMOutput
            Logits of the rest.
        """
        cache: dict[str, Any] = {"use_cache": False}
        if len(prefix_ids):
            shared = prefix_cache(self.inner, prefix_ids, len(input_ids))
            cache = {"use_cache": True, cache_argument(self.inner): shared}
        return self.inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **cache,
        )


@dataclass(frozen=True)
class Minibatch:
    """The sequences of one optimizer step.

    Attributes
    ----------
    inputs
        Arguments of `SharedPrefix`.
    response_mask
        True at sampled tokens, shape (B, L), aligned with `input_ids`.
    advantages, sequence, group
        Shape (B,).
    """

    inputs: dict[str, Any]
    response_mask: Tensor
    advantages: Tensor
    sequence: Tensor
    group: Tensor

    @property
    def size(self) -> int:
        """Number of response tokens."""
        return int(self.response_mask.sum())

    def logits(self, output: Any) -> Tensor:
        """Logits that predict each response token, shape (token, vocab)."""
        rows, positions = self.response_mask.nonzero(as_tuple=True)
        left_out = self.response_mask.shape[1] - output.logits.shape[1]
        predicting: Tensor = output.logits[rows, positions - 1 - left_out]
        return predicting

    def sampled(self) -> Tensor:
        """Ids of the response tokens, shape (token,)."""
        ids: Tensor = self.inputs["input_ids"][self.response_mask]
        return ids


def split(groups: Sequence[Group], prompts: int, pad_id: int) -> Iterator[Minibatch]:
    """Cut a rollout into minibatches.

    Parameters
    ----------
    groups
        In order; group i and response j of it get the numbers i and i · responses + j.
    prompts
        Groups in a minibatch.
    pad_id
        Any id.

    Returns
    -------
    iterator of Minibatch
        Prompts end, and responses begin, at one column of a minibatch.
    """
    for start in range(0, len(groups), prompts):
        part = groups[start : start + prompts]
        rows = [
            (group.problem.prompt_ids, response, advantage)
            for group in part
            for response, advantage in zip(group.responses, group.advantages, strict=True)
        ]
        count = len(part[0].responses)
        shared = common_prefix([prompt for prompt, _, _ in rows])
        prompt_ids, prompt_present = pad_left([prompt[shared:] for prompt, _, _ in rows], pad_id)
        response_ids, response_present = (
            part.flip(1) for part in pad_left([response[::-1] for _, response, _ in rows], pad_id)
        )
        present = torch.cat(
            [torch.ones(len(rows), shared, dtype=torch.bool), prompt_present, response_present], 1
        )
        positions = (present.long().cumsum(1) - 1).clamp(min=0)
        yield Minibatch(
            inputs={
                "input_ids": torch.cat([prompt_ids, response_ids], 1),
                "attention_mask": present.long(),
                "position_ids": positions[:, shared:],
                "prefix_ids": torch.tensor(rows[0][0][:shared], dtype=torch.long),
                # From the last prompt token on: it predicts the first of the response.
                "logits_to_keep": response_ids.shape[1] + 1,
            },
            response_mask=torch.cat([torch.zeros_like(prompt_present), response_present], 1),
            advantages=torch.tensor([advantage for _, _, advantage in rows]),
            sequence=torch.arange(start * count, start * count + len(rows)),
            group=torch.arange(start, start + len(part)).repeat_interleave(count),
        )


def read_behavior(
    policy: SharedPrefix,
    minibatch: Minibatch,
    *,
    temperature: float,
    top_k: int,
    full: bool = False,
) -> ResponseTokens:
    """Let the present policy say, as behavior, what it gives to a minibatch's tokens.

    Parameters
    ----------
    policy
        With the behavior's weights.
    minibatch
        Read in the same shapes in which it will be trained on, so that a policy that has not
        moved gives the same bits.
    temperature, top_k, full
        As in `Recipe`.

    Returns
    -------
    ResponseTokens
        Log-probs in float64.
    """
    head = Head.of(policy)
    entered: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        entered.append(args[0].detach())

    handle = head.module.register_forward_pre_hook(look)
    try:
        # With gradients on, as in training: that decides between attention kernels.
        output = policy(**minibatch.inputs)
    finally:
        handle.remove()
    rows, positions = minibatch.response_mask.nonzero(as_tuple=True)
    left_out = minibatch.response_mask.shape[1] - entered[0].shape[1]
    hidden = entered[0][rows, positions - 1 - left_out]
    logits = minibatch.logits(output).detach().float() / temperature
    best = logits.topk(min(top_k, logits.shape[1]), dim=1).indices
    options: dict[str, Any] = {
        "temperature": temperature,
        "token_chunk": TOKEN_CHUNK,
        "vocab_chunk": VOCAB_CHUNK,
    }
    read = head.read(hidden, torch.cat([best, minibatch.sampled()[:, None]], 1), **options)
    mask = minibatch.response_mask
    ids = torch.full((*mask.shape, top_k), -1, dtype=torch.long)
    topk_logprobs = torch.full((*mask.shape, top_k), torch.nan, dtype=torch.float64)
    logprobs = torch.zeros(mask.shape, dtype=torch.float64)
    width = best.shape[1]
    ids[rows, positions, :width] = best
    topk_logprobs[rows, positions, :width] = read.logprobs[:, :-1]
    logprobs[rows, positions] = read.logprobs[:, -1]
    whole = None
    if full:
        vocab = torch.arange(head.vocab_size)
        whole = torch.zeros(*mask.shape, head.vocab_size, dtype=torch.float64)
        whole[rows, positions] = head.read(
            hidden, vocab.expand(len(hidden), -1), **options
        ).logprobs
    return ResponseTokens(
        response_mask=mask,
        advantages=minibatch.advantages,
        behavior_logprobs=logprobs,
        topk_ids=ids,
        topk_logprobs=topk_logprobs,
        sequence=minibatch.sequence,
        group=minibatch.group,
        full_logprobs=whole,
    )
