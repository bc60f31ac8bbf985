"""Which tokens a training forward is about."""

from __future__ import annotations

import torch
from torch import Tensor

from .behavior import ResponseTokens
from .errors import ProbeError
from .forward import Forward


def sampled_ids(tokens: ResponseTokens, forward: Forward) -> Tensor:
    """Find the ids that entries of `tokens` are about, and see that the forward is theirs.

    Parameters
    ----------
    tokens : ResponseTokens
        As announced.
    forward : Forward
        The one that came.

    Returns
    -------
    Tensor of int, shape (B, L)
        Of the whole batch, prompts included.

    Raises
    ------
    ProbeError
        There are none, or the forward was made of others.
    """
    shape = tuple(tokens.response_mask.shape)
    given = forward.call.argument("input_ids")
    sampled = given if tokens.shift and given is not None else tokens.input_ids
    if sampled is None:
        raise ProbeError(
            "the training forward was called without input_ids: give `input_ids` in ResponseTokens"
        )
    seen = sampled if given is None else given
    if tuple(seen.shape) != shape:
        raise ProbeError(
            f"the training forward got input_ids of shape {tuple(seen.shape)}, expected "
            f"{shape} as `response_mask`: is this the forward of these tokens?"
        )
    if (
        given is not None
        and tokens.shift
        and tokens.input_ids is not None
        and not torch.equal(given, tokens.input_ids.to(given.device))
    ):
        raise ProbeError("`input_ids` of ResponseTokens are not those of the forward")
    found: Tensor = sampled
    return found
