"""What the behavior policy said of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .errors import ProbeError


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of one micro-batch and what the behavior policy said of them.

    Everything is aligned with `input_ids` (batch B, length L): entry (b, j) is about the token
    `input_ids[b, j]`, whose distribution the policy gives at position j − 1. Values outside
    `response_mask` are never read. All log-probs are at the sampling temperature.

    Attributes
    ----------
    response_mask : Tensor of bool, shape (B, L)
        True at tokens that were sampled.
    advantages : Tensor, shape (B,) or (B, L)
        Â.
    behavior_logprobs : Tensor, shape (B, L)
        log μ of the sampled token, in nats.
    topk_ids : Tensor of int, shape (B, L, K)
        The behavior policy's top-K ids, rank order, distinct; −1 is padding.
    topk_logprobs : Tensor, shape (B, L, K)
        log μ at those ids, in nats; −∞ is allowed, padding is never read.
    sequence : Tensor of int, shape (B,) or (B, L)
        Response, unique within the step; (B, L) where several are packed into a row.
    group : Tensor of int, shape (B,) or (B, L)
        Prompt.
    keep : Tensor of bool, shape (B, L), optional
        Tokens whose gradient takes part in the update (`in_loss`); all where absent. What is
        known only after the forward can be set by `MicroBatch.keep`.
    input_ids : Tensor of int, shape (B, L), optional
        Where the training forward is not called with `input_ids`.
    at : {"token", "logits"}
        "logits" where entry (b, j) is about the token that the logits at position j predict, as
        under context parallelism, where a rank has a slice of the sequence and the token after
        its last position lies with another. `input_ids` (those tokens) and `positions` are then
        needed.
    positions : Tensor of int, shape (B, L), optional
        Place of each token in its response, from 0; counted along the rows where absent.
    full_logprobs : Tensor, shape (B, L, vocab), optional
        log μ of the whole vocabulary, in nats, where it is known: then the divergences over the
        whole vocabulary are recorded too.

    Raises
    ------
    ProbeError
        Shapes or types that do not fit; a response token at j = 0, which has no position
        before it.
    """

    response_mask: Tensor
    advantages: Tensor
    behavior_logprobs: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor
    sequence: Tensor
    group: Tensor
    keep: Tensor | None = None
    input_ids: Tensor | None = None
    full_logprobs: Tensor | None = None
    at: Literal["token", "logits"] = "token"
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        mask = self.response_mask
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ProbeError(
                "`response_mask` must be bool of shape (batch, length), got "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
        batch, length = mask.shape
        tokens, rows = (batch, length), (batch,)
        top_k = self.topk_ids.shape[-1] if self.topk_ids.ndim == 3 else 0
        full = self.full_logprobs
        vocab = full.shape[-1] if full is not None and full.ndim == 3 else 0
        shapes: dict[str, list[tuple[int, ...]]] = {
            "advantages": [rows, tokens],
            "behavior_logprobs": [tokens],
            "topk_ids": [(batch, length, max(top_k, 1))],
            "topk_logprobs": [(batch, length, max(top_k, 1))],
            "sequence": [rows, tokens],
            "group": [rows, tokens],
            "keep": [tokens],
            "input_ids": [tokens],
            "positions": [tokens],
            "full_logprobs": [(batch, length, max(vocab, 1))],
        }
        integer = {"topk_ids", "sequence", "group", "input_ids", "positions"}
        for name, allowed in shapes.items():
            value: Tensor | None = getattr(self, name)
            if value is None:
                continue
            if tuple(value.shape) not in allowed:
                raise ProbeError(
                    f"`{name}` must have shape {' or '.join(map(str, allowed))} to go with "
                    f"`response_mask`, got {tuple(value.shape)}"
                )
            kind = (
                "bool" if value.dtype == torch.bool
                else "floating point" if value.is_floating_point()
                else "integer"
            )  # fmt: skip
            wanted = (
                "bool" if name == "keep" else "integer" if name in integer else "floating point"
            )
            if kind != wanted:
                raise ProbeError(f"`{name}` must be {wanted}, got {value.dtype}")
        if self.at not in ("token", "logits"):
            raise ProbeError(f"`at` must be 'token' or 'logits', got {self.at!r}")
        if self.at == "logits":
            if self.input_ids is None or self.positions is None:
                raise ProbeError(
                    "with at='logits' give `input_ids`, the tokens that the logits predict, and "
                    "`positions`, their places in their responses"
                )
        elif bool(mask[:, 0].any()):
            row = int(mask[:, 0].nonzero()[0])
            raise ProbeError(
                f"`response_mask` is True at position 0 of row {row}: the first token has no "
                "position before it that could predict it"
            )

    @property
    def top_k(self) -> int:
        """K."""
        return self.topk_ids.shape[-1]

    @property
    def shift(self) -> int:
        """How far before an entry the logits stand that predict its token."""
        return 0 if self.at == "logits" else 1

    def where(self) -> tuple[Tensor, Tensor]:
        """Row b and position j of each response token, in the order of the rows recorded."""
        rows, positions = self.response_mask.nonzero(as_tuple=True)
        return rows, positions
