"""How one loss is made of many tokens: the modes of verl and TRL by their own names.

Every mode is a sum over tokens of (a weight that their response fixes) times (the token's loss),
divided by a *denominator* that is counted once for the whole optimizer step. So the losses of the
step's micro-batches add up to the loss of the step, however it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Aggregation:
    """One mode.

    Attributes
    ----------
    name : str
        As verl or TRL spell it.
    per_response : {"sum", "mean"}
        What is made of a response's tokens.
    count : {"tokens", "responses", "rows", "one"}
        What the denominator counts: tokens of the response mask, responses that have any, all
        rows of the batch (TRL counts an empty response), or nothing (a plain sum).
    by_horizon : bool
        Whether it is divided by a fixed number of tokens a response as well.
    source : str
        Who calls it so.
    """

    name: str
    per_response: Literal["sum", "mean"]
    count: Literal["tokens", "responses", "rows", "one"]
    source: str
    by_horizon: bool = False


AGGREGATIONS: Final[Mapping[str, Aggregation]] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Aggregation("token-mean", "sum", "tokens", "verl"),
            Aggregation("token-sum", "sum", "one", "verl"),
            Aggregation("seq-mean-token-sum", "sum", "responses", "verl"),
            Aggregation("seq-mean-token-mean", "mean", "responses", "verl"),
            Aggregation("seq-mean-token-sum-norm", "sum", "responses", "verl", by_horizon=True),
            Aggregation("grpo", "mean", "rows", "TRL (also its sapo)"),
            Aggregation("bnpo", "sum", "tokens", "TRL"),
            Aggregation("dr_grpo", "sum", "rows", "TRL", by_horizon=True),
            Aggregation("dapo", "sum", "tokens", "TRL (also its cispo, vespo and DPPO)"),
            Aggregation("luspo", "sum", "rows", "TRL"),
        )
    }
)
"""Every mode by name."""


def aggregation(name: str) -> Aggregation:
    """Look a mode up by name.

    Raises
    ------
    ValueError
        No such name; the message lists those that exist.
    """
    if name not in AGGREGATIONS:
        raise ValueError(
            f"there is no aggregation {name!r}; choose one of {', '.join(AGGREGATIONS)}"
        )
    return AGGREGATIONS[name]


def count(response_mask: Tensor, name: str = "token-mean") -> Tensor:
    """Count what a mode divides by, so that it can be added over micro-batches and ranks.

    Parameters
    ----------
    response_mask
        True at response tokens; shape (batch, token), bool or numbers.
    name
        The mode.

    Returns
    -------
    Tensor
        A scalar, float32: tokens, responses, rows, or 1.

    Raises
    ------
    ValueError
        An unknown mode.

    Examples
    --------
    Two responses of 2 and 1 tokens and an empty one:

    >>> mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    >>> [count(mask, name).item() for name in ("token-mean", "seq-mean-token-mean", "grpo")]
    [3.0, 2.0, 3.0]
    """
    mode = aggregation(name)
    used = response_mask != 0
    if mode.count == "tokens":
        return used.sum().float()
    if mode.count == "responses":
        return used.any(dim=-1).sum().float()
    rows = used.shape[0] if mode.count == "rows" else 1
    return torch.full((), float(rows), device=response_mask.device)


def aggregate(
    values: Tensor,
    response_mask: Tensor,
    name: str = "token-mean",
    *,
    denominator: Tensor | float | None = None,
    ranks: int = 1,
    horizon: int | None = None,
) -> Tensor:
    r"""Make one number of a value a token.

    .. math:: L = \frac{R}{N H} \sum_s w_s \sum_{t \in s} \ell_{s,t}

    with :math:`w_s` = 1 or 1 over the response's tokens, N = `denominator`, R = `ranks` and H =
    `horizon` where the mode has one, else 1.

    Parameters
    ----------
    values
        A loss (or anything else to be averaged alike: an entropy, a KL penalty) a token; shape
        (batch, token). Values outside the mask are never read.
    response_mask
        True at response tokens; same shape, bool or numbers.
    name
        A mode of `AGGREGATIONS`.
    denominator
        N > 0 of the whole optimizer step: `count` added over its micro-batches and ranks; None
        takes this batch alone.
    ranks
        Number R of data-parallel ranks whose gradients the trainer averages; their mean is then
        the gradient of the whole step. 1 where gradients are summed, or on one rank.
    horizon
        H of the modes `seq-mean-token-sum-norm` (verl: `loss_scale_factor`) and `dr_grpo` (TRL:
        `max_completion_length`); None takes the number of columns.

    Returns
    -------
    Tensor
        A scalar of `values`' dtype; 0 where the mask is empty.

    Raises
    ------
    ValueError
        Unknown mode, shapes that differ or are not (batch, token), several ranks without a
        denominator, or a denominator, `ranks` or `horizon` that is not positive.

    Notes
    -----
    verl adds 1e-8 to a response's number of tokens and TRL takes at least 1; both change nothing
    beyond the eighth digit.

    Examples
    --------
    >>> values = torch.tensor([[3.0, 1.0], [5.0, 0.0]])
    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
    ...     print(name, aggregate(values, mask, name).item())
    token-mean 3.0
    seq-mean-token-sum 4.5
    seq-mean-token-mean 3.5
    """
    mode = aggregation(name)
    if values.ndim != 2 or response_mask.shape != values.shape:
        raise ValueError(
            "`values` and `response_mask` must both be of shape (batch, token), got "
            f"{tuple(values.shape)} and {tuple(response_mask.shape)}"
        )
    if not (ranks >= 1 and ranks == ranks // 1):
        raise ValueError(f"`ranks` must be at least 1, got {ranks}: a whole number")
    if denominator is None:
        if ranks > 1 and mode.count != "one":
            raise ValueError(
                f"`denominator` is needed with {ranks} ranks: add `count` over the micro-batches "
                "and ranks of the step"
            )
        total = count(response_mask, name).clamp(min=1)
    else:
        # A tensor is not looked at: that would wait for the device.
        if isinstance(denominator, Tensor):
            if denominator.numel() != 1:
                raise ValueError(
                    f"`denominator` must be one number, got shape {tuple(denominator.shape)}"
                )
            denominator = denominator.reshape(())
        elif not 0 < denominator < math.inf:
            raise ValueError(f"`denominator` must be positive, got {denominator}")
        total = torch.as_tensor(denominator, device=values.device)
    if mode.by_horizon:
        columns = values.shape[1] if horizon is None else horizon
        if not columns >= 1:
            raise ValueError(f"`horizon` must be at least 1 token, got {columns}")
        total = total * columns
    used = response_mask != 0
    kept = torch.where(used, values, torch.zeros((), dtype=values.dtype, device=values.device))
    per_response = kept.sum(dim=-1)
    if mode.per_response == "mean":
        per_response = per_response / used.sum(dim=-1).clamp(min=1)
    return per_response.sum() * ranks / total.to(values.dtype)
