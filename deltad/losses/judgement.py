"""What a criterion or a weight says of every token of a batch, padding and gaps included."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from deltad._checks import LOGPROB_TOLERANCE, SupportError
from deltad.masks import Tokens
from deltad.support import Support, binary_support, topk_support

from .topk import TopKLogprobs

LOG_HALF: Final = math.log(0.5)
"""Stands in for log-probs that must not be read."""


@dataclass(frozen=True)
class Judged:
    """Tokens of one batch, flattened, with what must not be read replaced.

    Attributes
    ----------
    tokens : Tokens
        As criteria look at them; float64 where the device has it, so that a trainer decides as
        the analysis of its dump does.
    usable : Tensor of bool, shape (batch · token,)
        Response tokens of which every number is known.
    response : Tensor of bool, shape (batch · token,)
        The response mask.
    """

    tokens: Tokens
    usable: Tensor
    response: Tensor

    def divergence(self, name: str) -> Tensor:
        """D on the top-K support where there is one, else on {k, rest}; shape (batch · token,)."""
        if self.tokens.support is None:
            binary: Tensor = self.tokens.binary_divergence(name)
            return binary
        listed: Tensor = self.tokens.divergence(name)
        return listed

    @cached_property
    def positive(self) -> Tensor:
        """Â > 0, shape (batch · token,)."""
        positive: Tensor = self.tokens.advantage > 0
        return positive


def lay_out(
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    response: Tensor,
    *,
    topk: TopKLogprobs | None,
    full: Mapping[str, tuple[Tensor, Tensor]],
    drop_missing: bool,
    check: bool,
    sequence: Tensor | None = None,
    tolerance: float = LOGPROB_TOLERANCE,
) -> Judged:
    """Flatten a batch for the criteria; whatever lies outside the mask is replaced.

    Parameters
    ----------
    logprob, behavior_logprob, advantage, response
        Shape (batch, token).
    topk
        Both policies at the top-K ids.
    full
        Divergence and direction over the vocabulary by divergence name, each (batch, token).
    drop_missing
        Leave out response tokens for which the behaviour policy's numbers are NaN.
    check
        Refuse impossible numbers; waits for the device. Without it missing ones are left out.
    sequence
        Number of the response of each token, shape (batch, token); by default its row.
    tolerance
        Rounding that is let pass, as in `topk_support`.

    Raises
    ------
    SupportError
        An impossible number, with the response and position that hold it.
    """
    usable = response
    if drop_missing or not check:
        usable = usable & ~behavior_logprob.isnan()
        if topk is not None:
            usable = usable & ~((topk.topk_ids >= 0) & topk.behavior.isnan()).any(dim=-1)
    wide = torch.float32 if logprob.device.type == "mps" else torch.float64

    def flat(values: Tensor, instead: float) -> Tensor:
        """One value a token, replaced where it must not be read."""
        fill = torch.full((), instead, dtype=wide, device=logprob.device)
        return torch.where(usable, values.detach().to(wide), fill).reshape(-1)

    tokens = Tokens(
        advantage=flat(advantage, 0.0),
        behavior_logprob=flat(behavior_logprob, LOG_HALF),
        policy_logprob=flat(logprob, LOG_HALF),
        collision=None if topk is None or topk.collision is None else flat(topk.collision, 1.0),
        full={name: (flat(d, 0.0), flat(push, 0.0)) for name, (d, push) in full.items()},
        sequence=_rows(logprob) if sequence is None else sequence.reshape(-1),
    )
    try:
        if check:
            _check_possible(tokens)
        if topk is not None:
            support = _support(topk, usable, tokens, wide, check=check, tolerance=tolerance)
            tokens = dataclasses.replace(tokens, support=support)
        elif check:
            binary_support(tokens.behavior_logprob, tokens.policy_logprob, tolerance=tolerance)
    except SupportError as error:
        row, position = divmod(error.row, logprob.shape[1])
        raise SupportError(
            error.row, f"response {row} of the batch, its token {position}: {error.reason}"
        ) from None
    return Judged(tokens, usable.reshape(-1), response.reshape(-1))


def _rows(values: Tensor) -> Tensor:
    """The response of every token, shape (batch · token,)."""
    rows = torch.arange(values.shape[0], device=values.device)
    return rows[:, None].expand_as(values).reshape(-1)


def _support(
    topk: TopKLogprobs,
    usable: Tensor,
    tokens: Tokens,
    wide: torch.dtype,
    *,
    check: bool,
    tolerance: float,
) -> Support:
    """Both policies on S, a row a token; a token that must not be read has an S of itself."""
    return topk_support(
        torch.where(usable[..., None], topk.listed_ids(), -1).flatten(0, 1),
        topk.behavior.detach().to(wide).flatten(0, 1),
        topk.policy.detach().to(wide).flatten(0, 1),
        torch.where(usable, topk.token_ids, 0).reshape(-1),
        tokens.behavior_logprob,
        tokens.policy_logprob,
        vocab_size=topk.vocab_size,
        tolerance=tolerance,
        check=check,
    )


def _check_possible(tokens: Tokens) -> None:
    """Refuse a Σ π² outside of [0, 1] and a negative divergence."""
    _check_finite(tokens)
    columns = [("collision", tokens.collision, 1.0)]
    for name, (divergence, _) in tokens.full.items():
        columns.append((f"full {name} divergence", divergence, math.inf))
    for name, column, most in columns:
        if column is None:
            continue
        bad = (column < -LOGPROB_TOLERANCE) | (column > most + LOGPROB_TOLERANCE)
        if bool(bad.any()):
            row = int(bad.int().argmax())
            raise SupportError(
                row, f"{name} is {float(column[row]):g}, expected a number in [0, {most:g}]"
            )


def _check_finite(tokens: Tokens) -> None:
    """Refuse an advantage, a collision or a divergence that is no number."""
    columns = [("advantage", tokens.advantage), ("collision", tokens.collision)]
    for name, pair in tokens.full.items():
        columns += zip((f"full {name} divergence", f"full {name} direction"), pair, strict=True)
    for name, column in columns:
        if column is None or bool(column.isfinite().all()):
            continue
        row = int((~column.isfinite()).int().argmax())
        raise SupportError(row, f"{name} is {float(column[row])}, expected a finite number")
