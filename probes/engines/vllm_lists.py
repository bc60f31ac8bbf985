"""vLLM's lists of log-probs: mappings a token, or `FlatLogprobs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .assemble import brief, field_of, whole
from .errors import EngineError

_ENGINE = "vllm"


@dataclass(frozen=True)
class Row:
    """One entry of one token's list."""

    token_id: int
    logprob: Any
    rank: int | None
    text: str | None


def as_lists(logprobs: Any, name: str) -> list[list[Row] | None]:
    """Entries a token, each id once, of either form."""
    if field_of(logprobs, "start_indices") is not None:
        return _flat(logprobs, name)
    if not isinstance(logprobs, Sequence) or isinstance(logprobs, str):
        raise EngineError(
            _ENGINE, f"`logprobs` must be a list or FlatLogprobs, got {brief(logprobs)}",
            request=name,
        )  # fmt: skip
    return [_entry(entry, name, position) for position, entry in enumerate(logprobs)]


def _entry(entry: Any, name: str, position: int) -> list[Row] | None:
    """One token's mapping of ids."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise EngineError(
            _ENGINE, f"an entry must map ids to log-probs, got {brief(entry)}",
            request=name, position=position,
        )  # fmt: skip
    rows = []
    for key, value in entry.items():
        token = whole(_ENGINE, key, "a key of `logprobs`", name, position)
        if isinstance(value, int | float) or value is None:
            rows.append(Row(token, value, None, None))
        else:
            rows.append(
                Row(
                    token,
                    field_of(value, "logprob", value),
                    field_of(value, "rank"),
                    field_of(value, "decoded_token"),
                )
            )
    return rows


def _flat(logprobs: Any, name: str) -> list[list[Row] | None]:
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
    entries: list[list[Row] | None] = []
    ranks = field_of(logprobs, "ranks") or []
    texts = field_of(logprobs, "decoded_tokens") or []
    ends = zip(columns["start_indices"], columns["end_indices"], strict=False)
    size = min(len(columns["token_ids"]), len(columns["logprobs"]))
    if len(columns["start_indices"]) != len(columns["end_indices"]):
        raise EngineError(
            _ENGINE, "FlatLogprobs must have as many start as end indices, got "
            f"{len(columns['start_indices'])} and {len(columns['end_indices'])}",
            request=name,
        )  # fmt: skip
    for position, (start, end) in enumerate(ends):
        if not 0 <= start <= end <= size:
            raise EngineError(
                _ENGINE,
                f"FlatLogprobs' entry must lie in the {size} values there are, got "
                f"[{start}, {end})",
                request=name,
                position=position,
            )
        rows: dict[int, Row] = {}
        for at in range(start, end):
            token = whole(_ENGINE, columns["token_ids"][at], "FlatLogprobs", name, position)
            row = Row(
                token,
                columns["logprobs"][at],
                ranks[at] if at < len(ranks) else None,
                texts[at] if at < len(texts) else None,
            )
            rows[token] = row  # the later has its rank among the top-K
        entries.append(list(rows.values()) or None)
    return entries


def place_of(own: Row, rows: list[Row]) -> int:
    """Where the sampled token stands, from 1; the last place possible where there is no rank."""
    if own.rank is not None:
        return own.rank
    if not isinstance(own.logprob, int | float):
        return len(rows)
    return sum(row is own or row.logprob is None or not row.logprob < own.logprob for row in rows)


def width_of(owns: Sequence[Row | None], entries: Sequence[list[Row] | None]) -> int:
    """K, told from the lists: K long where the sampled token is in the top-K, else K + 1.

    By the rank of the sampled token a list of n is K + 1 long where it exceeds n (and where it
    is n, the list is the true top-n). Without ranks one that has it last may be either, so it
    proves n − 1.
    """
    pairs = [
        (own, rows)
        for own, rows in zip(owns, entries, strict=True)
        if own is not None and rows is not None
    ]
    if all(own.rank is not None for own, _ in pairs):
        return min(
            (len(rows) - (place_of(own, rows) > len(rows)) for own, rows in pairs), default=0
        )
    return max(len(rows) - (place_of(own, rows) >= len(rows)) for own, rows in pairs)
