"""vLLM's `RequestOutput`: lists that begin with the sampled token and hold K or K + 1 entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .assemble import Position, Sampling, assemble, brief, field_of, whole
from .errors import EngineError
from .missing import Missing, Mode
from .response import EngineResponse
from .vllm_lists import Row, as_lists, place_of, width_of

_ENGINE = "vllm"


def read_vllm(
    output: Any,
    *,
    mode: Mode = "unknown",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    listed: int | None = None,
) -> list[EngineResponse]:
    """Read what `LLM.generate` returned.

    Each entry of `outputs[i].logprobs` maps ids to log-probs, the sampled token first: K entries
    where it is among the top-K, else K + 1. The list of the response is the top-K either way, in
    rank order, and the sampled token's log-prob stands apart. `FlatLogprobs`, which always hold
    K + 1 entries with the sampled token twice where it is among the top-K, give the same.

    Parameters
    ----------
    output
        One `RequestOutput`, as an object or a mapping (JSON), or a sequence of them.
    mode
        The engine's `logprobs_mode`: `raw` is vLLM's own default (before temperature and
        truncation), `processed` after both. The output does not say.
    temperature, top_p, top_k, min_p
        Sampling parameters; the output does not say these either.
    listed
        K that was asked for (`SamplingParams.logprobs`, or `prompt_logprobs`). By default it is
        told from the lists' lengths and ranks; where these leave it open (every sampled token
        last, no ranks), the smaller K is taken, which holds in any case.

    Returns
    -------
    list of EngineResponse
        One a completion, in the order of requests and their `outputs`. Entries of −∞, which
        truncation leaves in processed mode with arbitrary ids, and NaN are dropped with their
        reason.

    Raises
    ------
    EngineError
        What does not have this form, with request and position. Modes that return logits are
        refused.
    """
    sampling = Sampling(mode=mode, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    return [
        _read_completion(request, completion, name, sampling, listed)
        for request, name in _requests(output)
        for completion, name in _completions(request, name)
    ]


def read_vllm_prompt(
    output: Any,
    *,
    start: int = 1,
    mode: Mode = "unknown",
    temperature: float | None = None,
    listed: int | None = None,
) -> list[EngineResponse]:
    """Read `prompt_logprobs`, the engine's view of tokens that it was given.

    Parameters
    ----------
    output
        As for `read_vllm`, of requests with `SamplingParams.prompt_logprobs`.
    start
        The first token that counts as response: a prompt that ends in a response is scored anew
        so. At least 1, since nothing predicts the first token.
    mode, temperature, listed
        As for `read_vllm`. vLLM does not truncate the log-probs of a prompt.

    Returns
    -------
    list of EngineResponse
        One a request: the tokens from `start`, with those before as `prompt_ids`.

    Raises
    ------
    EngineError
        As `read_vllm`; no `prompt_logprobs`; a `start` outside the prompt.
    """
    return [
        _read_prompt(request, name, start, Sampling(mode=mode, temperature=temperature), listed)
        for request, name in _requests(output)
    ]


def _requests(output: Any) -> list[tuple[Any, str]]:
    """Requests with their names."""
    single = isinstance(output, Mapping) or not isinstance(output, Sequence)
    named = []
    for index, request in enumerate([output] if single else output):
        given = field_of(request, "request_id")
        named.append((request, str(index) if given is None else str(given)))
    return named


def _completions(request: Any, name: str) -> list[tuple[Any, str]]:
    """Completions of a request with their names."""
    outputs = field_of(request, "outputs")
    if not isinstance(outputs, Sequence) or isinstance(outputs, str):
        raise EngineError(
            _ENGINE,
            "a RequestOutput must have a list `outputs`, got "
            f"{brief(outputs)} in {type(request).__name__}",
            request=name,
        )
    several = len(outputs) > 1
    return [(o, f"{name}, completion {i}" if several else name) for i, o in enumerate(outputs)]


def _read_completion(
    request: Any, completion: Any, name: str, sampling: Sampling, listed: int | None
) -> EngineResponse:
    """One completion."""
    token_ids = _ids(field_of(completion, "token_ids"), "outputs[].token_ids", name)
    logprobs = field_of(completion, "logprobs")
    prompt = field_of(request, "prompt_token_ids")
    prompt_ids = None if prompt is None else _ids(prompt, "prompt_token_ids", name)
    if logprobs is None:
        positions = [
            Position(token, None, missing=[("logprob", "not-returned", "")]) for token in token_ids
        ]
        gaps = [Missing(None, "topk", "not-returned")]
        return assemble(
            _ENGINE, positions, sampling=sampling, missing=gaps, prompt_ids=prompt_ids,
            request=name,
        )  # fmt: skip
    entries = as_lists(logprobs, name)
    if len(entries) != len(token_ids):
        raise EngineError(
            _ENGINE,
            f"`logprobs` must hold one entry a token, {len(token_ids)}, got {len(entries)}",
            request=name,
        )
    return _read_tokens(token_ids, entries, name, sampling, listed, prompt_ids)


def _read_prompt(
    request: Any, name: str, start: int, sampling: Sampling, listed: int | None
) -> EngineResponse:
    """One prompt, from `start`."""
    token_ids = _ids(field_of(request, "prompt_token_ids"), "prompt_token_ids", name)
    if not 1 <= start <= len(token_ids):
        raise EngineError(
            _ENGINE, f"`start` must lie in [1, {len(token_ids)}], the prompt, got {start}",
            request=name,
        )  # fmt: skip
    logprobs = field_of(request, "prompt_logprobs")
    if logprobs is None:
        raise EngineError(
            _ENGINE,
            "there are no `prompt_logprobs`: ask for them in SamplingParams(prompt_logprobs=K)",
            request=name,
        )
    entries = as_lists(logprobs, name)
    if len(entries) != len(token_ids):
        raise EngineError(
            _ENGINE,
            f"`prompt_logprobs` must hold one entry a token, {len(token_ids)}, got {len(entries)}",
            request=name,
        )
    return _read_tokens(
        token_ids[start:], entries[start:], name, sampling, listed, token_ids[:start]
    )


def _read_tokens(
    token_ids: list[int],
    entries: list[list[Row] | None],
    name: str,
    sampling: Sampling,
    listed: int | None,
    prompt_ids: list[int] | None,
) -> EngineResponse:
    """Tokens and their lists."""
    owns = [
        _own(token, rows, name, position)
        for position, (token, rows) in enumerate(zip(token_ids, entries, strict=True))
    ]
    width = listed if listed is not None and listed >= 0 else width_of(owns, entries)
    positions = []
    for token, rows, own in zip(token_ids, entries, owns, strict=True):
        if rows is None or own is None:
            positions.append(Position(token, None, missing=[("topk", "not-returned", "null")]))
            continue
        positions.append(
            Position(
                token,
                own.logprob,
                [row.token_id for row in rows],
                [row.logprob for row in rows],
                outside=place_of(own, rows) > width,
                text=own.text,
            )
        )
    return assemble(
        _ENGINE, positions, sampling=sampling, width=width, prompt_ids=prompt_ids, request=name
    )


def _own(token: int, rows: list[Row] | None, name: str, position: int) -> Row | None:
    """The sampled token's entry."""
    if rows is None:
        return None
    for row in rows:
        if row.token_id == token:
            return row
    raise EngineError(
        _ENGINE,
        f"the entry must hold the sampled token {token}, got ids "
        f"{brief([row.token_id for row in rows])}: are `token_ids` and `logprobs` of one "
        "completion?",
        request=name,
        position=position,
    )


def _ids(value: Any, what: str, name: str) -> list[int]:
    """Token ids as a list."""
    if value is None or isinstance(value, str | Mapping):
        raise EngineError(_ENGINE, f"`{what}` must be a list of ids, got {brief(value)}",
                          request=name)  # fmt: skip
    return [whole(_ENGINE, token, f"`{what}`", name, index) for index, token in enumerate(value)]
