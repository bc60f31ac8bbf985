"""Arrays as text that a page can hold and read back to the last bit.

A column is little-endian, its bytes transposed (all first bytes, all second bytes, …), deflated
and written in base64. Signs and exponents of floats and the high bytes of small integers are
alike from row to row, so that transposed they shrink; nothing is rounded on the way.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TYPES: Final = {
    "float64": "Float64Array",
    "float32": "Float32Array",
    "int32": "Int32Array",
    "uint16": "Uint16Array",
    "uint8": "Uint8Array",
}
"""NumPy types that a page can hold, and the typed arrays that they become there."""

QUANTUM: Final = 1 / 2048
"""Step of a log-prob shown on the page, in nats: 0.05 % of a probability."""

UNKNOWN: Final = 65_535
"""Stands for a quantised number that is not there."""

BEYOND: Final = 65_534
"""Stands for 32 nats and more: a probability below 1.3e-14."""


def encode(values: NDArray[Any]) -> str:
    """Write a column as text.

    Parameters
    ----------
    values : ndarray
        Of one of `TYPES`; of any shape, its rows one after another.

    Returns
    -------
    str
        Base64 of the deflated, transposed bytes.

    Raises
    ------
    KeyError
        Another type.

    Examples
    --------
    >>> decode(encode(np.array([0.1, np.nan])), "float64").tolist()
    [0.1, nan]
    """
    TYPES[values.dtype.name]
    size = values.dtype.itemsize
    flat = np.ascontiguousarray(values.reshape(-1), dtype=values.dtype.newbyteorder("<"))
    planes = flat.view(np.uint8).reshape(-1, size).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode()


def decode(text: str, dtype: str) -> NDArray[Any]:
    """Read a column back, as the page does; shape (value,).

    Parameters
    ----------
    text : str
        What `encode` returned.
    dtype : str
        Name of the NumPy type.
    """
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    kind = np.dtype(dtype).newbyteorder("<")
    flat = np.ascontiguousarray(planes.reshape(kind.itemsize, -1).T).reshape(-1)
    return flat.view(kind).astype(dtype)


def quantised(nats: NDArray[Any]) -> NDArray[np.uint16]:
    """Negative log-probs or entropies for display, in steps of `QUANTUM`.

    Parameters
    ----------
    nats : ndarray
        Not negative but for rounding; NaN where unknown.

    Returns
    -------
    ndarray of uint16, same shape
        `UNKNOWN` for NaN, `BEYOND` for 32 nats and more.

    Examples
    --------
    >>> quantised(np.array([0.0, 1.0, np.inf, np.nan])).tolist()
    [0, 2048, 65534, 65535]
    """
    steps = np.clip(np.nan_to_num(nats / QUANTUM, nan=0.0, posinf=BEYOND), 0, BEYOND)
    return np.where(np.isnan(nats), UNKNOWN, np.rint(steps)).astype(np.uint16)
