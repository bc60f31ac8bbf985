"""SGLang's `meta_info`: exactly K entries a token, the sampled token apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .assemble import Position, Sampling, assemble, brief, whole
from .errors import EngineError
from .missing import Missing, Mode
from .response import EngineResponse
from .sglang_flat import Row, flat_rows

_ENGINE = "sglang"


def read_sglang(
    output: Any,
    *,
    mode: Mode | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> list[EngineResponse]:
    """Read what `/generate` or `Engine.generate` returned with `return_logprob=True`.

    `output_token_logprobs` holds (log-prob, id, text or null) a token, `output_top_logprobs`
    exactly `top_logprobs_num` such triples: a sampled token outside the top-K is not appended.
    The flat variants (`…_val_flat`, `…_idx_flat`, `…_shape`, `…_null_prefix`) and the same in
    base64 give the same. Without a top-K, `output_token_ids_logprobs` (ids that the request
    chose) are the list.

    Where the request asked for the sampling support (`output_token_sampling_mask` and lists in
    `output_token_sampling_logprobs`), these are read: all ids that truncation left, after it.

    Parameters
    ----------
    output
        One response, or a sequence of them.
    mode
        By default `tempered`, since SGLang divides by the temperature before it takes log-probs
        and truncates after it; `processed` where the sampling support was returned. A server run
        with SGLANG_RETURN_ORIGINAL_LOGPROB=1 gives `raw`.
    temperature, top_p, top_k, min_p
        Sampling parameters; the response does not say. With temperature 0 log-probs are raw.

    Returns
    -------
    list of EngineResponse
        One a response.

    Raises
    ------
    EngineError
        What does not have this form, with request and position.
    """
    responses = []
    for index, item in enumerate(_items(output)):
        meta, name = _meta(item, index)
        support = _is_support(meta)
        default: Mode = "processed" if support else "raw" if temperature == 0 else "tempered"
        sampling = Sampling(
            mode=default if mode is None else mode,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
        )
        tokens = _triples(meta, "output_token_logprobs", name)
        _check_ids(item, tokens, name)
        if support:
            responses.append(_read_support(meta, tokens, name, sampling))
        else:
            responses.append(_read(meta, "output", tokens, name, sampling))
    return responses


def read_sglang_prompt(
    output: Any, *, start: int = 1, mode: Mode = "raw", temperature: float | None = None
) -> list[EngineResponse]:
    """Read `input_token_logprobs` and `input_top_logprobs`, the engine's view of a prompt.

    Parameters
    ----------
    output
        As for `read_sglang`.
    start
        First token, counted from the request's `logprob_start_len`, that counts as response; the
        entry before it has no log-prob where it is the prompt's first.
    mode, temperature
        As for `read_sglang`; the log-probs of a prompt are never divided by the temperature.

    Returns
    -------
    list of EngineResponse
        One a response: the tokens from `start`, with those before as `prompt_ids`.

    Raises
    ------
    EngineError
        As `read_sglang`; a `start` outside the prompt.
    """
    responses = []
    for index, item in enumerate(_items(output)):
        meta, name = _meta(item, index)
        tokens = _triples(meta, "input_token_logprobs", name)
        if not 0 <= start <= len(tokens):
            raise EngineError(
                _ENGINE, f"`start` must lie in [0, {len(tokens)}], the prompt, got {start}",
                request=name,
            )  # fmt: skip
        sampling = Sampling(mode=mode, temperature=temperature)
        responses.append(_read(meta, "input", tokens, name, sampling, start))
    return responses


_Triple = tuple[Any, int, str | None]


def _items(output: Any) -> list[Any]:
    """Responses."""
    return (
        list(output) if isinstance(output, Sequence) and not isinstance(output, str) else [output]
    )


def _meta(item: Any, index: int) -> tuple[Mapping[str, Any], str]:
    """`meta_info` and the request's name."""
    meta = item.get("meta_info") if isinstance(item, Mapping) else None
    if not isinstance(meta, Mapping):
        raise EngineError(
            _ENGINE, f"a response must have a mapping `meta_info`, got {brief(item)}",
            request=str(index),
        )  # fmt: skip
    return meta, str(meta.get("id", index))


def _triples(meta: Mapping[str, Any], key: str, name: str) -> list[_Triple]:
    """(log-prob, id, text) a token."""
    entries = meta.get(key)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise EngineError(
            _ENGINE, f"`meta_info.{key}` must be a list, got {brief(entries)}: ask for it by "
            "return_logprob=True",
            request=name,
        )  # fmt: skip
    return [_triple(entry, key, name, position) for position, entry in enumerate(entries)]


