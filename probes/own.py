"""Slopes of D along a token's own gradient and its sequence's: inner products of gradients.

With h = ∇D of a token and g_j = ∇ log π_k of token j, the token's own policy gradient changes D
by Â r <g, h>, its sequence's by Σ Â r <g_j, h> over the tokens j of it that are in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .elsewhere import Elsewhere, inner, reduced_divergence
from .errors import ProbeError, first_line
from .ladder import Ladder
from .microbatch import MicroBatch
from .reading import PolicyReader
from .rows import Rows

ALONE: Final = "gradients, each sequence by itself"
WHOLE: Final = "gradients, whole micro-batches"

# A forward of one sequence by itself must give the log-probs of the whole batch's: products in
# other shapes round otherwise, another dropout mask or a batch statistic is far beyond that.
_SAME_FORWARD: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAME_FORWARD_ROUNDED: Final = 0.1

# Numbers that the gradients of one sequence may hold together, 128 MB in float64.
_TOGETHER: Final = 1 << 24

_SAME_ROWS: Final = (
    "sequence", "position", "token_id", "advantage", "behavior_logprob", "pre_logprob", "topk_ids",
    "topk_behavior_logprobs", "topk_pre_logprobs",
)  # fmt: skip

Slopes = NDArray[np.float64]


class OwnGradients:
    """Takes the gradients of sampled tokens and of their sequences.

    Parameters
    ----------
    ladder : Ladder
        Divergence and bound of the importance weight.
    elsewhere : Elsewhere
        The model before the step.
    reader : PolicyReader
        Is told that the forwards are the probe's own.

    Attributes
    ----------
    methods, reasons : dict of str to str
        How the two rungs were taken, and why not otherwise; filled in on first use.

    Notes
    -----
    In small models all gradients of a sequence are taken in one batched backward, and all their
    inner products kept, which arms that branch from one state then share. In large ones it is
    two backward passes a token and one a sequence.
    """

    def __init__(self, ladder: Ladder, elsewhere: Elsewhere, reader: PolicyReader) -> None:
        self._ladder = ladder
        self._elsewhere = elsewhere
        self._reader = reader
        self._alone = True
        self._same: _SameState | None = None
        self.methods: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def slopes(
        self,
        batches: Sequence[MicroBatch],
        before: Mapping[str, Tensor],
        samples: Sequence[NDArray[np.intp]],
        step: int,
    ) -> list[tuple[Slopes, Slopes]]:
        """Slopes of D along the token's own gradient and along its sequence's.

        Parameters
        ----------
        batches : sequence of MicroBatch
            Of one step.
        before : Parameters
            Before it.
        samples : sequence of ndarray of int, shape (token,)
            Rows of each micro-batch that are wanted.
        step : int
            Number of the step.

        Returns
        -------
        list of (ndarray, ndarray) of float64, shape (row,)
            Own and sequence's, of each micro-batch; NaN outside the sample.
        """
        if self._same is not None and self._same.holds(batches, before, step):
            products = self._same.products
        else:
            self._same = None  # an arm before this one is not kept beside it
            leaves = {
                name: each.detach().requires_grad_(each.is_floating_point())
                for name, each in before.items()
            }
            products = [
                self._products(batch, leaves, sample) if len(sample) else []
                for batch, sample in zip(batches, samples, strict=True)
            ]
            if all(each.gradients is None for part in products for each in part):
                self._same = _SameState(step, [_key(batch) for batch in batches], before, products)
        return [
            _along(batch, part, self._ladder.ratio_cap)
            for batch, part in zip(batches, products, strict=True)
        ]

    def _products(
        self, batch: MicroBatch, leaves: Mapping[str, Tensor], sample: NDArray[np.intp]
    ) -> list[_Products]:
        """Inner products of the gradients of D and of log π_k, sequence by sequence."""
        sequence = batch.rows["sequence"]
        groups = [np.flatnonzero(sequence == each) for each in np.unique(sequence[sample])]
        if self._alone:
            try:
                return self._elsewhere.differentiate(
                    leaves,
                    lambda: [
                        each
                        for group in groups
                        for each in self._of_sequences(batch, leaves, [group], sample, alone=True)
                    ],
                )
            except torch.OutOfMemoryError:
                raise
            except (ProbeError, RuntimeError, ValueError, IndexError) as error:
                self._alone = False
                self.reasons["own"] = first_line(error)
        return self._elsewhere.differentiate(
            leaves, lambda: self._of_sequences(batch, leaves, groups, sample, alone=False)
        )

    def _of_sequences(
        self,
        batch: MicroBatch,
        leaves: Mapping[str, Tensor],
        groups: Sequence[NDArray[np.intp]],
        sample: NDArray[np.intp],
        *,
        alone: bool,
    ) -> list[_Products]:
        """Inner products of some sequences' gradients, from one forward of them."""
        members = torch.from_numpy(np.concatenate(groups))
        rows = batch.batch_rows(members) if alone else None
        hidden = self._reader.undisturbed(lambda: self._elsewhere.hidden(batch, rows, grad=True))
        self.methods["own"] = self.methods["sequence"] = ALONE if alone else WHOLE
        size = sum(each.numel() for each in leaves.values())
        with torch.enable_grad():
            selected = batch.select_of(hidden, members, rows)
            logprobs = self._elsewhere.logprobs(batch, selected, members)
            if alone:
                _refuse_another_forward(batch, members, logprobs, hidden.dtype)
            divergences = reduced_divergence(batch, self._ladder.divergence, members, logprobs)
            sampled = logprobs[:, -1]
            found, start = [], 0
            for group in groups:
                part = slice(start, start + len(group))
                start += len(group)
                wanted = np.flatnonzero(np.isin(group, sample))
                heads = divergences[part][torch.from_numpy(wanted).to(divergences.device)]
                small = size * (len(group) + len(wanted)) <= _TOGETHER
                make = _all_products if small else _few_products
                found.append(make(batch, group, wanted, sampled[part], heads, leaves, self._ladder))
        return found


