"""Readouts of some tokens: put together and taken apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .readout import Readout


def joined(parts: Sequence[Readout]) -> Readout:
    """Put readouts together.

    Parameters
    ----------
    parts : sequence of Readout
        At least one, all with the same fields.

    Returns
    -------
    Readout
        Of all their tokens, in order.
    """
    found: Readout = _each(list(parts), torch.cat)
    return found


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
    found: Readout = _each([read], lambda values: values[0][rows.to(values[0].device)])
    return found


def _each(values: list[Any], function: Callable[[list[Tensor]], Tensor]) -> Any:
    """Apply a function to the tensors at each place of some nested values of one form."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(values)
    if isinstance(first, Mapping):
        return {key: _each([each[key] for each in values], function) for key in first}
    if isinstance(first, tuple):
        return tuple(_each(list(each), function) for each in zip(*values, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return dataclasses.replace(
            first,
            **{
                each.name: _each([getattr(value, each.name) for value in values], function)
                for each in dataclasses.fields(first)
            },
        )
    return first
