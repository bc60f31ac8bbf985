"""What a trainer has to score: the ids at which a dump needs the policy's log-probs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from .faults import Faults
from .files import Progress
from .importing import Source
from .join import TWICE
from .records import Lists


def scoring_requests(
    source: Source, *, progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """List, response by response, where the policy has to be asked.

    Parameters
    ----------
    source : Source
        The responses, with what the behavior policy said of them.
    progress : callable, optional
        Told the number of bytes read.

    Yields
    ------
    dict
        `step`, `sequence`, `prompt_ids` (None where the files have none), `token_id`: the whole
        response, and `ids`: for each token of it the ids at which log π is wanted beside the
        token itself, None where the token has no list.

    Raises
    ------
    OfflineError
        At the end, with every record that is not sound: the requests are not whole then.

    Notes
    -----
    The answer has a record a response, with `step` and `sequence` of the request, `logprob`
    (log π of every `token_id`, given all before it, at the sampling temperature, in nats),
    `topk_logprobs` (at `ids`) and, best, `collision` (Σ_j π_j² over the whole vocabulary) and
    `entropy`.
    """
    faults = Faults()
    seen = set()
    for record in source.records(faults, progress):
        if record.key in seen:
            faults.add(record.fault(TWICE))
            continue
        seen.add(record.key)
        columns = record.columns
        tokens = columns.get("token_id")
        if tokens is None:
            faults.add(record.fault("is missing", name="token_id"))
            continue
        place = columns.get("position")
        if place is not None and not np.array_equal(place, np.arange(len(tokens))):
            faults.add(
                record.fault(
                    "must be 0, 1, 2, … for a request: no policy can be asked without the tokens "
                    "between (those that were not sampled are told by `response_mask`)",
                    name="position",
                )
            )
            continue
        prompt = columns.get("prompt_ids")
        yield {
            "step": record.step,
            "sequence": record.sequence,
            "prompt_ids": None if prompt is None else prompt.tolist(),
            "token_id": tokens.tolist(),
            "ids": _ids(columns.get("topk_ids"), len(tokens)),
        }
    faults.check()


def write_requests(source: Source, sink: IO[bytes], *, progress: Progress | None = None) -> int:
    """Write requests as JSON lines; parameters and raises as `scoring_requests`.

    Returns
    -------
    int
        Responses.
    """
    count = 0
    for request in scoring_requests(source, progress=progress):
        sink.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        count += 1
    return count


def _ids(lists: Lists | None, tokens: int) -> list[list[int] | None]:
    """The ids of every token, without padding."""
    if lists is None:
        return [None] * tokens
    return [
        None if length < 0 else [each for each in row[:length] if each >= 0]
        for row, length in zip(lists.values.tolist(), lists.lengths.tolist(), strict=True)
    ]
