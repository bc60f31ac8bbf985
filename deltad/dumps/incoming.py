"""Rows as a recorder gives them, into the types in which they are stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import Batch
from .columns import COLUMNS, READINGS, REQUIRED, VECTORS
from .errors import DumpError


def incoming(
    columns: Mapping[str, NDArray[Any]],
    vectors_stored: NDArray[np.bool_] | None,
    *,
    top_k: int,
    label: str,
    readings: Collection[str] = tuple(READINGS),
) -> Batch:
    """Convert and arrange what `DumpWriter.append` is given.

    Parameters
    ----------
    columns : mapping of str to array
        Columns of shape (token,), vectors (token, topk).
    vectors_stored : array of bool, shape (token,), optional
        False where the vectors are to be NULL.
    top_k : int
        K.
    label : str
        Says in errors which rows these are.
    readings : collection of {"pre", "post"}
        Readings of the policy that were made; columns of no other may be given.

    Returns
    -------
    Batch
        Columns of their own, in the contract's order and types, NaN at padding and in rows
        without vectors; values unchecked.

    Raises
    ------
    DumpError
        A column is missing, unknown, or of a wrong type or shape.
    """
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise DumpError(label, "is not a column of a dump", column=unknown[0])
    for name in REQUIRED:
        made = COLUMNS[name].reading in ("", *readings)
        if made and name not in columns:
            raise DumpError(label, "is missing", column=name)
        if not made and name in columns:
            raise DumpError(
                label,
                f"belongs to the reading {COLUMNS[name].reading!r}, which the writer was made "
                "without",
                column=name,
            )
    taken = {name: _stored(columns[name], name, label) for name in COLUMNS if name in columns}
    rows = len(taken["step"]) if taken["step"].ndim else 0
    for name, values in taken.items():
        shape = (rows, top_k) if COLUMNS[name].is_vector else (rows,)
        if values.shape != shape:
            raise DumpError(label, f"must be of shape {shape}, got {values.shape}", column=name)
    vectors = np.ones(rows, dtype=np.bool_)
    if vectors_stored is not None:
        vectors = np.array(vectors_stored)
        if vectors.dtype != np.bool_ or vectors.shape != (rows,):
            raise DumpError(
                label,
                f"`vectors_stored` must be bool of shape {(rows,)}, got {vectors.dtype} of "
                f"{vectors.shape}",
            )
    ids = taken["topk_ids"]  # arrays of our own, here as below
    if not vectors.all():
        ids[~vectors] = -1
    padding = ids < 0
    if padding.any():
        for name in (each for each in VECTORS[1:] if each in taken):
            taken[name][padding] = np.nan
    return Batch(label, 0, taken, vectors)


def _stored(values: Any, name: str, label: str) -> NDArray[Any]:
    """Values in the type in which they are stored; nothing is rounded but 64-bit floats."""
    column = COLUMNS[name]
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DumpError(label, f"must be a NumPy array ({error})", column=name) from error
    dtype = column.dtype
    if column.is_text:
        if found.dtype.kind not in "OU" or not all(isinstance(text, str) for text in found.flat):
            raise DumpError(label, f"must hold strings, got {found.dtype}", column=name)
        try:
            "".join(found.flat).encode()
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise DumpError(label, f"must be UTF-8 ({error})", column=name) from error
        return found.astype(object)
    if dtype.kind == "i" and found.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if found.size and (found.min() < limits.min or found.max() > limits.max):
            raise DumpError(label, f"must fit {dtype.name}", column=name)
        return np.array(found, dtype=dtype)
    if dtype.kind == "f" and found.dtype.kind == "f" and found.dtype.itemsize >= 4:
        with np.errstate(over="ignore"):  # what does not fit becomes infinite and is refused
            return np.array(found, dtype=dtype)
    if dtype.kind == "b" and found.dtype == dtype:
        return np.array(found)
    kinds = {"i": "integers", "f": "float32 or float64", "b": "bool"}[dtype.kind]
    raise DumpError(label, f"must be {kinds}, got {found.dtype}", column=name)
