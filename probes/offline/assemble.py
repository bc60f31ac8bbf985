"""From the records of one response to rows of a dump."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import COLUMNS, READINGS, REQUIRED, VECTORS

from .faults import Faults
from .records import OTHERS, SCORES, Lists, Record

REQUIRED_FIELDS: Final = ("token_id", "advantage", "behavior_logprob")
"""What the records of a response must say, beside which response it is."""

_NO_COLUMNS: Final = (*OTHERS, "position")
_HINTS: Final = {
    "advantage": "; add it by a file of `--join`",
    "behavior_logprob": ": what the engine returned for the sampled token",
}
_LISTS: Final = tuple(name for name in VECTORS if name != "topk_ids")


@dataclass(frozen=True, eq=False)
class Response:
    """The rows of one response, and where each column came from.

    Attributes
    ----------
    record : Record
        The first of its records.
    columns : mapping of str to ndarray
        By column of the dump, without those that name the response; vectors of shape
        (token, topk), NaN and −1 at padding.
    vectors : ndarray of bool, shape (token,)
        Tokens that have lists.
    sources : mapping of str to (Record, str)
        The record of each column and the field's name in it.
    left_out : int
        Tokens that were not sampled, by `response_mask`.
    """

    record: Record
    columns: dict[str, NDArray[Any]]
    vectors: NDArray[np.bool_]
    sources: dict[str, tuple[Record, str]]
    left_out: int

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.vectors)


def assemble(
    record: Record,
    others: Mapping[str, Record],
    *,
    top_k: int,
    readings: tuple[str, ...],
    faults: Faults,
) -> Response | None:
    """Put the records of a response together.

    Parameters
    ----------
    record : Record
        What the behavior policy said.
    others : mapping of str to Record
        Of the same response: "join" with more fields, "pre" and "post" with scores.
    top_k : int
        K.
    readings : tuple of str
        Readings of the policy that the dump will have.
    faults : Faults
        Takes what is wrong.

    Returns
    -------
    Response or None
        None where anything is wrong; values are unchecked but for what joins them.
    """
    before = faults.count
    sources = {name: (record, name) for name in record.columns}
    values = dict(record.columns)
    for role, other in others.items():
        renamed = SCORES if role in READINGS else {}
        for name, value in other.columns.items():
            column = renamed.get(name, name).format(role)
            if column not in values:
                sources[column], values[column] = (other, name), value
            elif not _same(values[column], value):
                where = sources[column][0].origin
                faults.add(other.fault(f"must be as in {where}", name=name))
    _complete(record, values, readings, faults)
    if faults.count > before:
        return None
    length = len(values["token_id"])
    if values["advantage"].ndim == 0:
        values["advantage"] = np.full(length, values["advantage"])
    for name, value in values.items():
        if len(value) != length and name != "prompt_ids":
            origin, field = sources[name]
            faults.add(
                origin.fault(
                    f"must have an entry for each of the {length} tokens, found {len(value)}",
                    name=field,
                )
            )
    if faults.count > before:
        return None
    if "position" in values:
        _check_places(*sources["position"], values["position"], faults)
    ids = _trimmed(values.get("topk_ids", _none(length, -1)))
    for name in (
        each for each in _LISTS if each in values or COLUMNS[each].reading in ("", *readings)
    ):
        known = values.setdefault(name, _none(length, np.nan))
        origin, field = sources.get(name, (record, name))
        _check_lengths(origin, field, known, ids, faults)
    _check_width(*sources.get("topk_ids", (record, "topk_ids")), ids, top_k, faults)
    if faults.count > before:
        return None
    sampled = values.get("response_mask", np.ones(length, dtype=np.bool_))
    columns = _rows(values, ids, top_k, sampled)
    return Response(
        record,
        columns,
        ids.lengths[sampled] >= 0,
        sources,
        int(length - sampled.sum()),
    )


def _rows(
    values: Mapping[str, Any], ids: Lists, top_k: int, sampled: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """Columns of the tokens that were sampled."""
    length = len(sampled)
    columns: dict[str, NDArray[Any]] = {
        "position": values.get("position", np.arange(length)),
        "in_loss": values.get("in_loss", np.ones(length, dtype=np.bool_)),
        "topk_ids": _padded(ids, top_k),
    }
    for name, value in values.items():
        if name not in _NO_COLUMNS and name not in columns:
            columns[name] = _padded(value, top_k) if isinstance(value, Lists) else value
    return {name: value[sampled] for name, value in columns.items()}


def _complete(
    record: Record, values: dict[str, Any], readings: tuple[str, ...], faults: Faults
) -> None:
    """Refuse a response that lacks a field."""
    for name in REQUIRED_FIELDS:
        if name not in values:
            faults.add(record.fault(f"is missing{_HINTS.get(name, '')}", name=name))
    wanted = ["topk_behavior_logprobs"] if "topk_ids" in values else []
    for reading in readings:
        wanted += [
            name
            for name in READINGS[reading]
            if not COLUMNS[name].is_vector or "topk_ids" in values
        ]
    for name in wanted:
        if name not in values:
            faults.add(record.fault("is missing in all of its records", name=name))
    for name in (each for each in REQUIRED if each in values and each in _LISTS):
        if "topk_ids" not in values:
            faults.add(record.fault("needs `topk_ids`, which is missing", name=name))


def _check_lengths(record: Record, name: str, found: Lists, ids: Lists, faults: Faults) -> None:
    """Every list of log-probs belongs to the list of ids of its token."""
    wanted, there = ids.lengths, found.lengths
    padded = (there > wanted) & (wanted >= 0)
    # More entries are padding where nothing stands in them.
    behind = np.arange(found.values.shape[1]) >= np.maximum(wanted, 0)[:, None]
    padded &= ~(behind & ~np.isnan(found.values)).any(axis=1)
    for at in np.flatnonzero((there != wanted) & ~padded).tolist():
        have = "no list" if there[at] < 0 else f"{there[at]} log-probs"
        need = "no ids" if wanted[at] < 0 else f"{wanted[at]} ids"
        faults.add(
            record.fault(
                f"must have a log-prob for each of `topk_ids`, found {have} for {need}",
                position=at,
                name=name,
            )
        )


def _check_places(record: Record, name: str, places: NDArray[np.int64], faults: Faults) -> None:
    """No two tokens stand at one place."""
    _, first = np.unique(places, return_index=True)
    again = np.setdiff1d(np.arange(len(places)), first)
    if len(again):
        message = f"must be another one for each token, found {places[again[0]]} twice"
        faults.add(record.fault(message, name=name))


def _check_width(record: Record, name: str, ids: Lists, top_k: int, faults: Faults) -> None:
    """No list is longer than K."""
    for at in np.flatnonzero(ids.lengths > top_k).tolist():
        found = ids.lengths[at]
        faults.add(
            record.fault(
                f"must hold K = {top_k} ids at most, found {found}: give a larger K, or "
                "cut the lists",
                position=at,
                name=name,
            )
        )


def _trimmed(ids: Lists) -> Lists:
    """Lists of ids without the −1 at their ends."""
    places = np.arange(1, ids.values.shape[1] + 1)
    used = np.where(ids.values >= 0, places, 0).max(axis=1, initial=0)
    return Lists(ids.values, np.where(ids.lengths < 0, -1, used))


def _padded(lists: Lists, top_k: int) -> NDArray[Any]:
    """Lists of K entries; what is beyond K is padding."""
    values = lists.values[:, :top_k]
    empty = np.nan if values.dtype.kind == "f" else -1
    return np.pad(values, ((0, 0), (0, top_k - values.shape[1])), constant_values=empty)


def _none(length: int, empty: float) -> Lists:
    """No lists at all."""
    values = np.full((length, 0), empty, dtype=np.int64 if empty == -1 else np.float64)
    return Lists(values, np.full(length, -1, dtype=np.int64))


def _same(one: Any, other: Any) -> bool:
    """Whether two files say the same of a field."""
    if isinstance(one, Lists) and isinstance(other, Lists):
        width = max(one.values.shape[1], other.values.shape[1])
        return len(one) == len(other) and np.array_equal(
            _padded(one, width), _padded(other, width), equal_nan=one.values.dtype.kind == "f"
        )
    floats = getattr(one, "dtype", np.dtype(object)).kind == "f"
    return bool(np.array_equal(one, other, equal_nan=floats))
