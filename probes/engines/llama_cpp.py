"""llama.cpp's server (native and OpenAI-compatible) and llama-cpp-python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .assemble import Position, Sampling, assemble, brief, logprob_or_reason, whole
from .errors import EngineError
from .missing import Mode
from .openai import read_openai
from .response import EngineResponse
from .text_lists import Entry, position_of
from .texts import Vocabulary

_ENGINE = "llama.cpp"


def read_llama_cpp(
    response: Any,
    *,
    mode: Mode | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    listed: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> list[EngineResponse]:
    """Read a response of llama.cpp, whichever of its shapes it has.

    The server's `/completion` returns `completion_probabilities`, a list of `top_logprobs` with
    ids a token, or `top_probs` after sampling (`post_sampling_probs`), or in old versions `probs`
    of texts; its `/v1/` routes the same under `logprobs.content`. llama-cpp-python returns OpenAI
    completions: texts only, the sampled one last into an object of K or K + 1.

    Parameters
    ----------
    response
        The response, a mapping.
    mode
        By default `processed` where probabilities after sampling were returned, else `raw`:
        log-probs come from the logits before the temperature.
    temperature, top_p, top_k, min_p
        Sampling parameters; where None, `generation_settings` of the native response say.
    listed, vocabulary
        As for `read_openai`.

    Returns
    -------
    list of EngineResponse
        One a choice. The lowest float32, which stands for the logarithm of 0, is missing.

    Raises
    ------
    EngineError
        What does not have this form, with request and position.
    """
    if not isinstance(response, Mapping):
        raise EngineError(_ENGINE, f"a response must be an object, got {brief(response)}")
    items = response.get("completion_probabilities")
    if items is None and "choices" in response:
        return _compatible(
            response, mode, Sampling(temperature=temperature, top_p=top_p, top_k=top_k,
                                     min_p=min_p), listed, vocabulary,
        )  # fmt: skip
    name = str(response.get("id", response.get("id_slot", 0)))
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise EngineError(
            _ENGINE,
            "a response must have `completion_probabilities` or `choices`, got "
            f"{brief(list(response))}: ask for n_probs (native) or logprobs",
            request=name,
        )
    settings = response.get("generation_settings")
    settings = settings if isinstance(settings, Mapping) else {}
    after = any(isinstance(item, Mapping) and ("prob" in item or "probs" in item) for item in items)
    old = any(isinstance(item, Mapping) and "probs" in item for item in items)
    default: Mode = "unknown" if old else "processed" if after else "raw"
    sampling = Sampling(
        mode=default if mode is None else mode,
        temperature=settings.get("temperature") if temperature is None else temperature,
        top_p=settings.get("top_p") if top_p is None else top_p,
        top_k=settings.get("top_k") if top_k is None else top_k,
        min_p=settings.get("min_p") if min_p is None else min_p,
    )
    read = _read_old if old else _read_new
    pairs = [read(item, name, position) for position, item in enumerate(items)]
    width = max((len(entries) for _, entries in pairs), default=0) if listed is None else listed
    positions: list[Position] = [
        position_of(token, entries, None, width, vocabulary, by_text=False)
        for token, entries in pairs
    ]
    return [assemble(_ENGINE, positions, sampling=sampling, width=width, request=name)]


def _compatible(
    response: Mapping[str, Any],
    mode: Mode | None,
    sampling: Sampling,
    listed: int | None,
    vocabulary: Vocabulary | None,
) -> list[EngineResponse]:
    """The shapes of OpenAI, with probabilities made log-probs."""
    choices, after = [], False
    given = response["choices"]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise EngineError(_ENGINE, f"`choices` must be a list, got {brief(given)}")
    for choice in given:
        logprobs = choice.get("logprobs") if isinstance(choice, Mapping) else None
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if isinstance(content, Sequence) and any(
            isinstance(item, Mapping) and "prob" in item for item in content
        ):
            after = True
            logged = [_logged(item, position) for position, item in enumerate(content)]
            choice = {**choice, "logprobs": {"content": logged}}
        choices.append(choice)
    default: Mode = "processed" if after else "raw"
    return read_openai(
        {**response, "choices": choices},
        mode=default if mode is None else mode,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        min_p=sampling["min_p"],
        listed=listed,
        vocabulary=vocabulary,
        support="union",
        engine=_ENGINE,
    )


def _logged(item: Any, position: int) -> Any:
    """An entry of probabilities with log-probs in their place."""
    entries = item.get("top_probs", ()) if isinstance(item, Mapping) else None
    if not isinstance(entries, Sequence) or not all(isinstance(each, Mapping) for each in entries):
        raise EngineError(
            _ENGINE, f"an entry must have `prob` and a list `top_probs`, got {brief(item)}",
            position=position,
        )  # fmt: skip
    return {
        **item,
        "logprob": _log(item.get("prob"), None, position),
        "top_logprobs": [
            {**entry, "logprob": _log(entry.get("prob"), None, position)} for entry in entries
        ],
    }


def _read_new(item: Any, name: str, position: int) -> tuple[Entry, list[Entry]]:
    """An entry with ids."""
    entries = None
    if isinstance(item, Mapping):
        entries = item.get("top_logprobs", item.get("top_probs"))
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise EngineError(
            _ENGINE,
            f"an entry must have `id`, `logprob` (or `prob`) and `top_logprobs` (or `top_probs`), "
            f"got {brief(item)}",
            request=name,
            position=position,
        )
    return _entry(item, name, position), [_entry(entry, name, position) for entry in entries]


def _entry(item: Any, name: str, position: int) -> Entry:
    """One id with its log-prob."""
    if not isinstance(item, Mapping) or "id" not in item:
        raise EngineError(
            _ENGINE, f"an entry must have an `id`, got {brief(item)}", request=name,
            position=position,
        )  # fmt: skip
    token = whole(_ENGINE, item["id"], "`id`", name, position)
    value = _log(item["prob"], name, position) if "prob" in item else item.get("logprob")
    logprob_or_reason(_ENGINE, value, name, position)
    return Entry(str(item.get("token", "")), value, token)


def _read_old(item: Any, name: str, position: int) -> tuple[Entry, list[Entry]]:
    """An entry of texts and probabilities, as old versions have it."""
    content = item.get("content") if isinstance(item, Mapping) else None
    probs = item.get("probs") if isinstance(item, Mapping) else None
    if not isinstance(content, str) or not isinstance(probs, Sequence):
        raise EngineError(
            _ENGINE, f"an entry must have `content` and `probs`, got {brief(item)}", request=name,
            position=position,
        )  # fmt: skip
    entries = []
    for entry in probs:
        text = entry.get("tok_str") if isinstance(entry, Mapping) else None
        if not isinstance(text, str):
            raise EngineError(
                _ENGINE, f"`probs` must hold `tok_str` and `prob`, got {brief(entry)}",
                request=name, position=position,
            )  # fmt: skip
        entries.append(Entry(text, _log(entry.get("prob"), name, position)))
    same = [entry for entry in entries if entry.text == content]
    return Entry(content, same[0].logprob if len(same) == 1 else None), entries


def _log(value: Any, name: str | None, position: int) -> float | None:
    """Logarithm of a probability; None of none, −∞ of 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1.001:
        raise EngineError(
            _ENGINE, f"a probability must lie in [0, 1], got {brief(value)}", request=name,
            position=position,
        )  # fmt: skip
    return math.log(value) if value > 0 else -math.inf
