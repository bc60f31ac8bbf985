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
