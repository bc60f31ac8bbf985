"""Some tokens of a readout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from .readout import Readout


def taken(read: Readout, rows: Tensor) -> Readout:
    """Take some tokens of a readout.

    Parameters
    ----------
    read : Readout
        Of more of them.
    rows : Tensor of int, shape (row,)
        Which.

    Returns
    -------
    Readout
        In the order of `rows`.
    """
    found: Readout = _each(read, lambda values: values[rows.to(values.device)])
    return found


def widened(read: Readout, by: float) -> Readout:
    """Add, in quadrature, another error to what rounding may have done.

    Parameters
    ----------
    read : Readout
        Whose error may be unknown, and then stays so.
    by : float
        Standard deviation of a log-prob, in nats.

    Returns
    -------
    Readout
        With the same numbers.
    """
    if read.error is None or not by:
        return read
    error = _each(read.error, lambda values: (values.square() + by**2).sqrt())
    return dataclasses.replace(read, error=error)


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in a nested value."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _each(each, function) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_each(each, function) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: _each(getattr(value, each.name), function) for each in fields(value)}
        return dataclasses.replace(value, **parts)
    return value
