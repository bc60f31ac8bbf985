"""vLLM's lists of log-probs: mappings a token, or `FlatLogprobs`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .assemble import brief, field_of, logprob_or_reason, whole
from .checks import AGREEMENT_TOLERANCE
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
    rank: Any = listed.ranks[at]
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise EngineError(
            _ENGINE, f"`rank` must be a whole number of at least 1, got {brief(rank)}",
            request=name, position=position,
        )  # fmt: skip
    own = listed.logprobs[at]
    if rank is not None and own is not None and math.isfinite(own):
        others = [value for value in listed.logprobs if value is not None]
        above = sum(value > own + AGREEMENT_TOLERANCE for value in others)
        below = sum(value < own - AGREEMENT_TOLERANCE for value in others)
        if rank <= above or (rank > len(listed.ids) and below):
            raise EngineError(
                _ENGINE,
                f"the sampled token {token} has rank {rank}, but of the {len(listed.ids)} listed "
                f"log-probs {above} are above its own and {below} below",
                request=name,
                position=position,
            )
    return Own(own, rank, listed.texts[at])


def place_of(own: Own, listed: Listed) -> int:
    """Where the sampled token stands, from 1; the last place possible where there is no rank."""
    if own.rank is not None:
        return own.rank
    if own.logprob is None:
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
    if len(set(ids)) != len(ids):
        raise EngineError(
            _ENGINE, f"an entry must hold each id once, got {brief(list(entry))}", request=name,
            position=position,
        )  # fmt: skip
    if all(value is None or isinstance(value, int | float) for value in values):
        nothing = [None] * len(ids)
        return Listed(ids, _numbers(values, name, position), nothing, nothing)
    if all(isinstance(value, Mapping) for value in values):
        logprobs = [value.get("logprob", value) for value in values]
        ranks = [value.get("rank") for value in values]
        texts = [value.get("decoded_token") for value in values]
    else:
        logprobs = [getattr(value, "logprob", value) for value in values]
        ranks = [getattr(value, "rank", None) for value in values]
        texts = [getattr(value, "decoded_token", None) for value in values]
    return Listed(ids, _numbers(logprobs, name, position), ranks, texts)


def _numbers(values: list[Any], name: str, position: int) -> list[float | None]:
    """Log-probs as they came, as plain numbers; None stays."""
    if set(map(type, values)) <= {float}:
        return values
    for value in values:
        logprob_or_reason(_ENGINE, value, name, position)
    return [None if value is None else float(value) for value in values]


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
    size = len(ids)
    ranks, texts = (
        field_of(logprobs, part) or [None] * size for part in ("ranks", "decoded_tokens")
    )
    for part, column in (("logprobs", values), ("ranks", ranks), ("decoded_tokens", texts)):
        if not isinstance(column, Sequence) or len(column) != size:
            raise EngineError(
                _ENGINE,
                f"FlatLogprobs' `{part}` must be a list of {size}, as long as `token_ids`, got "
                f"{brief(column)}",
                request=name,
            )
    lists: list[Listed | None] = []
    before = 0
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if type(start) is not int or type(end) is not int or not before == start <= end <= size:
            raise EngineError(
                _ENGINE,
                f"FlatLogprobs' entry must begin where the one before ended, at {before}, and "
                f"lie in the {size} values there are, got [{start}, {end})",
                request=name,
                position=position,
            )
        before = end
        if start < end and ids[start] in ids[start + 1 : end]:
            _same(values, start, ids.index(ids[start], start + 1, end), name, position)
            start += 1  # the later has its rank among the top-K
        at = slice(start, end)
        tokens = _token_ids(list(ids[at]), "FlatLogprobs' id", name, position)
        numbers = _numbers(list(values[at]), name, position)
        lists.append(Listed(tokens, numbers, ranks[at], texts[at]) if tokens else None)
    if before != size:
        raise EngineError(
            _ENGINE, f"FlatLogprobs hold {size} values, but their entries end at {before}",
            request=name,
        )  # fmt: skip
    return lists


def _same(values: Sequence[Any], first: int, second: int, name: str, position: int) -> None:
    """The sampled token's two entries say the same."""
    one, other = _numbers([values[first], values[second]], name, position)
    if one == other or (one is not None and other is not None and (
        (math.isnan(one) and math.isnan(other)) or abs(one - other) <= AGREEMENT_TOLERANCE
    )):  # fmt: skip
        return
    raise EngineError(
        _ENGINE,
        f"FlatLogprobs hold the sampled token twice, with log-probs {one} and {other}: they must "
        "be the same",
        request=name,
        position=position,
    )


def _token_ids(values: list[Any], what: str, name: str, position: int) -> list[int]:
    """Ids of a list, checked at once where they are plain."""
    if set(map(type, values)) == {int} and min(values) >= 0:
        return values
    return [whole(_ENGINE, value, what, name, position) for value in values]
