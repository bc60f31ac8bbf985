"""One record of a file of scores: the fields that it may have, and their values as arrays.

A record is a response. Its fields are named as the columns of a dump, and hold a list with an
entry a token; `step`, `group` and `sequence` hold one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import COLUMNS

from .faults import BadValueError, Fault, Faults, Origin

Key = tuple[int, int | str]
"""Step and sequence, which name a response within a seed."""

NAMES: Final = ("step", "group", "sequence")
"""Fields of one value."""

SCORES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "logprob": "{}_logprob",
        "topk_logprobs": "topk_{}_logprobs",
        "collision": "{}_collision",
        "entropy": "{}_entropy",
    }
)
"""Fields of a file of scores, and the column that each becomes before ("pre") or after the step
("post")."""

OTHERS: Final[Mapping[str, str]] = MappingProxyType({"response_mask": "b", "prompt_ids": "i"})
"""Fields that are no columns, with NumPy's kind of their values."""

INT32: Final = range(-(2**31), 2**31)
"""Numbers that a step, a group or a response can have."""

_LARGEST: Final = np.finfo(np.float64).max.item()
_INFINITE: Final = {"-inf": -np.inf, "-Infinity": -np.inf}
_KINDS: Final = {"f": "numbers", "i": "whole numbers", "b": "true or false (or 1 or 0)"}


@dataclass(frozen=True, eq=False)
class Lists:
    """A list of numbers for every token.

    Attributes
    ----------
    values : ndarray, shape (token, width)
        NaN, among ids −1, behind the end of a list.
    lengths : ndarray of int, shape (token,)
        −1 where a token has no list.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, flat: NDArray[Any], lengths: NDArray[np.int64]) -> Lists:
        """Put the values of all lists, one after the other, into rows."""
        width = int(lengths.max(initial=0))
        empty = np.nan if flat.dtype.kind == "f" else -1
        values = np.full((len(lengths), width), empty, dtype=flat.dtype)
        values[np.arange(width) < lengths[:, None]] = flat
        return cls(values, lengths)

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.lengths)


@dataclass(frozen=True, eq=False)
class Record:
    """One response in one file.

    Attributes
    ----------
    origin : Origin
        Where it stands.
    step : int
        Optimizer step.
    sequence, group : int or str
        Response and prompt as the file names them; no group where it names none.
    columns : mapping of str to ndarray or Lists
        By field; `advantage` may be of shape () for the whole response.
    """

    origin: Origin
    step: int
    sequence: int | str
    group: int | str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Step and sequence."""
        return self.step, self.sequence

    def fault(self, message: str, *, position: int | None = None, name: str | None = None) -> Fault:
        """Say what is wrong with it."""
        return Fault(self.origin, message, self.sequence, position, name)


def make_record(
    raw: Mapping[str, Any], origin: Origin, faults: Faults, *, score: bool, step: int
) -> Record | None:
    """Take the known fields of a record.

    Parameters
    ----------
    raw : mapping
        Fields as JSON gives them, or as arrays and `Lists`. A field that is None is not there.
    origin : Origin
        Where it stands.
    faults : Faults
        Takes what is wrong.
    score : bool
        Whether the file is one of scores, whose fields are `SCORES`.
    step : int
        Of records that say none.

    Returns
    -------
    Record or None
        None where anything is wrong with it.
    """
    before = faults.count
    given = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in raw.items()
        if value is not None
    }
    names: dict[str, Any] = {"step": step}
    for name in NAMES:
        value = given.get(name)
        allowed = (int,) if name == "step" else (int, str)
        if value is None and name == "sequence":
            faults.add(Fault(origin, "is missing: it names the response", field=name))
        elif value is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
            words = "a whole number" + ("" if name == "step" else " or a text")
            faults.add(Fault(origin, f"must be {words}, found {_brief(value)}", field=name))
        elif isinstance(value, int) and value not in INT32:
            faults.add(Fault(origin, f"must be an int32, found {value}", field=name))
        elif value is not None:
            names[name] = value
    columns: dict[str, Any] = {}
    for name, kind in _fields(score).items():
        if name not in given:
            continue
        try:
            columns[name] = _value(name, given[name], kind)
        except BadValueError as error:
            where = Fault(origin, str(error), names.get("sequence"), error.index, name)
            faults.add(where)
    if faults.count > before:
        return None
    return Record(origin, **names, columns=columns)


def unknown_fields(raw: Mapping[str, Any], *, score: bool) -> set[str]:
    """Names that a record has and that mean nothing."""
    return set(raw) - set(NAMES) - _fields(score).keys()


def is_field(name: str) -> bool:
    """Whether a name means anything, in files of responses or of scores."""
    return name in NAMES or name in _FIELDS or name in _SCORE_FIELDS


def _fields(score: bool) -> dict[str, str]:
    """Fields with an entry a token, and the kind of their values; "[]" before it for lists."""
    return _SCORE_FIELDS if score else _FIELDS


def _kind(column: str) -> str:
    """The kind of a column's values."""
    known = COLUMNS[column]
    return ("[]" if known.is_vector else "") + ("O" if known.is_text else known.dtype.kind)


_FIELDS: Final = {
    name: _kind(name)
    for name, column in COLUMNS.items()
    # What the writer fills, and what needs a description of how sequences were chosen.
    if name not in (*NAMES, "weight") and not column.derived
} | dict(OTHERS)
_SCORE_FIELDS: Final = {
    **{name: _kind(column.format("pre")) for name, column in SCORES.items()},
    **{name: _kind(name) for name in ("position", "token_id", "topk_ids")},
}


