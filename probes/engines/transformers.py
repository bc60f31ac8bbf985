"""What `generate` of transformers returns: logits or scores of the whole vocabulary a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .assemble import Sampling, brief, field_of
from .errors import EngineError, formed
from .logits import DEFAULT_TOP_K, as_array, response_from_logits
from .response import EngineResponse

_ENGINE = "transformers"


@formed(_ENGINE)
def read_transformers(
    output: Any,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    listed: int = DEFAULT_TOP_K,
) -> list[EngineResponse]:
    """Read what `generate(…, return_dict_in_generate=True, output_logits=True)` returned.

    With `output_logits` log-probs are taken here, at the temperature where it is given (mode
    `tempered`), else as they are (`raw`). With `output_scores` alone they are `processed`: all
    processors and truncation are in them. `output_logits` is read where both are there.

    Parameters
    ----------
    output
        A `GenerateDecoderOnlyOutput`, or a mapping with `sequences` of shape (batch, length) and
        `logits` or `scores`, a sequence a step of shape (batch, vocab).
    temperature, top_p, top_k, min_p
        Sampling parameters; the output does not say.
    eos_token_id
        End-of-sequence ids: what follows the first of them in a row is padding and left out.
        None where every row is a response to its end.
    listed
        K.

    Returns
    -------
    list of EngineResponse
        One a row; `prompt_ids` are the ids before, with whatever padding stands there.

    Raises
    ------
    EngineError
        What does not have this form, or comes from beam search, whose scores belong to other
        rows.
    """
    logits, scores = field_of(output, "logits"), field_of(output, "scores")
    steps = logits if logits is not None else scores
    sequences = field_of(output, "sequences")
    if sequences is None or steps is None:
        raise EngineError(
            _ENGINE,
            "the output must have `sequences` and `logits` or `scores`, got "
            f"{brief(output)}: call generate(…, return_dict_in_generate=True, output_logits=True)",
        )
    if field_of(output, "beam_indices") is not None:
        raise EngineError(_ENGINE, "beam search does not sample: its rows are no behavior policy")
    ids = as_array(sequences)
    count = len(steps)
    if ids.ndim != 2 or ids.shape[1] < count:
        raise EngineError(
            _ENGINE,
            f"`sequences` must have shape (batch, prompt + {count} steps), got {ids.shape}",
        )
    arrays = [as_array(step) for step in steps]
    for position, step in enumerate(arrays):
        if step.ndim != 2 or len(step) != len(ids) or step.shape != arrays[0].shape:
            raise EngineError(
                _ENGINE, f"a step must have shape ({len(ids)}, vocab), got {step.shape}",
                position=position,
            )  # fmt: skip
    tempered = logits is not None and temperature is not None and temperature > 0
    sampling = Sampling(
        mode="processed" if logits is None else "tempered" if tempered else "raw",
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
    )
    ends = [] if eos_token_id is None else np.atleast_1d(np.asarray(eos_token_id)).tolist()
    prompt = ids.shape[1] - count
    responses = []
    for row, line in enumerate(ids):
        generated = line[prompt:]
        ended = np.flatnonzero(np.isin(generated, ends))
        length = int(ended[0]) + 1 if len(ended) else count
        vocab = arrays[0].shape[1] if arrays else 0
        values = np.array([step[row] for step in arrays[:length]]).reshape(length, vocab)
        responses.append(
            response_from_logits(
                _ENGINE,
                values,
                generated[:length],
                sampling=sampling,
                listed=listed,
                divide_by=temperature if tempered and temperature else 1.0,
                prompt_ids=line[:prompt],
                request=str(row),
            )
        )
    return responses
