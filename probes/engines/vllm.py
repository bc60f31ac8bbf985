"""vLLM's `RequestOutput`: lists that begin with the sampled token and hold K or K + 1 entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .assemble import Position, Sampling, assemble, brief, field_of, whole
from .errors import EngineError
from .missing import Missing, Mode
from .response import EngineResponse
from .vllm_lists import Listed, Own, as_lists, own_of, place_of, width_of

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
        told from the lengths and ranks of all lists given; where these leave it open (every
        sampled token last, no ranks), the smaller K is taken, which holds in any case.

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
    read = [
        _completion(request, completion, name)
        for request, name in _requests(output)
        for completion, name in _completions(request, name)
    ]
    return _responses(read, sampling, listed)


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
    read = [_prompt(request, name, start) for request, name in _requests(output)]
    return _responses(read, Sampling(mode=mode, temperature=temperature), listed)


@dataclass(frozen=True)
class _Tokens:
    """Tokens with their lists, as they came."""

    name: str
    token_ids: list[int]
    lists: list[Listed | None] | None
    prompt_ids: list[int] | None

    def owns(self) -> list[Own | None]:
        """The sampled tokens' entries."""
        pairs = enumerate(zip(self.token_ids, self.lists or (), strict=True))
        return [own_of(token, listed, self.name, at) for at, (token, listed) in pairs]


def _responses(
    read: Sequence[_Tokens], sampling: Sampling, listed: int | None
) -> list[EngineResponse]:
    """Responses, with one K for all of them."""
    if listed is not None and (isinstance(listed, bool) or not isinstance(listed, int)):
        raise EngineError(_ENGINE, f"`listed` must be a whole number or None, got {listed!r}")
    scored = [tokens for tokens in read if tokens.lists is not None]
    owns = {id(tokens): tokens.owns() for tokens in scored}
    if listed is None or listed < 0:
        listed = width_of(
            [own for tokens in scored for own in owns[id(tokens)]],
            [listed for tokens in scored for listed in tokens.lists or ()],
        )
    return [_response(tokens, owns.get(id(tokens)), sampling, listed) for tokens in read]


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


def _completion(request: Any, completion: Any, name: str) -> _Tokens:
    """One completion."""
    token_ids = _ids(field_of(completion, "token_ids"), "outputs[].token_ids", name)
    prompt = field_of(request, "prompt_token_ids")
    prompt_ids = None if prompt is None else _ids(prompt, "prompt_token_ids", name)
    logprobs = field_of(completion, "logprobs")
    if logprobs is None:
        return _Tokens(name, token_ids, None, prompt_ids)
    return _Tokens(name, token_ids, _lists(logprobs, "logprobs", token_ids, name), prompt_ids)


def _prompt(request: Any, name: str, start: int) -> _Tokens:
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
    entries = _lists(logprobs, "prompt_logprobs", token_ids, name)
    return _Tokens(name, token_ids[start:], entries[start:], token_ids[:start])


def _lists(logprobs: Any, what: str, token_ids: list[int], name: str) -> list[Listed | None]:
    """One list a token."""
    entries = as_lists(logprobs, name)
    if len(entries) != len(token_ids):
        raise EngineError(
            _ENGINE,
            f"`{what}` must hold one entry a token, {len(token_ids)}, got {len(entries)}",
            request=name,
        )
    return entries


def _response(
    tokens: _Tokens, owns: list[Own | None] | None, sampling: Sampling, width: int
) -> EngineResponse:
    """One response."""
    positions = []
    if owns is None or tokens.lists is None:
        return assemble(
            _ENGINE,
            [Position(token, None, missing=[("logprob", "not-returned", "")])
             for token in tokens.token_ids],
            sampling=sampling, width=width,
            missing=[Missing(None, "topk", "not-returned")],
            prompt_ids=tokens.prompt_ids, request=tokens.name,
        )  # fmt: skip
    for token, listed, own in zip(tokens.token_ids, tokens.lists, owns, strict=True):
        if listed is None or own is None:
            positions.append(Position(token, None, missing=[("topk", "not-returned", "null")]))
            continue
        positions.append(
            Position(
                token,
                own.logprob,
                listed.ids,
                listed.logprobs,
                outside=place_of(own, listed) > width,
                text=own.text,
            )
        )
    return assemble(
        _ENGINE, positions, sampling=sampling, width=width, prompt_ids=tokens.prompt_ids,
        request=tokens.name,
    )  # fmt: skip


def _ids(value: Any, what: str, name: str) -> list[int]:
    """Token ids as a list."""
    if not hasattr(value, "__len__") or isinstance(value, str | bytes | Mapping):
        raise EngineError(_ENGINE, f"`{what}` must be a list of ids, got {brief(value)}",
                          request=name)  # fmt: skip
    return [whole(_ENGINE, token, f"`{what}`", name, index) for index, token in enumerate(value)]
