"""Rollouts as trainers keep them: samples of slime and its kin, batches of verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .assemble import Position, Sampling, assemble, brief
from .errors import EngineError, formed
from .logits import as_array
from .missing import Missing, Mode
from .response import EngineResponse


def read_rollout_dump(
    dump: Any,
    *,
    mode: Mode | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> list[EngineResponse]:
    """Read a rollout dump of slime or verl.

    slime (`--save-debug-rollout-data`, loaded by torch): a mapping with `samples`, each with
    `tokens`, `response_length`, `rollout_log_probs` and `loss_mask`. Miles, its kin, adds
    `rollout_topk_token_ids` and `rollout_topk_log_probs` of shape (response, K), −1 and −∞ where
    a slot is empty; without these K is 0.

    verl (a row of an agent loop, or a batch of padded rows): `prompts`, `responses`,
    `response_mask`, `rollout_log_probs`. Where the rollout server scored the sequence anew, its
    top-K stands in `teacher_ids` and `teacher_logprobs`, row j on the token after j; then the
    log-prob of a sampled token that is listed is its entry there, which is the one server's view
    in the other pass. verl's JSON lines (`rollout_data_dir`) hold texts alone and are refused.

    Tokens whose mask is 0 (of tools, padding) were not sampled and are left out.

    Parameters
    ----------
    dump
        The dump, one sample or row of it, or a sequence of them. Tensors may be on any device.
    mode
        By default `tempered` for slime (SGLang's) and `processed` for verl (its vLLM's), `raw`
        where lists come from scoring anew, since servers score a prompt before the temperature.
    temperature, top_p, top_k, min_p
        Sampling parameters; the dumps do not say.

    Returns
    -------
    list of EngineResponse
        One a sample, in the order of the dump.

    Raises
    ------
    EngineError
        What does not have this form, with sample and position.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    if isinstance(dump, Mapping) and "samples" in dump:
        dump = dump["samples"]
    items = list(dump) if isinstance(dump, Sequence) and not isinstance(dump, str) else [dump]
    responses: list[EngineResponse] = []
    for item in items:
        fields = item if isinstance(item, Mapping) else getattr(item, "__dict__", {})
        name = str(fields.get("index", len(responses)))
        if "response_length" in fields:
            with formed("slime", name):
                read = _slime(fields, name, sampling | Sampling(mode=mode or "tempered"))
            responses.append(read)
        elif "responses" in fields:
            anew = fields.get("teacher_ids") is not None
            chosen: Mode = mode or ("raw" if anew else "processed")
            with formed("verl", name):
                for row, part in enumerate(_verl_rows(fields, name)):
                    request = str(len(responses)) if row else name
                    responses.append(_verl(part, request, sampling | Sampling(mode=chosen)))
        else:
            raise EngineError(
                "rollout dump",
                "a sample must have `tokens` and `response_length` (slime) or `responses` (verl), "
                f"got {brief(sorted(fields) or item)}"
                + (": these are texts without log-probs" if "output" in fields else ""),
                request=name,
            )
    return responses


def _slime(fields: Mapping[str, Any], name: str, sampling: Sampling) -> EngineResponse:
    """One sample of slime."""
    engine = "slime"
    length = fields["response_length"]
    tokens = _column(engine, fields, "tokens", name)
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise EngineError(
            engine, f"`response_length` must lie in [0, {len(tokens)}], got {brief(length)}",
            request=name,
        )  # fmt: skip
    begin = len(tokens) - length
    mask = fields.get("loss_mask")
    kept = np.ones(length, bool) if mask is None else _mask(engine, mask, "loss_mask", name)
    ids, values = fields.get("rollout_topk_token_ids"), fields.get("rollout_topk_log_probs")
    return _response(
        engine, name, sampling,
        tokens=tokens[begin:],
        logprobs=fields.get("rollout_log_probs"),
        kept=kept,
        ids=ids,
        values=values,
        prompt=tokens[:begin],
    )  # fmt: skip


