"""CTranslate2's `GenerationResult`: raw logits of the whole vocabulary a step, prompt steps too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .assemble import Sampling, brief, field_of
from .errors import EngineError, formed
from .logits import DEFAULT_TOP_K, as_array, response_from_logits
from .response import EngineResponse

_ENGINE = "ctranslate2"


@formed(_ENGINE)
def read_ctranslate2(
    results: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    include_prompt: bool = True,
    listed: int = DEFAULT_TOP_K,
) -> list[EngineResponse]:
    """Read what `Generator.generate_batch(…, return_logits_vocab=True)` returned.

    The logits begin with the prompt's tokens that the decoder was forced to take: all but the
    first where the prompt is included in the result, else those beyond the batch's shortest
    prompt. One step more is the end token's, where `return_end_token` was not set: it is left
    out, as its id is.

    Parameters
    ----------
    results
        One `GenerationResult` (or mapping) a prompt, of one call that was not split
        (`max_batch_size=0`).
    prompts
        Their token ids.
    temperature, top_p, top_k
        `sampling_temperature`, `sampling_topp`, `sampling_topk`. CTranslate2 returns logits
        before the temperature; they are divided by it here where it is given (mode `tempered`).
    include_prompt
        What `include_prompt_in_result` was.
    listed
        K.

    Returns
    -------
    list of EngineResponse
        One a hypothesis, in the order of the results.

    Raises
    ------
    EngineError
        What does not have this form; another number of steps than tokens, prompt and end explain.
    """
    if len(results) != len(prompts):
        raise EngineError(
            _ENGINE, f"there must be one result a prompt, {len(prompts)}, got {len(results)}"
        )
    tempered = temperature is not None and temperature > 0
    sampling = Sampling(
        mode="tempered" if tempered else "raw", temperature=temperature, top_p=top_p, top_k=top_k
    )
    shortest = min(map(len, prompts), default=0)
    responses = []
    for index, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        sequences, logits = field_of(result, "sequences_ids"), field_of(result, "logits")
        if not sequences or not logits or len(sequences) != len(logits):
            raise EngineError(
                _ENGINE,
                "a result must have `sequences_ids` and as many `logits`, got "
                f"{brief(sequences)} and {len(logits or ())}: set return_logits_vocab=True",
                request=str(index),
            )
        forced = len(prompt) - (1 if include_prompt else shortest)
        several = len(sequences) > 1
        for number, (ids, steps) in enumerate(zip(sequences, logits, strict=True)):
            name = f"{index}, hypothesis {number}" if several else str(index)
            tokens = _response(list(ids), list(prompt), name, include_prompt=include_prompt)
            if len(steps) - forced - len(tokens) not in (0, 1):
                raise EngineError(
                    _ENGINE,
                    f"there must be {forced} steps of the prompt, {len(tokens)} of the response "
                    f"and at most one of its end, got {len(steps)}: was the call split, or "
                    "`include_prompt` another?",
                    request=name,
                )
            arrays = [as_array(step).ravel() for step in steps[forced : forced + len(tokens)]]
            responses.append(
                response_from_logits(
                    _ENGINE,
                    np.array(arrays).reshape(len(tokens), -1 if tokens else 0),
                    tokens,
                    sampling=sampling,
                    divide_by=temperature if tempered and temperature else 1.0,
                    listed=listed,
                    prompt_ids=prompt,
                    request=name,
                )
            )
    return responses


def _response(ids: list[int], prompt: list[int], name: str, *, include_prompt: bool) -> list[int]:
    """The ids after the prompt."""
    if not include_prompt:
        return ids
    if ids[: len(prompt)] != prompt:
        raise EngineError(
            _ENGINE,
            f"the result must begin with its prompt {brief(prompt)}, got {brief(ids)}: was it "
            "made with include_prompt_in_result=False?",
            request=name,
        )
    return ids[len(prompt) :]