def _triple(entry: Any, key: str, name: str, position: int) -> _Triple:
    """One entry."""
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) not in (2, 3):
        raise EngineError(
            _ENGINE, f"an entry of `{key}` must be [log-prob, id, text], got {brief(entry)}",
            request=name, position=position,
        )  # fmt: skip
    text = entry[2] if len(entry) == 3 else None
    return entry[0], whole(_ENGINE, entry[1], f"`{key}`", name, position), text


def _check_ids(item: Mapping[str, Any], tokens: list[_Triple], name: str) -> None:
    """`output_ids`, where given, are the sampled tokens."""
    given = item.get("output_ids")
    if given is None:
        return
    _list(given, "output_ids", name)
    ids = [token for _, token, _ in tokens]
    if list(given) != ids:
        place = next((i for i, (a, b) in enumerate(zip(given, ids, strict=False)) if a != b), None)
        raise EngineError(
            _ENGINE,
            f"`output_ids` must be the {len(ids)} ids of `output_token_logprobs`, got "
            f"{len(given)} ids" + ("" if place is None else f", first {given[place]}"),
            request=name,
            position=place,
        )


def _read(
    meta: Mapping[str, Any],
    side: str,
    tokens: list[_Triple],
    name: str,
    sampling: Sampling,
    start: int = 0,
) -> EngineResponse:
    """Tokens and their lists, of output or input."""
    rows = _rows(meta, side, name)
    gaps = [Missing(None, "topk", "not-returned")] if rows is None else []
    if rows is not None and len(rows) != len(tokens):
        raise EngineError(
            _ENGINE,
            f"the {side} must have one list a token, {len(tokens)}, got {len(rows)}",
            request=name,
        )
    positions = []
    for index in range(start, len(tokens)):
        logprob, token, text = tokens[index]
        position = Position(token, logprob, text=text)
        row = None if rows is None else rows[index]
        if row is not None:
            position.ids, position.logprobs = row
        elif rows is not None:
            position.missing.append(("topk", "not-returned", "null"))
        positions.append(position)
    prompt = [token for _, token, _ in tokens[:start]] if side == "input" else None
    return assemble(
        _ENGINE, positions, sampling=sampling, missing=gaps, prompt_ids=prompt, request=name
    )


def _rows(meta: Mapping[str, Any], side: str, name: str) -> list[Row] | None:
    """The lists a token, in whichever form they came; None where there are none."""
    prefix = f"{side}_top_logprobs"
    if f"{prefix}_shape" in meta:
        return flat_rows(meta, prefix, name)
    key = prefix if meta.get(prefix) is not None else f"{side}_token_ids_logprobs"
    if meta.get(key) is None:
        return None
    rows: list[Row] = []
    for position, row in enumerate(_list(meta[key], f"meta_info.{key}", name)):
        if row is None or (isinstance(row, Sequence) and not row):
            rows.append(None)
            continue
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise EngineError(
                _ENGINE, f"a row of `{key}` must be a list or null, got {brief(row)}",
                request=name, position=position,
            )  # fmt: skip
        entries = [_triple(entry, key, name, position) for entry in row]
        rows.append(([token for _, token, _ in entries], [value for value, _, _ in entries]))
    return rows


def _list(value: Any, what: str, name: str) -> Sequence[Any]:
    """A list, and nothing else that can be gone through."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    raise EngineError(_ENGINE, f"`{what}` must be a list, got {brief(value)}", request=name)


def _is_support(meta: Mapping[str, Any]) -> bool:
    """Whether the log-probs of all ids that truncation left were returned."""
    values = meta.get("output_token_sampling_logprobs")
    return isinstance(values, Sequence) and any(isinstance(row, Sequence) for row in values)


def _read_support(
    meta: Mapping[str, Any], tokens: list[_Triple], name: str, sampling: Sampling
) -> EngineResponse:
    """The sampling support; the sampled token's log-prob is its entry there."""
    ids, values = meta.get("output_token_sampling_mask"), meta["output_token_sampling_logprobs"]
    if not isinstance(ids, Sequence) or not len(ids) == len(values) == len(tokens):
        raise EngineError(
            _ENGINE,
            "`output_token_sampling_mask` and `output_token_sampling_logprobs` must hold one row "
            f"a token, {len(tokens)}, got {brief(ids)} and {len(values)} rows",
            request=name,
        )
    positions = []
    for index, ((_, token, text), row, logprobs) in enumerate(
        zip(tokens, ids, values, strict=True)
    ):
        lists = all(isinstance(each, list | tuple) for each in (row, logprobs))
        if not lists or len(row) != len(logprobs) or token not in row:
            raise EngineError(
                _ENGINE,
                f"the support must hold the sampled token {token} and a log-prob an id, got ids "
                f"{brief(row)} and log-probs {brief(logprobs)}",
                request=name,
                position=index,
            )
        positions.append(
            Position(token, logprobs[list(row).index(token)], list(row), logprobs, text=text)
        )
    return assemble(_ENGINE, positions, sampling=sampling, request=name)
