"""Rows of one file as NumPy arrays, and the way there and back from Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .column import Column
from .columns import COLUMNS
from .errors import DumpError


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of one file.

    Attributes
    ----------
    path : str
        The file.
    first_row : int
        Row of the file, counted from 0, that the batch begins with.
    columns : mapping of str to array
        Arrays of shape (token,), for vectors (token, topk), in their stored types; text as
        objects. They may be read-only. What is NULL holds NaN, 0, −1 among the ids, "" or
        False.
    vectors : array of bool, shape (token,)
        False where the row's vectors are NULL; True everywhere if no vector was read.
    nulls : mapping of str to array of bool, shape (token,)
        Where a column is NULL and must not be, for the columns where that is anywhere.
    """

    path: str
    first_row: int
    columns: Mapping[str, NDArray[Any]]
    vectors: NDArray[np.bool_]
    nulls: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.vectors)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Get one column."""
        return self.columns[name]


def from_arrow(
    found: pa.RecordBatch, names: Iterable[str], path: str, first_row: int, top_k: int
) -> Batch:
    """Take the named columns of an Arrow batch, whose types were accepted."""
    columns: dict[str, NDArray[Any]] = {}
    nulls: dict[str, NDArray[np.bool_]] = {}
    missing: dict[str, NDArray[np.bool_] | None] = {}
    holes: dict[str, NDArray[np.bool_] | None] = {}
    for name in names:
        array = found.column(found.schema.get_field_index(name))
        column = COLUMNS[name]
        try:
            if column.is_vector:
                values, absent, hole = _vectors(array, top_k)
                missing[name], holes[name] = absent, hole
                columns[name] = _narrowed(values, column.dtype, -1)
                continue
            values, valid = _texts(array) if column.is_text else _scalars(array)
            columns[name] = _narrowed(values, column.dtype, 0)
        except _RowError as error:
            row, message = error.args
            raise DumpError(path, message, row=first_row + row, column=name) from None
        if valid is not None and not column.nullable:
            nulls[name] = ~valid
    vectors = np.ones(found.num_rows, dtype=np.bool_)
    absent_anywhere = [absent for absent in missing.values() if absent is not None]
    if absent_anywhere:
        vectors = ~np.logical_or.reduce(absent_anywhere)
    for name, hole in holes.items():
        # NULL beside vectors that are there, or one NULL in a vector where it would be read.
        bad = np.zeros(found.num_rows, dtype=np.bool_)
        absent = missing[name]
        if absent is not None and not all(
            other is not None and np.array_equal(absent, other) for other in missing.values()
        ):
            everywhere = np.logical_and.reduce(
                [np.zeros_like(absent) if other is None else other for other in missing.values()]
            )
            bad |= absent & ~everywhere
        if hole is not None:
            if name != "topk_ids" and "topk_ids" in columns:
                hole &= columns["topk_ids"] >= 0
            bad |= hole.any(axis=1) if absent is None else hole.any(axis=1) & ~absent
        if bad.any():
            nulls[name] = bad
    return Batch(path, first_row, columns, vectors, nulls)


class _RowError(ValueError):
    """A row whose value has no place in the column: its number in the batch, and what is wrong."""


def _narrowed(values: NDArray[Any], dtype: np.dtype[Any], absent: int) -> NDArray[Any]:
    """Values in the contract's type, where another writer took another one."""
    if values.dtype == dtype:
        return values
    if dtype.kind == "i" and values.size:
        if values.dtype.kind == "f":  # pandas makes them of integers with NULL, which is NaN
            values = np.where(np.isnan(values), absent, values)
        limits = np.iinfo(dtype)
        bad = ~((values >= limits.min) & (values <= limits.max) & (values == np.trunc(values)))
        if bad.any():
            raise _RowError(int(bad.argmax()) // bad[0].size, f"must be {dtype.name}")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused
        return values.astype(dtype)


def to_arrow(
    columns: Mapping[str, NDArray[Any]], vectors: NDArray[np.bool_], schema: pa.Schema
) -> pa.Table:
    """Make an Arrow table of checked columns, each in its stored type."""
    arrays = []
    for wanted in schema:
        column, values = COLUMNS[wanted.name], columns[wanted.name]
        if column.is_text:
            array = pa.array(values.tolist(), pa.string()).dictionary_encode()
        elif column.is_vector:
            items = _to_array(np.ascontiguousarray(values).reshape(-1), column)
            mask = _bools(~vectors) if wanted.nullable else None
            array = pa.FixedSizeListArray.from_arrays(items, type=wanted.type, mask=mask)
        else:
            array = _to_array(values, column)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def _to_array(values: NDArray[Any], column: Column) -> pa.Array:
    """Put numbers into Arrow; by buffers, since `pyarrow.array` may import pandas."""
    if column.dtype == np.bool_:
        return _bools(values)
    kind = pa.from_numpy_dtype(column.dtype)
    values = np.ascontiguousarray(values, dtype=column.dtype)
    present = None
    if column.nullable and (absent := np.isnan(values)).any():
        present = pa.py_buffer(np.packbits(~absent, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [present, pa.py_buffer(values)])


def _bools(values: NDArray[np.bool_]) -> pa.Array:
    """Put truth values into Arrow."""
    packed = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(packed)])


