"""SGLang's flat lists, plain or in base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .assemble import brief, whole
from .errors import EngineError

_ENGINE = "sglang"

Row = tuple[list[int], list[Any]] | None
"""Ids and log-probs of one token."""


def flat_rows(meta: Mapping[str, Any], prefix: str, name: str) -> list[Row]:
    """Read the lists of the flat variants.

    Parameters
    ----------
    meta
        `meta_info`.
    prefix
        `output_top_logprobs` or `input_top_logprobs`.
    name
        The request, for the error.

    Returns
    -------
    list of (ids, log-probs) or None
        A row a token, None for the first `…_null_prefix`.

    Raises
    ------
    EngineError
        Columns that do not fill the shape, or are no base64 of the type they should be.
    """
    shape, nulls = meta[f"{prefix}_shape"], meta.get(f"{prefix}_null_prefix", 0)
    if not (
        isinstance(shape, Sequence)
        and len(shape) == 2
        and all(isinstance(n, int) and 0 <= n < 2**31 for n in (*shape, nulls))
    ):
        raise EngineError(
            _ENGINE,
            f"`{prefix}_shape` must be [rows, K] and `{prefix}_null_prefix` a number of rows, got "
            f"{brief(shape)} and {brief(nulls)}",
            request=name,
        )
    size, k = shape
    values = _column(meta, f"{prefix}_val_flat", "<f4", name)
    ids = _column(meta, f"{prefix}_idx_flat", "<i4", name)
    for key, column in (("val", values), ("idx", ids)):
        if len(column) != size * k:
            raise EngineError(
                _ENGINE,
                f"`{prefix}_{key}_flat` must hold {size} × {k} values, got {len(column)}",
                request=name,
            )
    rows: list[Row] = [None] * nulls
    for row in range(size):
        part = slice(row * k, (row + 1) * k)
        tokens = [
            whole(_ENGINE, token, f"`{prefix}_idx_flat`", name, nulls + row) for token in ids[part]
        ]
        rows.append((tokens, values[part]))
    return rows


def _column(meta: Mapping[str, Any], key: str, dtype: str, name: str) -> list[Any]:
    """A flat column, plain or in base64 (contiguous, little-endian)."""
    if meta.get(key) is not None:
        if not isinstance(meta[key], Sequence) or isinstance(meta[key], str):
            raise EngineError(
                _ENGINE, f"`{key}` must be a list, got {brief(meta[key])}", request=name
            )
        return list(meta[key])
    encoded = meta.get(f"{key}_b64")
    if not isinstance(encoded, str):
        raise EngineError(
            _ENGINE, f"there must be `{key}` or `{key}_b64`, found neither", request=name
        )
    given = meta.get(f"{key}_b64_dtype", np.dtype(dtype).name)
    if given != np.dtype(dtype).name:
        raise EngineError(
            _ENGINE,
            f"`{key}_b64_dtype` must be {np.dtype(dtype).name}, got {brief(given)}",
            request=name,
        )
    try:
        raw = base64.b64decode(encoded, validate=True)
        return list(np.frombuffer(raw, dtype).tolist())
    except (binascii.Error, ValueError) as error:
        raise EngineError(
            _ENGINE, f"`{key}_b64` is not base64 of {dtype[1:]} values: {error}", request=name
        ) from error