def _value(name: str, value: Any, kind: str) -> Any:
    """One field."""
    if kind == "O":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise BadValueError("must be a list of texts")
        return np.array(value, dtype=object)
    if kind.startswith("[]"):
        return lists(value, kind[2:])
    if name == "advantage" and not isinstance(value, list | np.ndarray):
        return numbers([value], "f")[0]
    return numbers(value, kind)


def numbers(value: Any, kind: str) -> NDArray[Any]:
    """Turn a list of numbers into an array.

    Parameters
    ----------
    value : list or ndarray
        −∞ may be the text "-inf", since JSON has no number for it; None among floats is NaN.
    kind : {"f", "i", "b"}
        float64, int64 or bool.

    Returns
    -------
    ndarray, shape (entry,)
        Values unchecked.

    Raises
    ------
    BadValueError
        No list, or an entry of another type; names the entry.

    Examples
    --------
    >>> numbers([-0.5, "-inf", None], "f").tolist()
    [-0.5, -inf, nan]
    """
    if isinstance(value, np.ndarray):
        return _checked_array(value, kind)
    if not isinstance(value, list):
        raise BadValueError(f"must be a list of {_KINDS[kind]}, found {_brief(value)}")
    types = set(map(type, value))
    if kind == "f":
        if not types <= {float, int}:
            value = [_number(entry, index) for index, entry in enumerate(value)]
        try:
            return np.array(value, dtype=np.float64)
        except OverflowError:
            index = next(at for at, entry in enumerate(value) if abs(entry) > _LARGEST)
            raise BadValueError("must be a number that a float can hold", index) from None
    plain = {int} if kind == "i" else {bool, int}
    if not types <= plain:
        index = next(at for at, entry in enumerate(value) if type(entry) not in plain)
        raise BadValueError(f"must be {_KINDS[kind]}, found {_brief(value[index])}", index)
    try:
        return _checked_array(np.array(value, dtype=np.int64 if kind == "i" else None), kind)
    except OverflowError:
        raise BadValueError("holds a number beyond 64 bits") from None


def lists(value: Any, kind: str) -> Lists:
    """Turn a list of lists of numbers into rows; parameters and raises as `numbers`.

    Examples
    --------
    >>> found = lists([[7, 3], None, [5]], "i")
    >>> found.values.tolist(), found.lengths.tolist()
    ([[7, 3], [-1, -1], [5, -1]], [2, -1, 1])
    """
    if isinstance(value, Lists):
        return Lists(_checked_array(value.values, kind), value.lengths)
    if not isinstance(value, list):
        raise BadValueError(f"must be a list of lists of {_KINDS[kind]}, found {_brief(value)}")
    for index, row in enumerate(value):
        if row is not None and not isinstance(row, list):
            raise BadValueError(f"must be a list of {_KINDS[kind]}, found {_brief(row)}", index)
    lengths = np.array([-1 if row is None else len(row) for row in value], dtype=np.int64)
    flat = [entry for row in value if row for entry in row]
    try:
        return Lists.of(numbers(flat, kind), lengths)
    except BadValueError as error:
        if error.index is None:
            raise
        ends = np.maximum(lengths, 0).cumsum()
        raise BadValueError(
            str(error), int(np.searchsorted(ends, error.index, side="right"))
        ) from None


def _number(entry: Any, index: int) -> float | int:
    """One entry of a list of numbers; a whole number may be beyond all floats."""
    if entry is None:
        return float("nan")
    if isinstance(entry, str) and entry in _INFINITE:
        return float(_INFINITE[entry])
    if isinstance(entry, bool) or not isinstance(entry, float | int):
        raise BadValueError(f"must be a number, found {_brief(entry)}", index)
    return entry if isinstance(entry, int) else float(entry)


def _checked_array(value: NDArray[Any], kind: str) -> NDArray[Any]:
    """An array in the wide type of its kind."""
    found = value.dtype.kind
    if kind == "f" and found in "fiu":
        return value.astype(np.float64)
    if kind == "i" and found in "iu":
        return value.astype(np.int64)
    if kind == "b" and found == "b":
        return value
    if kind == "b" and found in "iu":
        bad = (value != 0) & (value != 1)
        if not bad.any():
            return value.astype(np.bool_)
        index = int(bad.argmax())
        raise BadValueError(f"must be {_KINDS[kind]}, found {value[index]}", index)
    if not value.size:  # an empty list has no type of its own
        return value.astype({"f": np.float64, "i": np.int64, "b": np.bool_}[kind])
    nan = kind == "i" and found == "f" and np.isnan(value).any()
    raise BadValueError(f"must be {_KINDS[kind]}, found {'null' if nan else value.dtype}")


def _brief(value: Any) -> str:
    """A value as a message shows it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def merged(fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records of single tokens as one record with an entry a token.

    Parameters
    ----------
    fields : sequence of mappings
        Of one response, in order.

    Returns
    -------
    dict
        `NAMES` and `prompt_ids` as in the first token.
    """
    whole = (*NAMES, "prompt_ids")
    return {
        name: fields[0].get(name) if name in whole else [each.get(name) for each in fields]
        for name in dict.fromkeys(name for each in fields for name in each)
    }