def _bits(buffer: pa.Buffer, offset: int, length: int) -> NDArray[np.bool_]:
    """Unpack Arrow's bits."""
    first = offset // 8
    packed = np.frombuffer(buffer, np.uint8)[first : (offset + length + 7) // 8]
    bits = np.unpackbits(packed, bitorder="little")
    return bits[offset - 8 * first :][:length].view(np.bool_)


def _valid(array: pa.Array) -> NDArray[np.bool_] | None:
    """Where an array is not NULL; None if it is so nowhere."""
    if array.null_count == 0:
        return None
    buffer = array.buffers()[0]
    if buffer is None:
        return np.zeros(len(array), dtype=np.bool_)
    return _bits(buffer, array.offset, len(array))


def _scalars(array: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Numbers or bools by their buffers, since `Array.to_numpy` may import pandas."""
    length, offset = len(array), array.offset
    valid = _valid(array)
    data = array.buffers()[1]
    values: NDArray[Any]
    if pa.types.is_boolean(array.type):
        dtype = np.dtype(np.bool_)
        values = np.zeros(0, dtype) if data is None else _bits(data, offset, length)
    else:
        dtype = np.dtype(array.type.to_pandas_dtype())
        values = np.zeros(0, dtype)
        if data is not None:
            values = np.frombuffer(data, dtype)[offset : offset + length]
    if valid is not None:
        absent = np.nan if dtype.kind == "f" else 0
        values = np.where(valid, values if len(values) else np.zeros(length, dtype), absent)
        values = values.astype(dtype)
    return values, valid


def _texts(array: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Strings as objects; NULL may be a row's, or a value's that rows point to."""
    if pa.types.is_dictionary(array.type):  # one string for all rows that point to it
        texts, found = array.dictionary.to_pylist(), array.indices.to_pylist()
        found = [None if each is None else texts[each] for each in found]
    else:
        found = array.to_pylist()
    values = np.empty(len(found), dtype=object)
    values[:] = found
    if None not in found:
        return values, None
    valid = np.asarray([text is not None for text in found], dtype=np.bool_)
    values[~valid] = ""
    return values, valid


def _vectors(
    array: pa.Array, top_k: int
) -> tuple[NDArray[Any], NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
    """K values a row; which rows are NULL, if any; which values are, if any."""
    row_valid = _valid(array)
    # `flatten` would leave out NULL rows and import pyarrow.compute.
    if pa.types.is_fixed_size_list(array.type):
        values, valid = _scalars(array.values.slice(array.offset * top_k, len(array) * top_k))
    else:
        values, valid = _of_lists(array, row_valid, top_k)
    values = values.reshape(-1, top_k)
    holes = None if valid is None else ~valid.reshape(-1, top_k)
    if row_valid is None and holes is None:
        return values, None, None
    values = values.copy()
    absent = np.nan if values.dtype.kind == "f" else -1
    if holes is not None:
        values[holes] = absent
    if row_valid is None:
        return values, None, holes
    values[~row_valid] = absent
    return values, ~row_valid, holes


def _of_lists(
    array: pa.Array, row_valid: NDArray[np.bool_] | None, top_k: int
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Values of lists that may differ in length and do not, K for a NULL row too."""
    offset = np.int64 if pa.types.is_large_list(array.type) else np.int32
    ends = np.frombuffer(array.buffers()[1], offset)[array.offset :][: len(array) + 1]
    there = np.ones(len(array), dtype=np.bool_) if row_valid is None else row_valid
    lengths = np.diff(ends)
    wrong = there & (lengths != top_k)
    if wrong.any():
        row = int(wrong.argmax())
        raise _RowError(row, f"must hold {top_k} values, found {lengths[row]}")
    values, valid = _scalars(array.values.slice(int(ends[0]), int(ends[-1] - ends[0])))
    if there.all():
        return values, valid
    kept = np.repeat(there, lengths)  # nothing, mostly, belongs to a NULL row
    spread = np.zeros((len(array), top_k), dtype=values.dtype)
    spread[there] = values[kept].reshape(-1, top_k)
    if valid is not None:
        known = np.ones(spread.shape, dtype=np.bool_)
        known[there] = valid[kept].reshape(-1, top_k)
        valid = known
    return spread, valid