def _verl_rows(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Rows of a batch; one where the fields are a single row's."""
    keys = ("prompts", "responses", "response_mask", "rollout_log_probs", "teacher_ids",
            "teacher_logprobs", "attention_mask")  # fmt: skip
    arrays = {key: as_array(fields[key]) for key in keys if fields.get(key) is not None}
    for key in ("prompts", "responses", "response_mask"):
        if key not in arrays:
            raise EngineError("verl", f"a row must have `{key}`, got {brief(sorted(arrays))}",
                              request=name)  # fmt: skip
    if arrays["responses"].ndim not in (1, 2):
        raise EngineError(
            "verl", f"`responses` must be a list of ids or a batch of them, got shape "
            f"{arrays['responses'].shape}",
            request=name,
        )  # fmt: skip
    if arrays["responses"].ndim == 1:
        return [arrays]
    batch = len(arrays["responses"])
    uneven = {
        key: len(array) if array.ndim else None
        for key, array in arrays.items()
        if array.shape[:1] != (batch,)
    }
    if uneven:
        raise EngineError("verl", f"every field must have {batch} rows, got {uneven}",
                          request=name)  # fmt: skip
    return [{key: array[row] for key, array in arrays.items()} for row in range(batch)]


def _verl(arrays: Mapping[str, Any], name: str, sampling: Sampling) -> EngineResponse:
    """One row of verl."""
    engine = "verl"
    prompt, tokens = (_column(engine, arrays, key, name) for key in ("prompts", "responses"))
    ids, values = arrays.get("teacher_ids"), arrays.get("teacher_logprobs")
    for key, array in (("teacher_ids", ids), ("teacher_logprobs", values)):
        if array is not None and (array.ndim != 2 or len(array) != len(prompt) + len(tokens)):
            raise EngineError(
                engine,
                f"`{key}` must have shape ({len(prompt) + len(tokens)}, K), prompt and response, "
                f"got {array.shape}",
                request=name,
            )
    logprobs = arrays.get("rollout_log_probs")
    if ids is not None and values is not None:
        # Row j holds the distribution after token j, so the one of the next.
        after = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        ids, values = ids[after], values[after]
        if logprobs is not None and logprobs.shape == tokens.shape:
            hit = ids == tokens[:, None]
            entry = np.where(hit, values, 0.0).sum(axis=1)
            logprobs = np.where(hit.any(axis=1), entry, logprobs)
    present = arrays.get("attention_mask")
    if present is not None:
        present = _mask(engine, present, "attention_mask", name)
        if present.ndim != 1 or len(present) < len(prompt):
            raise EngineError(
                engine,
                f"`attention_mask` must cover the prompt's {len(prompt)} tokens, got shape "
                f"{present.shape}",
                request=name,
            )
    shown = prompt if present is None else prompt[present[: len(prompt)]]
    return _response(
        engine, name, sampling,
        tokens=tokens, logprobs=logprobs,
        kept=_mask(engine, arrays["response_mask"], "response_mask", name),
        ids=ids, values=values, prompt=shown,
    )  # fmt: skip


def _response(
    engine: str,
    name: str,
    sampling: Sampling,
    *,
    tokens: NDArray[Any],
    logprobs: Any,
    kept: NDArray[np.bool_],
    ids: Any,
    values: Any,
    prompt: NDArray[Any],
) -> EngineResponse:
    """Columns of one sample, of its sampled tokens only."""
    if kept.shape != tokens.shape:
        raise EngineError(
            engine, f"the mask must have shape {tokens.shape}, got {kept.shape}", request=name
        )
    scalar = None if logprobs is None else as_array(logprobs)
    if scalar is not None and scalar.shape != tokens.shape:
        raise EngineError(
            engine,
            f"`rollout_log_probs` must have shape {tokens.shape}, got {scalar.shape}",
            request=name,
        )
    lists = None if ids is None or values is None else (as_array(ids), as_array(values))
    if (ids is None) != (values is None) or (
        (lists is not None and not (lists[0].ndim == 2 and lists[0].shape == lists[1].shape))
        or (lists is not None and len(lists[0]) != len(tokens))
    ):
        shapes = [None if column is None else as_array(column).shape for column in (ids, values)]
        raise EngineError(
            engine, f"ids and log-probs of the top-K must have shape ({len(tokens)}, K), got "
            f"{shapes[0]} and {shapes[1]}",
            request=name,
        )  # fmt: skip
    positions = []
    for at in np.flatnonzero(kept):
        position = Position(int(tokens[at]), None if scalar is None else scalar[at])
        if scalar is None:
            position.missing.append(("logprob", "not-returned", ""))
        if lists is not None:
            position.ids, position.logprobs = lists[0][at].tolist(), lists[1][at].tolist()
        positions.append(position)
    return assemble(
        engine,
        positions,
        sampling=sampling,
        width=None if lists is None else lists[0].shape[1],
        missing=[Missing(None, "topk", "not-returned")] if lists is None else [],
        prompt_ids=prompt.tolist(),
        request=name,
    )


def _mask(engine: str, value: Any, what: str, name: str) -> NDArray[np.bool_]:
    """A mask of 0 and 1; anything else is no mask."""
    array = as_array(value)
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise EngineError(engine, f"`{what}` must hold 0 and 1 alone, got {brief(value)}",
                          request=name)  # fmt: skip
    return array.astype(bool)


def _column(engine: str, fields: Mapping[str, Any], key: str, name: str) -> NDArray[Any]:
    """A column of ids."""
    value = fields.get(key)
    array = as_array(value) if value is not None else np.array(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise EngineError(engine, f"`{key}` must be a list of ids, got {brief(value)}",
                          request=name)  # fmt: skip
    return array
