"""From one list a token, in whatever order and number, to an EngineResponse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

import numpy as np

from .errors import EngineError
from .missing import Field, Missing, Mode, Reason, SupportRule
from .response import EngineResponse

SENTINEL: Final = -9999.0
"""What OpenAI-compatible servers write for −∞ and NaN, which JSON lacks; llama.cpp writes the
lowest float32 for the logarithm of 0. No log-prob of a real distribution is as low."""


_HIGHEST_ID: Final = 2**63 - 1


class Sampling(TypedDict, total=False):
    """How the tokens were sampled, as `EngineResponse` names it."""

    mode: Mode
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None


@dataclass
class Position:
    """What an engine said of one token.

    Attributes
    ----------
    token_id : int
        The sampled token; −1 where it is not known.
    logprob : float or None
        Its log-prob as it came: None, NaN and sentinels are allowed.
    ids, logprobs : sequence
        The list as it came, in any order; the sampled token may stand among it. An id of −1 is
        left out (say why in `missing`).
    outside : bool
        The sampled token stands in the list beyond the top-K, and is to be taken out.
    text : str or None
        The sampled token's text.
    missing : list of (field, reason, detail)
        What the reader itself found missing here.
    """

    token_id: int
    logprob: float | None
    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    outside: bool = False
    text: str | None = None
    missing: list[tuple[Field, Reason, str]] = field(default_factory=list)


def assemble(
    engine: str,
    positions: Sequence[Position],
    *,
    sampling: Sampling,
    width: int | None = None,
    support: SupportRule = "union",
    missing: Iterable[Missing] = (),
    prompt_ids: Sequence[int] | None = None,
    request: str | None = None,
) -> EngineResponse:
    """Sort every list, drop what is no log-prob with its reason, and pad.

    Parameters
    ----------
    engine
        Name of the engine.
    positions
        One a token.
    sampling
        What is known of the sampling.
    width
        K; by default the longest list that is left. Longer lists are cut.
    support
        Whether the sampled token may have taken the K-th place.
    missing
        What is missing of the response as a whole.
    prompt_ids, request
        As in `EngineResponse`.

    Returns
    -------
    EngineResponse
        Checked.

    Raises
    ------
    EngineError
        An entry that is no number, an id listed twice with different log-probs, or what
        `EngineResponse` refuses.
    """
    gaps = list(missing)
    lists: list[list[tuple[int, float]]] = []
    logprobs = np.full(len(positions), np.nan)
    for index, position in enumerate(positions):
        if position.token_id != -1:
            whole(engine, position.token_id, "a sampled token", request, index)
        said: Counter[tuple[Field, Reason, str]] = Counter(position.missing)
        value, reason = logprob_or_reason(engine, position.logprob, request, index)
        if value is None and reason is not None:
            if not any(what == "logprob" for what, _, _ in position.missing):
                said["logprob", reason, _shown(position.logprob)] += 1
        elif value == -math.inf:
            said["logprob", "minus-infinity", "-inf"] += 1
        elif value is not None:
            logprobs[index] = value
        lists.append(_entries(engine, position, said, request, index)[:width])
        gaps += [Missing(index, *key[:2], count, key[2]) for key, count in said.items()]
    columns = max(map(len, lists), default=0) if width is None else width
    ids = np.full((len(positions), columns), -1, np.int64)
    values = np.full((len(positions), columns), np.nan)
    for row, entries in enumerate(lists):
        if entries:
            ids[row, : len(entries)], values[row, : len(entries)] = zip(*entries, strict=True)
    texts = [position.text for position in positions]
    return EngineResponse(
        engine,
        np.array([position.token_id for position in positions], np.int64),
        logprobs,
        ids,
        values,
        **sampling,
        support=support,
        missing=tuple(gaps),
        prompt_ids=None
        if prompt_ids is None
        else np.array(
            [whole(engine, token, "`prompt_ids`", request, None) for token in prompt_ids], np.int64
        ),
        texts=None if None in texts else tuple(text for text in texts if text is not None),
        request=request,
    )


def logprob_or_reason(
    engine: str, value: object, request: str | None, position: int | None
) -> tuple[float | None, Reason | None]:
    """Tell a log-prob from what stands for none.

    Parameters
    ----------
    engine, request, position
        For the error.
    value
        As it came.

    Returns
    -------
    float or None
        The log-prob in nats; −∞ is one. None where it stands for none.
    str or None
        Why it is none: `null`, `nan` or `sentinel`.

    Raises
    ------
    EngineError
        It is no number.
    """
    if value is None:
        return None, "null"
    if isinstance(value, bool | str | bytes):
        number = None
    else:
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is None:
        raise EngineError(
            engine, f"a log-prob must be a number or null, got {brief(value)}",
            request=request, position=position,
        )  # fmt: skip
    if math.isnan(number):
        return None, "nan"
    if -math.inf < number <= SENTINEL:
        return None, "sentinel"
    return number, None


def whole(engine: str, value: object, what: str, request: str | None, position: int | None) -> int:
    """Take a token id: a whole number, or its decimal text (a JSON key).

    Raises
    ------
    EngineError
        It is none, or negative.
    """
    digits = isinstance(value, str) and value.isascii() and value.isdigit()
    counted = isinstance(value, int | np.integer) and not isinstance(value, bool)
    number = int(value) if digits or counted else -1  # type: ignore[call-overload]
    if not 0 <= number <= _HIGHEST_ID:
        raise EngineError(
            engine,
            f"{what} must be a token id, a whole number of at least 0, got {brief(value)}",
            request=request, position=position,
        )  # fmt: skip
    return number


def brief(value: object) -> str:
    """Show a value in at most sixty characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def field_of(value: Any, name: str, default: Any = None) -> Any:
    """Read an attribute of an object, or a key of a mapping."""
    if isinstance(value, dict):
        return value.get(name, default)
    return getattr(value, name, default)


