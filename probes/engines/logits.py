"""From logits of the whole vocabulary to log-probs and a top-K."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .assemble import Sampling
from .errors import EngineError
from .missing import Missing
from .response import EngineResponse

DEFAULT_TOP_K: Final = 20
"""K of the paper, where the engine gives all of the vocabulary and none was asked for."""

_MASKED: Final = -1e30
"""Engines write −∞ or the lowest float32 for an id that must not be sampled."""


def as_array(value: Any) -> NDArray[Any]:
    """Make a NumPy array of a tensor, whatever its dtype and device, or of anything else."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
    return np.asarray(value)


def response_from_logits(
    engine: str,
    logits: ArrayLike,
    token_ids: ArrayLike,
    *,
    sampling: Sampling,
    divide_by: float = 1.0,
    listed: int = DEFAULT_TOP_K,
    prompt_ids: ArrayLike | None = None,
    request: str | None = None,
) -> EngineResponse:
    """Take the log-softmax in float64 and the K most probable ids.

    Parameters
    ----------
    engine
        Name of the engine.
    logits : array-like, shape (token, vocab)
        Of the positions that predicted the tokens; log-probs are logits too.
    token_ids : array-like of int, shape (token,)
        Sampled tokens.
    sampling
        What is known of the sampling.
    divide_by
        What the logits are divided by first, the temperature.
    listed
        K; ids of probability 0 are left out. Ties keep the order of ids.
    prompt_ids, request
        As in `EngineResponse`.

    Returns
    -------
    EngineResponse
        Its support is `union`.

    Raises
    ------
    EngineError
        Shapes that do not fit, NaN, a token outside the vocabulary, a distribution without ids.
    """
    values = np.asarray(logits, dtype=np.float64)
    tokens = np.asarray(token_ids)
    if tokens.size and tokens.dtype.kind not in "iu":
        raise EngineError(
            engine, f"token ids must be whole numbers, got {tokens.dtype}", request=request
        )
    tokens = tokens.astype(np.int64)

    def refuse(holds: bool, reason: str, position: int | None = None) -> None:
        if not holds:
            raise EngineError(engine, reason, request=request, position=position)

    refuse(
        values.ndim == 2 and tokens.shape == values.shape[:1],
        f"logits must have shape (token, vocab) for {len(tokens)} tokens, got {values.shape}",
    )
    refuse(listed >= 0, f"`listed` must not be negative, got {listed}")
    refuse(divide_by > 0, f"the temperature must be above 0 to divide by it, got {divide_by}")
    vocab = values.shape[1]
    for position, (token, row) in enumerate(zip(tokens, values, strict=True)):
        refuse(0 <= token < vocab, f"token {token} is not in [0, {vocab})", position)
        refuse(
            not (np.isnan(row) | (row == np.inf)).any(), "logits must not be NaN or +∞", position
        )
        refuse(bool((row > _MASKED).any()), "every id is masked in the logits", position)
    values = np.where(values > _MASKED, values, -np.inf) / divide_by
    shifted = values - values.max(axis=1, keepdims=True, initial=-np.inf)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :listed]
    topk = np.take_along_axis(logprobs, order, axis=1)
    alive = topk > -np.inf
    sampled = logprobs[np.arange(len(tokens)), tokens]
    missing = [
        Missing(int(position), "topk", "truncated", int(count), "-inf")
        for position, count in enumerate((~alive).sum(axis=1))
        if count
    ]
    missing += [
        Missing(int(position), "logprob", "minus-infinity", detail="-inf")
        for position in np.flatnonzero(sampled == -np.inf)
    ]
    return EngineResponse(
        engine,
        tokens,
        np.where(sampled > -np.inf, sampled, np.nan),
        np.where(alive, order, -1),
        np.where(alive, topk, np.nan),
        **sampling,
        missing=tuple(missing),
        prompt_ids=None if prompt_ids is None else np.asarray(prompt_ids, np.int64),
        request=request,
    )
