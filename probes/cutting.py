"""A forward of those parts of a batch that something is wanted of.

In a causal model nothing depends on other sequences or on later tokens, so both can be left out,
and what sequences begin with alike can be forwarded once. Whether that holds of a model, and how
much the other shapes of the products change by rounding, is tried before it is relied on.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .errors import ProbeError
from .forward import Forward, again
from .plan import Plan, Trunk, make_plan
from .replay import Call

CONSTANT: Final = "constant_arguments"
"""Attribute of a module: names of arguments that do not depend on the rows of a batch."""

_OVERHEAD: Final = {"cpu": 64}
_OVERHEAD_ELSEWHERE: Final = 2048
"""What a forward more costs, in tokens: launches on a GPU, products of few rows on a CPU."""

_BY_TOKEN: Final = ("input_ids", "token_type_ids")
_ALL_LOGITS: Final = ("logits_to_keep", "num_logits_to_keep")

Rows = NDArray[np.intp]


class CutError(ProbeError):
    """A forward that can be made as a whole only; the message says why."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where the rows of a micro-batch stand in the batch that the model was called on.

    Attributes
    ----------
    row, column : array of int, shape (row,)
        Of the position whose logits predict each response token.
    batch, length : int
        Shape of `input_ids`.
    group : array of int, shape (B,), optional
        Prompt of each row of the batch; None where several are packed into one.
    """

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    batch: int
    length: int
    group: NDArray[np.int64] | None


def plan_cut(
    forward: Forward,
    grid: Grid,
    wanted: Rows,
    *,
    share_prompts: bool,
    overhead: int | None = None,
) -> Plan:
    """Find the cheapest forwards that reach some rows.

    Parameters
    ----------
    forward : Forward
        The whole one.
    grid : Grid
        Of its micro-batch.
    wanted : array of int, shape (row,)
        Rows of the micro-batch.
    share_prompts : bool
        Forward what the sequences of a group begin with alike once.
    overhead : int, optional
        What one more forward costs, in tokens; by default as the device has it.

    Returns
    -------
    Plan
        To be given to `run_cut`.
    """
    call = forward.call
    if overhead is None:
        device = next((each.device.type for each in call.module.parameters()), "cpu")
        overhead = _OVERHEAD.get(device, _OVERHEAD_ELSEWHERE)
    row, column = grid.row[wanted], grid.column[wanted]
    if not share_prompts or grid.group is None or _packed(call):
        return make_plan(row, column, overhead=overhead)
    groups = dict(enumerate(grid.group.tolist()))
    return make_plan(
        row, column, overhead=overhead, groups=groups, common=lambda rows: _common(call, grid, rows)
    )


def run_cut(forward: Forward, head: nn.Module, grid: Grid, wanted: Rows, plan: Plan) -> Tensor:
    """Make the forwards of a plan with the weights as they are now, without gradients.

    Parameters
    ----------
    forward : Forward
        The whole one.
    head : nn.Module
        Output head of the model.
    grid, wanted, plan
        As for `plan_cut`.

    Returns
    -------
    Tensor, shape (row, hidden)
        What enters the head at the wanted rows, in their order.

    Raises
    ------
    CutError
        The call has an argument that nobody here knows how to cut, or the model does not do with
        a cut call what causal models do.
    """
    row, column = grid.row[wanted], grid.column[wanted]
    found: Tensor | None = None
    with _without_checkpointing(forward.call.module):
        for trunk in plan.trunks:
            cache = _prefix(forward, head, grid, trunk)
            for index, branch in enumerate(trunk.branches):
                last = index == len(trunk.branches) - 1
                mine = cache if last or cache is None else copy.deepcopy(cache)
                if mine is not None:
                    mine.batch_repeat_interleave(len(branch.rows))
                call = cut_call(
                    forward.call, grid, branch.rows, trunk.length, branch.stop, cache=mine
                )
                hidden = _made(forward, head, call)
                width = branch.stop - trunk.length
                flat = hidden.reshape(-1, hidden.shape[-1])
                if flat.shape[0] != len(branch.rows) * width:
                    raise CutError(
                        f"a forward of {len(branch.rows)} rows and {width} columns gave hidden "
                        f"states at {flat.shape[0]} positions"
                    )
                here = np.flatnonzero(np.isin(row, branch.rows))
                place = np.searchsorted(np.asarray(branch.rows), row[here]) * width
                place += column[here] - trunk.length
                if found is None:
                    found = flat.new_empty(len(wanted), flat.shape[1])
                device = flat.device
                found[torch.from_numpy(here).to(device)] = flat.index_select(
                    0, torch.from_numpy(place).to(device)
                )
    if found is None:
        raise CutError("a plan without forwards reaches nothing")
    return found


def cut_call(
    call: Call, grid: Grid, rows: Sequence[int], start: int, stop: int, *, cache: Any = None
) -> Call:
    """Cut the arguments of a call down to some rows and columns of its batch.

    Parameters
    ----------
    call : Call
        The whole one.
    grid : Grid
        Shape of its batch.
    rows : sequence of int
        Rows that are taken.
    start, stop : int
        Columns that are taken; those before `start` are in the cache.
    cache : Cache, optional
        Of transformers; filled on return of the call.

    Returns
    -------
    Call
        Of the same module in the same surroundings, which gives hidden states of all of these
        positions.

    Raises
    ------
    CutError
        An argument that is not known here.
    """
    if len(call.args) > len(call.parameters):
        raise CutError("the model was called with arguments that have no name")
    given = {**dict(zip(call.parameters, call.args, strict=False)), **call.kwargs}
    index = torch.as_tensor(rows, dtype=torch.long)
    constant = getattr(call.module, CONSTANT, ())
    kwargs: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ALL_LOGITS:
            kwargs[name] = 0  # which is all
        elif name == "labels" or name in constant:
            kwargs[name] = None if name == "labels" else value
        elif isinstance(value, Tensor):
            kwargs[name] = _cut(name, value, grid, index, start, stop)
        elif value is None or isinstance(value, (bool, int, float, str)):
            kwargs[name] = value
        else:
            raise CutError(
                f"the forward has an argument `{name}` of type {type(value).__name__}, which is "
                "not known here"
            )
    if cache is not None:
        kwargs |= {"use_cache": True, cache_argument(call.module): cache}
    return dataclasses.replace(call, args=(), kwargs=kwargs)


def cache_argument(module: nn.Module) -> str:
    """Name of the argument by which a model of transformers takes a cache.

    Raises
    ------
    CutError
        It takes none.
    """
    inner = getattr(module, "get_base_model", None)  # PEFT's wrapper hands on what it is given
    for each in (module, inner() if callable(inner) else None):
        if each is None:
            continue
        names = inspect.signature(each.forward).parameters
        for name in ("cache", "past_key_values"):
            if name in names:
                return name
    raise CutError(f"{type(module).__name__} takes no key-value cache")


def _cut(name: str, value: Tensor, grid: Grid, rows: Tensor, start: int, stop: int) -> Tensor:
    """Cut one argument."""
    batch, length = grid.batch, grid.length
    rows = rows.to(value.device)
    shape = tuple(value.shape)
    if name in (*_BY_TOKEN, "position_ids") and shape == (batch, length):
        return value[rows, start:stop]
    if name == "position_ids" and shape == (1, length):
        return value[:, start:stop]
    if name == "cache_position" and shape == (length,):
        return value[start:stop]
    if name == "attention_mask" and value.ndim == 2 and shape[0] == batch and shape[1] >= length:
        return value[rows, : shape[1] - length + stop]  # what is before the batch's columns stays
    if name == "attention_mask" and value.ndim == 4 and shape[2:] == (length, length):
        if shape[0] == batch:
            value = value[rows]
        if value.shape[0] in (1, len(rows)):
            return value[:, :, start:stop, :stop]
    raise CutError(
        f"the forward has an argument `{name}` of shape {shape}, which is not known here"
    )


def _common(call: Call, grid: Grid, rows: Sequence[int]) -> int:
    """Columns from the first on in which rows are alike in every argument."""
    alike = torch.ones(grid.length, dtype=torch.bool)
    for name in (*_BY_TOKEN, "position_ids", "attention_mask"):
        value = call.argument(name)
        if not isinstance(value, Tensor) or value.shape == (1, grid.length):
            continue
        if tuple(value.shape) != (grid.batch, grid.length):
            return 0  # another kind of mask, which a cache does not go with
        mine = value[torch.as_tensor(rows, device=value.device)]
        alike &= (mine == mine[0]).all(0).cpu()
    return int(alike.long().cumprod(0).sum())


def _packed(call: Call) -> bool:
    """Whether only positions that begin anew tell sequences of a row apart: no cache keeps that."""
    positions = call.argument("position_ids")
    if call.argument("attention_mask") is not None or not isinstance(positions, Tensor):
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def _prefix(forward: Forward, head: nn.Module, grid: Grid, trunk: Trunk) -> Any:
    """Keys and values of what a trunk's rows begin with; None for nothing."""
    if not trunk.length:
        return None
    from transformers import DynamicCache

    call = forward.call
    config = getattr(call.module, "config", None)
    if config is None:
        raise CutError(f"{type(call.module).__name__} has no config to make a cache from")
    cache: Any = DynamicCache(config=config)
    first = trunk.branches[0].rows[:1]
    _made(forward, head, cut_call(call, grid, first, 0, trunk.length, cache=cache))
    if cache.get_seq_length() != trunk.length:
        raise CutError("the model does not fill a cache in the mode that it is trained in")
    return cache


def _made(forward: Forward, head: nn.Module, call: Call) -> Tensor:
    """Hidden states that a call gives."""
    return again(Forward(call, forward.from_head, None, forward.buffers), head, grad=False).hidden


@contextmanager
def _without_checkpointing(module: nn.Module) -> Iterator[None]:
    """No gradient checkpointing, which is for a backward and goes with no cache."""
    name = "gradient_checkpointing"
    switched = [each for each in module.modules() if vars(each).get(name) is True]
    try:
        for each in switched:
            setattr(each, name, False)
        yield
    finally:
        for each in switched:
            setattr(each, name, True)
