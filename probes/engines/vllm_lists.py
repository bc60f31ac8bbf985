"""vLLM's lists of log-probs: mappings a token, or `FlatLogprobs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .assemble import brief, field_of, whole
from .errors import EngineError

_ENGINE = "vllm"


@dataclass(frozen=True)
class Listed:
    """One token's list, each id once, in the order that it came in."""

    ids: list[int]
    logprobs: list[Any]
    ranks: Sequence[int | None]
    texts: Sequence[str | None]


@dataclass(frozen=True)
class Own:
    """The sampled token's entry in its list."""

    logprob: Any
    rank: int | None
    text: str | None


def as_lists(logprobs: Any, name: str) -> list[Listed | None]:
    """Read one list a token, of either form.

    Parameters
    ----------
    logprobs
        A sequence of mappings, or FlatLogprobs.
    name
        The request, for the error.

    Returns
    -------
    list of Listed or None
        None where the engine gave nothing, as for a prompt's first token.

    Raises
    ------
    EngineError
        What has neither form.
    """
    if field_of(logprobs, "start_indices") is not None:
        return _flat(logprobs, name)
    if not isinstance(logprobs, Sequence) or isinstance(logprobs, str):
        raise EngineError(
            _ENGINE, f"`logprobs` must be a list or FlatLogprobs, got {brief(logprobs)}",
            request=name,
        )  # fmt: skip
    return [_mapping(entry, name, position) for position, entry in enumerate(logprobs)]


def own_of(token: int, listed: Listed | None, name: str, position: int) -> Own | None:
    """Find the sampled token's entry; None where there is no list.

    Raises
    ------
    EngineError
        The list does not hold the sampled token.
    """
    if listed is None:
        return None
    if token not in listed.ids:
        raise EngineError(
            _ENGINE,
            f"the entry must hold the sampled token {token}, got ids {brief(listed.ids)}: are "
            "`token_ids` and `logprobs` of one completion?",
            request=name,
            position=position,
        )
    at = listed.ids.index(token)
    return Own(listed.logprobs[at], listed.ranks[at], listed.texts[at])


def place_of(own: Own, listed: Listed) -> int:
    """Where the sampled token stands, from 1; the last place possible where there is no rank."""
    if own.rank is not None:
        return own.rank
    if not isinstance(own.logprob, int | float):
        return len(listed.ids)
    return sum(value is None or not value < own.logprob for value in listed.logprobs)


def width_of(owns: Sequence[Own | None], lists: Sequence[Listed | None]) -> int:
    """K, told from the lists: K long where the sampled token is in the top-K, else K + 1.

    By the rank of the sampled token a list of n is K + 1 long where it exceeds n (and where it
    is n, the list is the true top-n). Without ranks one that has it last may be either, so it
    proves n − 1.
    """
    places = [
        (place_of(own, listed), len(listed.ids), own.rank is None)
        for own, listed in zip(owns, lists, strict=True)
        if own is not None and listed is not None
    ]
    if any(without for _, _, without in places):
        return max(length - (place >= length) for place, length, _ in places)
    return min((length - (place > length) for place, length, _ in places), default=0)


def _mapping(entry: Any, name: str, position: int) -> Listed | None:
    """One token's mapping of ids, to numbers or to objects (or mappings) with `logprob`."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise EngineError(
            _ENGINE, f"an entry must map ids to log-probs, got {brief(entry)}",
            request=name, position=position,
        )  # fmt: skip
    ids = _token_ids(list(entry), "a key of `logprobs`", name, position)
    values = list(entry.values())
    if all(value is None or isinstance(value, int | float) for value in values):
        nothing = [None] * len(ids)
        return Listed(ids, values, nothing, nothing)
    if all(isinstance(value, Mapping) for value in values):
        logprobs = [value.get("logprob", value) for value in values]
        ranks = [value.get("rank") for value in values]
        texts = [value.get("decoded_token") for value in values]
    else:
        logprobs = [getattr(value, "logprob", value) for value in values]
        ranks = [getattr(value, "rank", None) for value in values]
        texts = [getattr(value, "decoded_token", None) for value in values]
    return Listed(ids, logprobs, ranks, texts)


def _flat(logprobs: Any, name: str) -> list[Listed | None]:
    """Entries of FlatLogprobs, without the second of the sampled token."""
    columns = {
        part: field_of(logprobs, part)
        for part in ("start_indices", "end_indices", "token_ids", "logprobs")
    }
    for part, values in columns.items():
        if not isinstance(values, Sequence):
            raise EngineError(
                _ENGINE, f"FlatLogprobs must have a list `{part}`, got {brief(values)}",
                request=name,
            )  # fmt: skip
    starts, ends, ids, values = columns.values()
    if len(starts) != len(ends):
        raise EngineError(
            _ENGINE,
            f"FlatLogprobs must have as many start as end indices, got {len(starts)} and "
            f"{len(ends)}",
            request=name,
        )
    size = min(len(ids), len(values))
    ranks, texts = (
        column if isinstance(column, Sequence) and len(column) >= size else [None] * size
        for column in (field_of(logprobs, "ranks"), field_of(logprobs, "decoded_tokens"))
    )
    lists: list[Listed | None] = []
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not 0 <= start <= end <= size:
            raise EngineError(
                _ENGINE,
                f"FlatLogprobs' entry must lie in the {size} values there are, got "
                f"[{start}, {end})",
                request=name,
                position=position,
            )
        if start < end and ids[start] in ids[start + 1 : end]:
            start += 1  # the later has its rank among the top-K
        at = slice(start, end)
        tokens = _token_ids(list(ids[at]), "FlatLogprobs' id", name, position)
        lists.append(Listed(tokens, list(values[at]), ranks[at], texts[at]) if tokens else None)
    return lists


def _token_ids(values: list[Any], what: str, name: str, position: int) -> list[int]:
    """Ids of a list, checked at once where they are plain."""
    if set(map(type, values)) == {int} and min(values) >= 0:
        return values
    return [whole(_ENGINE, value, what, name, position) for value in values]
