"""From responses and a trainer's layout to what the probe expects of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltad.probes.behavior import ResponseTokens

from .errors import EngineError
from .response import EngineResponse

AT_TEMPERATURE: Final = ("tempered", "processed")
"""Modes whose log-probs are at the sampling temperature, whatever it was."""


def response_tokens(
    responses: Sequence[EngineResponse],
    *,
    response_mask: Tensor,
    input_ids: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    group: Tensor,
    top_k: int | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
) -> ResponseTokens:
    """Lay out what engines reported as the trainer lays out its tokens.

    Parameters
    ----------
    responses
        In the order of the rows; where several are packed into a row, in the order in which their
        numbers in `sequence` first appear there. A response's tokens are the True positions of
        its row (or number), gaps such as tool results left out.
    response_mask : Tensor of bool, shape (B, L)
        True at sampled tokens.
    input_ids : Tensor of int, shape (B, L)
        What the training forward is fed; checked against the responses' ids wherever these are
        known.
    advantages : Tensor, shape (B,) or (B, L)
        Â.
    sequence : Tensor of int, shape (B,) or (B, L)
        Response, unique within the step; (B, L) where several are packed into a row.
    group : Tensor of int, shape (B,) or (B, L)
        Prompt.
    top_k
        K of the result. Shorter lists are padded with −1, longer ones cut
        (`EngineResponse.cut`). By default the longest list; at least 1.
    missing
        What to do with sampled tokens without a log-prob: `refuse`, or `drop` them from the mask
        (`shared_metadata(responses)["missing"]["logprob"]` counts them).

    Returns
    -------
    ResponseTokens
        On the device of `response_mask`; log-probs are float32.

    Raises
    ------
    EngineError
        Another number of responses, tokens or ids than the layout has; a missing log-prob;
        log-probs that are not at the sampling temperature, or not known to be.

    Examples
    --------
    >>> import numpy as np, torch
    >>> r = EngineResponse("vllm", [7], np.log([0.5]), [[7]], np.log([[0.5]]), mode="processed")
    >>> tokens = response_tokens(
    ...     [r], response_mask=torch.tensor([[False, True]]), input_ids=torch.tensor([[3, 7]]),
    ...     advantages=torch.ones(1), sequence=torch.tensor([0]), group=torch.tensor([0]), top_k=2,
    ... )
    >>> tokens.topk_ids[0, 1].tolist(), round(tokens.behavior_logprobs[0, 1].item(), 4)
    ([7, -1], -0.6931)
    """
    if missing not in ("refuse", "drop"):
        raise EngineError("packing", f"`missing` must be 'refuse' or 'drop', got {missing!r}")
    if top_k is not None and top_k < 1:
        raise EngineError("packing", f"`top_k` must be at least 1, got {top_k}")
    for index, response in enumerate(responses):
        _at_temperature(response, index)
    mask = _numpy(response_mask)
    given = _numpy(input_ids)
    if mask.ndim != 2 or mask.dtype != np.bool_ or given.shape != mask.shape:
        raise EngineError(
            "packing",
            "`response_mask` must be bool of shape (batch, length) and `input_ids` of the same "
            f"shape, got {mask.dtype} of {mask.shape} and {given.shape}",
        )
    places = _places(mask, _numpy(sequence))
    if len(places) != len(responses):
        raise EngineError(
            "packing",
            f"the layout holds {len(places)} responses, got {len(responses)} of engines",
        )
    listed = max((r.listed for r in responses), default=1) if top_k is None else top_k
    width = max(listed, 1)
    logprobs = np.zeros(mask.shape, np.float32)
    topk_ids = np.full((*mask.shape, width), -1, np.int64)
    topk_logprobs = np.full((*mask.shape, width), np.nan, np.float32)
    for index, (response, (row, columns)) in enumerate(zip(responses, places, strict=True)):
        _aligned(response, index, row, given[row, columns])
        absent = np.isnan(response.logprobs)
        if absent.any():
            if missing == "refuse":
                _refuse_missing(response, index, absent)
            mask[row, columns[absent]] = False
        cut = response.cut(width)
        logprobs[row, columns] = np.where(absent, 0.0, response.logprobs)
        topk_ids[row, columns, : cut.listed] = cut.topk_ids
        topk_logprobs[row, columns, : cut.listed] = cut.topk_logprobs
    device = response_mask.device
    return ResponseTokens(
        response_mask=torch.from_numpy(mask).to(device),
        advantages=advantages,
        behavior_logprobs=torch.from_numpy(logprobs).to(device),
        topk_ids=torch.from_numpy(topk_ids).to(device),
        topk_logprobs=torch.from_numpy(topk_logprobs).to(device),
        sequence=sequence,
        group=group,
        input_ids=input_ids,
    )


def _numpy(tensor: Tensor) -> NDArray[Any]:
    """Copy to NumPy."""
    return tensor.detach().cpu().numpy().copy()


def _places(mask: NDArray[np.bool_], sequence: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
    """Row and columns of each response, in order."""
    if sequence.shape not in (mask.shape[:1], mask.shape):
        raise EngineError(
            "packing",
            f"`sequence` must have shape {mask.shape[:1]} or {mask.shape}, got {sequence.shape}",
        )
    if sequence.ndim == 1:
        return [(row, np.flatnonzero(mask[row])) for row in range(len(mask))]
    places = []
    for row in range(len(mask)):
        numbers = sequence[row][mask[row]]
        for number in dict.fromkeys(numbers.tolist()):
            places.append((row, np.flatnonzero(mask[row] & (sequence[row] == number))))
    return places


def _at_temperature(response: EngineResponse, index: int) -> None:
    """Refuse log-probs of another distribution than the tokens were sampled from."""
    if response.mode in AT_TEMPERATURE or response.temperature == 1.0:
        return
    temperature = "not known" if response.temperature is None else f"{response.temperature:g}"
    raise EngineError(
        response.engine,
        "log-probs must be at the sampling temperature, but their mode is "
        f"'{response.mode}' and the temperature is {temperature}: tell the reader "
        "(`mode=`, `temperature=`), or have the engine return processed log-probs "
        "(vLLM: logprobs_mode='processed_logprobs')",
        request=response.request or str(index),
    )


def _aligned(response: EngineResponse, index: int, row: int, expected: NDArray[Any]) -> None:
    """The trainer's tokens are the engine's."""
    name = response.request or str(index)
    if len(response) != len(expected):
        raise EngineError(
            response.engine,
            f"row {row} has {len(expected)} response tokens, the response has {len(response)}: "
            "cut both alike, or correct `response_mask`",
            request=name,
        )
    differs = (response.token_ids >= 0) & (response.token_ids != expected)
    if differs.any():
        position = int(differs.argmax())
        raise EngineError(
            response.engine,
            f"the engine sampled token {response.token_ids[position]}, but `input_ids` holds "
            f"{expected[position]} in row {row}: is the text tokenised anew, or the order of the "
            "responses another?",
            request=name,
            position=position,
        )


def _refuse_missing(response: EngineResponse, index: int, absent: NDArray[np.bool_]) -> None:
    """Name the first sampled token without a log-prob."""
    position = int(absent.argmax())
    reason = next(
        gap.reason
        for gap in response.missing
        if gap.field == "logprob" and gap.position in (None, position)
    )
    raise EngineError(
        response.engine,
        f"the sampled token has no log-prob ({reason}; {int(absent.sum())} of {len(absent)} "
        "tokens): missing='drop' leaves such tokens out of the mask",
        request=response.request or str(index),
        position=position,
    )