def _plain(values: Sequence[Any]) -> list[float] | None:
    """The same values where all are log-probs, as in all but a few lists; else None."""
    if set(map(type, values)) != {float}:
        return None
    mean = sum(values) / len(values)  # NaN where one is, and then the least of them
    return list(values) if min(mean, *values) > SENTINEL else None


def _shown(value: float | None) -> str:
    """Spell a value that is no log-prob."""
    return "null" if value is None else f"{value:g}"


def _entries(
    engine: str,
    position: Position,
    said: Counter[tuple[Field, Reason, str]],
    request: str | None,
    index: int,
) -> list[tuple[int, float]]:
    """Listed ids with their log-probs, descending, each once."""
    if len(position.ids) != len(position.logprobs):
        raise EngineError(
            engine,
            f"a list must hold as many log-probs as ids, got {len(position.logprobs)} and "
            f"{len(position.ids)}",
            request=request,
            position=index,
        )
    if not set(map(type, position.ids)) <= {int} or max(position.ids, default=0) > _HIGHEST_ID:
        for token in position.ids:
            whole(engine, token, "a listed id", request, index)
    found: dict[int, float] = {}
    plain = _plain(position.logprobs)
    if plain is not None and len(set(position.ids)) == len(plain):
        found = dict(zip(position.ids, plain, strict=True))
        found.pop(-1, None)
        if position.outside:
            found.pop(position.token_id, None)
        return sorted(found.items(), key=lambda entry: -entry[1])
    for token, given in zip(position.ids, position.logprobs, strict=True):
        if token == -1 or (position.outside and token == position.token_id):
            continue
        value, reason = logprob_or_reason(engine, given, request, index)
        if value is None and reason is not None:
            said["topk", reason, _shown(given)] += 1
        elif value == -math.inf:
            said["topk", "truncated", "-inf"] += 1
        elif value is not None:
            before = found.setdefault(token, value)
            if before != value:
                raise EngineError(
                    engine, f"id {token} is listed twice, with log-probs {before:g} and {value:g}",
                    request=request, position=index,
                )  # fmt: skip
    return sorted(found.items(), key=lambda entry: -entry[1])
