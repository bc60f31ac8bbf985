"""Both policies at the behaviour policy's top-K ids, laid out as a trainer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

SUPPORTS: Final = ("union", "replaced-last")
"""What becomes of a sampled token outside the top-K: a slot of its own, or the K-th's."""


@dataclass(frozen=True)
class TopKLogprobs:
    """μ and π at the behaviour policy's top-K ids, a row a response.

    Attributes
    ----------
    token_ids : Tensor of int, shape (batch, token)
        Sampled token k.
    topk_ids : Tensor of int, shape (batch, token, topk)
        The behaviour policy's top-K ids in rank order, distinct; −1 pads. A token whose ids are
        all −1 is judged on the support {k, rest}.
    behavior, policy : Tensor, shape (batch, token, topk)
        log μ and log π at those ids, in nats; never read where the id is −1. No gradient flows
        into either.
    vocab_size : int
        n of the model's config, not a logits shape (padding, shards).
    collision : Tensor, shape (batch, token), optional
        Σ_j π_j² over the whole vocabulary, for the exact tail.
    support : {"union", "replaced-last"}
        "union" (the paper's): S is the top-K and the sampled token. "replaced-last" (TRL's DPPO):
        a sampled token that is not listed takes the place of the last entry. Lists that an engine
        already delivered so are right under both.

    Raises
    ------
    ValueError
        Shapes that do not fit each other, a vocabulary without ids, or an unknown support.
    """

    token_ids: Tensor
    topk_ids: Tensor
    behavior: Tensor
    policy: Tensor
    vocab_size: int
    collision: Tensor | None = None
    support: Literal["union", "replaced-last"] = "union"

    def __post_init__(self) -> None:
        if self.topk_ids.ndim != 3:
            raise ValueError(
                "`topk_ids` must be of shape (batch, token, topk), got "
                f"{tuple(self.topk_ids.shape)}"
            )
        for name, value, expected in (
            ("token_ids", self.token_ids, self.topk_ids.shape[:2]),
            ("behavior", self.behavior, self.topk_ids.shape),
            ("policy", self.policy, self.topk_ids.shape),
            ("collision", self.collision, self.topk_ids.shape[:2]),
        ):
            if value is not None and value.shape != expected:
                raise ValueError(
                    f"`{name}` must be of shape {tuple(expected)} to go with `topk_ids`, got "
                    f"{tuple(value.shape)}"
                )
        for name, ids in (("token_ids", self.token_ids), ("topk_ids", self.topk_ids)):
            if ids.is_floating_point() or ids.dtype == torch.bool:
                raise ValueError(f"`{name}` must be integers, got {ids.dtype}")
        if self.vocab_size < 1:
            raise ValueError(f"`vocab_size` must be positive, got {self.vocab_size}")
        if self.support not in SUPPORTS:
            raise ValueError(
                f"`support` must be one of {', '.join(SUPPORTS)}, got {self.support!r}"
            )

    def listed_ids(self) -> Tensor:
        """The ids that S takes from the list: as given, or without the replaced last one."""
        if self.support == "union" or self.topk_ids.shape[-1] == 0:
            return self.topk_ids
        listed = (self.topk_ids == self.token_ids[..., None]).any(dim=-1)
        last = torch.where(listed, self.topk_ids[..., -1], torch.full_like(self.token_ids, -1))
        return torch.cat([self.topk_ids[..., :-1], last[..., None]], dim=-1)
