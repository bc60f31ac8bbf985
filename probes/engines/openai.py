"""OpenAI-compatible completions and chat: lists by text, or by id where a server gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .assemble import Position, Sampling, assemble, brief, logprob_or_reason, whole
from .errors import EngineError
from .missing import Missing, Mode, SupportRule
from .response import EngineResponse
from .text_lists import Entry, position_of, width_of
from .texts import Vocabulary


def read_openai(
    response: Any,
    *,
    mode: Mode = "unknown",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    listed: int | None = None,
    vocabulary: Vocabulary | None = None,
    support: SupportRule | None = None,
    start: int | None = None,
    engine: str = "openai",
) -> list[EngineResponse]:
    """Read a response of `/v1/completions` or `/v1/chat/completions`.

    Ids come, in this order, from an entry's own `id`, from texts of the form `token_id:N` (vLLM:
    `return_tokens_as_token_ids`), from the choice's `token_ids` (vLLM: `return_token_ids`; of the
    sampled tokens only), and from `vocabulary`. A text that several ids share, or none has, gives
    no id. Completions list texts as keys of an object, so of two ids with one text one is lost:
    that is found where the list is short, or where the sampled token's entry is not its log-prob.

    Parameters
    ----------
    response
        The response, as a mapping or an object with `model_dump()`.
    mode
        What the server had done to the logits; no response says. vLLM's own default is `raw`.
    temperature, top_p, top_k, min_p
        Sampling parameters of the request.
    listed
        K that was asked for (`logprobs` or `top_logprobs`). By default the largest K that the
        lists prove.
    vocabulary
        All ids of each text (`vocabulary_of`), for servers that return texts only.
    support
        `union` or `replaced-last`. By default completions are `union` (K or K + 1 entries). Chat
        of a vLLM (it says so in `system_fingerprint`) is `replaced-last`: the sampled token
        first, then the top K − 1. Chat of others is `union` where some list lacks the sampled
        token or is longer than the rest, or none can have lost an entry, else `replaced-last`,
        which claims less.
    start
        With `echo`, the token at which the response begins; by default the first that the
        prompt does not hold (`token_ids`, or else `usage.prompt_tokens`).
    engine
        Name for the result.

    Returns
    -------
    list of EngineResponse
        One a choice. Numbers of −9999 are missing.

    Raises
    ------
    EngineError
        What does not have this form, with request and position.
    """
    body = response.model_dump() if hasattr(response, "model_dump") else response
    name = str(body.get("id", "0")) if isinstance(body, Mapping) else "0"
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise EngineError(
            engine, f"a response must have a list `choices`, got {brief(body)}", request=name
        )
    sampling = Sampling(mode=mode, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    read = _Reader(engine, sampling, listed, vocabulary, support, start)
    several = len(choices) > 1
    return [
        read.choice(body, choice, f"{name}, choice {index}" if several else name)
        for index, choice in enumerate(choices)
    ]


class _Reader:
    """The options of one call."""

    def __init__(
        self,
        engine: str,
        sampling: Sampling,
        listed: int | None,
        vocabulary: Vocabulary | None,
        support: SupportRule | None,
        start: int | None,
    ) -> None:
        self.engine, self.sampling, self.listed = engine, sampling, listed
        self.vocabulary, self.support, self.start = vocabulary, support, start

    def choice(self, body: Mapping[str, Any], choice: Any, name: str) -> EngineResponse:
        """One choice."""
        if not isinstance(choice, Mapping):
            raise EngineError(self.engine, f"a choice must be an object, got {brief(choice)}",
                              request=name)  # fmt: skip
        prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
        prompt_ids = None if prompt is None else self._ids(prompt, "prompt_token_ids", name)
        given = choice.get("token_ids")
        token_ids = None if given is None else self._ids(given, "token_ids", name)
        logprobs = choice.get("logprobs")
        if logprobs is None:
            return self._without(token_ids, prompt_ids, name)
        if not isinstance(logprobs, Mapping):
            raise EngineError(self.engine, f"`logprobs` must be an object, got {brief(logprobs)}",
                              request=name)  # fmt: skip
        if logprobs.get("content") is not None:
            tokens, lists = self._chat(logprobs["content"], name)
            support = self.support or _chat_support(body, tokens, lists)
        else:
            tokens, lists = self._completion(logprobs, name)
            first = self._first(body, tokens, token_ids, name)
            tokens, lists = tokens[first:], lists[first:]
            support = self.support or "union"
        if token_ids is not None and len(token_ids) != len(tokens):
            raise EngineError(
                self.engine,
                f"`token_ids` must name the {len(tokens)} tokens of `logprobs`, got "
                f"{len(token_ids)}",
                request=name,
            )
        by_text = logprobs.get("content") is None
        exact = not by_text and not _uneven(lists)
        width = width_of(tokens, lists, self.listed, exact=exact)
        positions = [
            position_of(
                token, entries, None if token_ids is None else token_ids[index], width,
                self.vocabulary, by_text=by_text,
            )
            for index, (token, entries) in enumerate(zip(tokens, lists, strict=True))
        ]  # fmt: skip
        return assemble(
            self.engine, positions, sampling=self.sampling, width=width, support=support,
            prompt_ids=prompt_ids, request=name,
        )  # fmt: skip

    def _without(
        self, token_ids: list[int] | None, prompt_ids: list[int] | None, name: str
    ) -> EngineResponse:
        """A choice without log-probs."""
        if token_ids is None:
            raise EngineError(
                self.engine,
                "the choice has neither `logprobs` nor `token_ids`: ask for log-probs",
                request=name,
            )
        positions = [
            Position(token, None, missing=[("logprob", "not-returned", "")]) for token in token_ids
        ]
        return assemble(
            self.engine, positions, sampling=self.sampling, prompt_ids=prompt_ids, request=name,
            missing=[Missing(None, "topk", "not-returned")],
        )  # fmt: skip

    def _completion(
        self, logprobs: Mapping[str, Any], name: str
    ) -> tuple[list[Entry], list[list[Entry] | None]]:
        """Tokens and lists of `/v1/completions`."""
        texts, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
        tops = logprobs.get("top_logprobs")
        columns = {"tokens": texts, "token_logprobs": values, "top_logprobs": tops}
        for key, column in columns.items():
            if key == "top_logprobs" and not column:
                continue
            if not isinstance(column, Sequence) or isinstance(column, str):
                raise EngineError(self.engine, f"`logprobs.{key}` must be a list, got "
                                  f"{brief(column)}", request=name)  # fmt: skip
            if len(column) != len(texts or ()):
                raise EngineError(
                    self.engine,
                    f"`logprobs.{key}` must hold one entry a token, {len(texts or ())}, got "
                    f"{len(column)}",
                    request=name,
                )
        tokens, lists = [], []
        for position, text in enumerate(texts or ()):
            value = (values or ())[position]
            tokens.append(self._entry({"token": text, "logprob": value}, name, position))
            entries = tops[position] if tops else None
            if entries is not None and not isinstance(entries, Mapping):
                raise EngineError(
                    self.engine,
                    f"an entry of `top_logprobs` must be an object or null, got {brief(entries)}",
                    request=name,
                    position=position,
                )
            lists.append(
                None
                if entries is None
                else [
                    self._entry({"token": key, "logprob": logprob}, name, position)
                    for key, logprob in entries.items()
                ]
            )
        return tokens, lists

    def _chat(self, content: Any, name: str) -> tuple[list[Entry], list[list[Entry] | None]]:
        """Tokens and lists of `/v1/chat/completions`."""
        if not isinstance(content, Sequence) or isinstance(content, str):
            raise EngineError(self.engine, "`logprobs.content` must be a list, got "
                              f"{brief(content)}", request=name)  # fmt: skip
        tokens: list[Entry] = []
        lists: list[list[Entry] | None] = []
        for position, item in enumerate(content):
            tokens.append(self._entry(item, name, position))
            entries = item.get("top_logprobs")
            if entries is not None and (
                not isinstance(entries, Sequence) or isinstance(entries, str)
            ):
                raise EngineError(
                    self.engine, f"`top_logprobs` must be a list, got {brief(entries)}",
                    request=name, position=position,
                )  # fmt: skip
            lists.append(
                None
                if entries is None
                else [self._entry(entry, name, position) for entry in entries]
            )
        return tokens, lists

    def _entry(self, item: Any, name: str, position: int) -> Entry:
        """One text with its log-prob."""
        text = item.get("token") if isinstance(item, Mapping) else None
        if not isinstance(text, str):
            raise EngineError(
                self.engine, f"an entry must have a text `token` and a `logprob`, got "
                f"{brief(item)}",
                request=name, position=position,
            )  # fmt: skip
        number = item.get("id")
        if number is not None:
            number = whole(self.engine, number, "`id`", name, position)
        value = item.get("logprob")
        logprob_or_reason(self.engine, value, name, position)
        return Entry(text, value, number)

    def _first(
        self,
        body: Mapping[str, Any],
        tokens: Sequence[Entry],
        token_ids: list[int] | None,
        name: str,
    ) -> int:
        """Where the response begins among tokens that echo the prompt."""
        if self.start is not None:
            if not 0 <= self.start <= len(tokens):
                raise EngineError(
                    self.engine, f"`start` must lie in [0, {len(tokens)}], got {self.start}",
                    request=name,
                )  # fmt: skip
            return self.start
        if not tokens or tokens[0].logprob is not None:
            return 0
        if token_ids is not None:
            return max(0, len(tokens) - len(token_ids))
        usage = body.get("usage")
        completion = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        if len(body["choices"]) == 1 and completion == len(tokens):
            return 0  # no echo: the first token's log-prob is missing
        prompt = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
        if not isinstance(prompt, int) or not 0 < prompt <= len(tokens):
            raise EngineError(
                self.engine,
                "the prompt is echoed (the first log-prob is null), and neither `token_ids` nor "
                f"`usage.prompt_tokens` (got {brief(prompt)}) says where it ends: give `start`",
                request=name,
            )
        return prompt

    def _ids(self, value: Any, what: str, name: str) -> list[int]:
        """Token ids as a list."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise EngineError(self.engine, f"`{what}` must be a list of ids, got {brief(value)}",
                              request=name)  # fmt: skip
        return [whole(self.engine, token, f"`{what}`", name, at) for at, token in enumerate(value)]


def _chat_support(
    body: Mapping[str, Any], tokens: Sequence[Entry], lists: Sequence[list[Entry] | None]
) -> SupportRule:
    """Whether the sampled token may stand in the place of the K-th."""
    if str(body.get("system_fingerprint", "")).startswith("vllm"):
        return "replaced-last"
    if _uneven(lists):
        return "union"
    may_replace = False
    for token, entries in zip(tokens, lists, strict=True):
        if not entries:
            continue
        if not any(token.same(entry) for entry in entries):
            return "union"
        may_replace = may_replace or token.is_last(entries)
    return "replaced-last" if may_replace else "union"


def _uneven(lists: Sequence[list[Entry] | None]) -> bool:
    """Whether some lists are longer, as where a sampled token outside the top-K is appended."""
    return len({len(entries) for entries in lists if entries}) > 1