@dataclass(frozen=True, eq=False)
class _Products:
    """Inner products of the gradients of one sequence.

    `gradients` is None where `matrix` holds <∇ log π_k of the member, ∇D of the wanted> of shape
    (wanted, member); in a large model it holds the two slopes of each wanted token instead.
    """

    group: NDArray[np.intp]
    wanted: NDArray[np.intp]
    matrix: Slopes
    gradients: tuple[Slopes, Slopes] | None = None


@dataclass(frozen=True, eq=False)
class _SameState:
    """The products at one state, which further arms branch from."""

    step: int
    keys: list[tuple[NDArray[Any], ...]]
    before: Mapping[str, Tensor]
    products: list[list[_Products]]

    def holds(self, batches: Sequence[MicroBatch], before: Mapping[str, Tensor], step: int) -> bool:
        """Whether these are the same tokens, read at the same parameters."""
        return (
            step == self.step
            and len(batches) == len(self.keys)
            and all(
                np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
                for batch, key in zip(batches, self.keys, strict=True)
                for ours, theirs in zip(_key(batch), key, strict=True)
            )
            and before.keys() == self.before.keys()
            and all(torch.equal(each, self.before[name]) for name, each in before.items())
        )


def _key(batch: MicroBatch) -> tuple[NDArray[Any], ...]:
    """What the products of a micro-batch rest on beside the parameters."""
    return tuple(batch.rows[name] for name in _SAME_ROWS)


def _all_products(
    batch: MicroBatch,
    group: NDArray[np.intp],
    wanted: NDArray[np.intp],
    sampled: Tensor,
    heads: Tensor,
    leaves: Mapping[str, Tensor],
    ladder: Ladder,
) -> _Products:
    """All gradients of a sequence in one batched backward, and all their inner products."""
    outputs = torch.cat([sampled, heads])
    gradients = torch.autograd.grad(
        outputs,
        tuple(leaves.values()),
        torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    rows = torch.cat([each.flatten(1).double() for each in gradients if each is not None], 1)
    pushes, slopes = rows[: len(group)], rows[len(group) :]
    return _Products(group, wanted, (slopes @ pushes.t()).cpu().numpy())


def _few_products(
    batch: MicroBatch,
    group: NDArray[np.intp],
    wanted: NDArray[np.intp],
    sampled: Tensor,
    heads: Tensor,
    leaves: Mapping[str, Tensor],
    ladder: Ladder,
) -> _Products:
    """One gradient after the other, for models of which not many gradients fit the memory."""
    inputs = tuple(leaves.values())
    push = _push(batch.rows, ladder.ratio_cap)[group]
    weights = torch.from_numpy(np.where(batch.rows["in_loss"][group], push, 0.0))

    def gradient(of: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(of, inputs, retain_graph=True, allow_unused=True)

    of_sequence = gradient((weights.to(sampled.device) * sampled).sum())
    own, whole = np.zeros(len(wanted)), np.zeros(len(wanted))
    for place, member in enumerate(wanted.tolist()):
        slope = gradient(heads[place])
        whole[place] = inner(of_sequence, slope)
        own[place] = push[member] * inner(gradient(sampled[member]), slope)
    return _Products(group, wanted, np.empty((0, 0)), (own, whole))


def _along(
    batch: MicroBatch, products: Sequence[_Products], cap: float | None
) -> tuple[Slopes, Slopes]:
    """Slopes along own and sequence's gradient in the rows' order; NaN outside the sample."""
    own, whole = np.full(batch.size, np.nan), np.full(batch.size, np.nan)
    push, in_loss = _push(batch.rows, cap), batch.rows["in_loss"]
    for each in products:
        at = each.group[each.wanted]
        if each.gradients is not None:
            own[at], whole[at] = each.gradients
        else:
            own[at] = push[at] * each.matrix[np.arange(len(at)), each.wanted]
            whole[at] = each.matrix @ np.where(in_loss[each.group], push[each.group], 0.0)
    return own, whole


def _push(rows: Rows, cap: float | None) -> Slopes:
    """Â r of every row, r bounded where the loss bounds it."""
    log_ratio = rows["pre_logprob"].astype(np.float64) - rows["behavior_logprob"]
    weight = np.exp(log_ratio if cap is None else np.minimum(log_ratio, math.log(cap)))
    return np.asarray(rows["advantage"] * weight, np.float64)


def _refuse_another_forward(
    batch: MicroBatch, members: Tensor, logprobs: Tensor, dtype: torch.dtype
) -> None:
    """See that a forward of few rows gave the policy that the whole batch's gave."""
    before = torch.from_numpy(batch.rows["pre_logprob"][members.numpy()])
    gap = float((logprobs[:, -1].detach().cpu() - before).abs().max())
    if not gap <= _SAME_FORWARD.get(dtype, _SAME_FORWARD_ROUNDED):
        raise ProbeError(
            f"a forward of the sequence by itself gives other log-probs (by {gap:.3g} nats)"
        )
