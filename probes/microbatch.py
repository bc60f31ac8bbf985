"""The rows of one micro-batch: checked, read before the step, completed after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.masks import Tokens
from deltad.support import SupportError, topk_support

from .behavior import ResponseTokens
from .errors import ProbeError
from .head import Head
from .readout import Readout
from .watch import Forward

Rows = dict[str, np.ndarray[Any, Any]]
"""Columns of the dump by name, a row a response token; vectors have shape (row, K)."""


class MicroBatch:
    """What `UpdateProbe.expect` returns: one micro-batch on its way to the optimizer step.

    Attributes
    ----------
    tokens : ResponseTokens
        As given.
    """

    def __init__(self, tokens: ResponseTokens) -> None:
        self.tokens = tokens
        self.forward: Forward | None = None
        self._rows: Rows | None = None
        self._keep: Tensor | None = tokens.keep
        self._b, self._j = tokens.where()
        self._ids = torch.empty(0)
        self._index = torch.empty(0)
        self._width = 0
        self._vocab_size = 0

    @property
    def size(self) -> int:
        """Number of response tokens."""
        return self._b.numel()

    @property
    def ready(self) -> bool:
        """Whether the training forward has come."""
        return self._rows is not None

    @property
    def rows(self) -> Rows:
        """Columns known before the step, in the precision that will be stored.

        Returns
        -------
        dict of str to numpy.ndarray
            Every column of a dump but those after the step, in the order of
            `response_mask.nonzero()`.

        Raises
        ------
        ProbeError
            The training forward has not come yet.
        """
        if self._rows is None:
            raise ProbeError("the rows are known once the training forward has been made")
        return {**self._rows, "in_loss": self._in_loss()}

    def keep(self, keep: Tensor | np.ndarray[Any, Any]) -> None:
        """Say which tokens take part in the loss, any time before the step.

        Parameters
        ----------
        keep : bool array, shape (row,) or (B, L)
            True where the token's gradient takes part in the update.

        Raises
        ------
        ProbeError
            Not bool, or another shape.
        """
        keep = torch.as_tensor(keep)
        if keep.dtype != torch.bool or keep.shape not in (
            self._b.shape,
            self.tokens.response_mask.shape,
        ):
            raise ProbeError(
                f"`keep` must be bool of shape {tuple(self._b.shape)} or "
                f"{tuple(self.tokens.response_mask.shape)}, got {keep.dtype} of shape "
                f"{tuple(keep.shape)}"
            )
        self._keep = keep if keep.ndim == 2 else self.scatter(keep, False)

    def criterion_tokens(self) -> Tokens:
        """What criteria look at, as a reader of the dump will see it.

        Returns
        -------
        deltad.masks.Tokens
            In float64 of the float32 values that will be stored, so that
            `criterion(name).keep(...)` decides now what it decides from the file.
        """
        rows = self.rows
        metadata = Metadata(top_k=self.tokens.top_k, vocab_size=self._vocab_size)
        return batch_tokens(Batch("", 0, rows, np.ones(self.size, np.bool_)), metadata)

    def scatter(self, values: Tensor | np.ndarray[Any, Any], fill: float | bool = 0.0) -> Tensor:
        """Lay values of the rows out like `input_ids`.

        Parameters
        ----------
        values : array, shape (row,)
            For example a column of `rows`.
        fill : float or bool
            For everything that is not a response token.

        Returns
        -------
        Tensor, shape (B, L)
            On the device of `response_mask`, of the dtype of `values`.
        """
        mask = self.tokens.response_mask
        values = torch.as_tensor(values, device=mask.device)
        laid = torch.full(mask.shape, fill, dtype=values.dtype, device=mask.device)
        laid[self._b, self._j] = values
        return laid

    def receive(self, forward: Forward, vocab_size: int) -> None:
        """Take the training forward: find the sampled ids and where their distributions are."""
        self.forward = forward
        self._vocab_size = vocab_size
        tokens = self.tokens
        batch, length = tokens.response_mask.shape
        given = forward.call.argument("input_ids")
        sampled = tokens.input_ids if given is None else given
        if sampled is None:
            raise ProbeError(
                "the training forward was called without input_ids: give `input_ids` in "
                "ResponseTokens"
            )
        if tuple(sampled.shape) != (batch, length):
            raise ProbeError(
                f"the training forward got input_ids of shape {tuple(sampled.shape)}, expected "
                f"{(batch, length)} as `response_mask`: is this the forward of these tokens?"
            )
        if (
            given is not None
            and tokens.input_ids is not None
            and not torch.equal(given, tokens.input_ids.to(given.device))
        ):
            raise ProbeError("`input_ids` of ResponseTokens are not those of the forward")
        self._check_attended(forward.call.argument("attention_mask"))
        b, j = self._b.to(sampled.device), self._j.to(sampled.device)
        ids = sampled[b, j]
        self._refuse_where(
            (ids < 0) | (ids >= vocab_size), f"input id outside the vocabulary of {vocab_size}"
        )
        topk = tokens.topk_ids[self._b, self._j].to(sampled.device)
        self._refuse_where(
            ((topk < -1) | (topk >= vocab_size)).any(-1),
            f"id in `topk_ids` outside the vocabulary of {vocab_size}",
        )
        self._ids = torch.cat([topk, ids[:, None]], 1).long()
        self._index, self._width = _index_in_head_input(forward, batch, length, b, j)
        low = (self._index < 0).nonzero()
        if low.numel():
            row = int(low[0])
            raise ProbeError(
                f"logits_to_keep leaves out position {int(j[row]) - 1} of row {int(b[row])}, "
                f"whose logits predict the response token at {int(j[row])}"
            )

    def select(self, hidden: Tensor) -> Tensor:
        """Hidden states of the rows, shape (row, hidden)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat.index_select(0, self._index.to(hidden.device))

    def read(self, hidden: Tensor, head: Head, **options: Any) -> Readout:
        """Read the policy at the rows from hidden states of the whole forward."""
        selected = self.select(hidden)
        return head.read(selected, self._ids.to(selected.device), **options)

    def columns(self, most: int = 4) -> Tensor:
        """Choose a few columns of the head's input that hold rows."""
        columns: Tensor = torch.unique(self._index % self._width)
        return columns[:most]

    def check_logits(
        self,
        logits: Tensor,
        columns: Tensor | None,
        head: Head,
        read: Readout,
        *,
        temperature: float,
        dtypes: set[torch.dtype],
    ) -> None:
        """Hold a readout against the model's own logits, at these columns or at all."""
        index = self._index.to(logits.device)
        rows = torch.arange(index.numel(), device=logits.device)
        if columns is not None:
            columns = columns.to(logits.device)
            at = torch.full((self._width,), -1, dtype=torch.long, device=logits.device)
            at[columns] = torch.arange(columns.numel(), device=logits.device)
            rows = (at[index % self._width] >= 0).nonzero()[:, 0]
            index = index[rows] // self._width * columns.numel() + at[index[rows] % self._width]
        head.check_against(
            logits.reshape(-1, logits.shape[-1])[index],
            read.logprobs.to(logits.device)[rows],
            self._ids.to(logits.device)[rows],
            temperature=temperature,
            dtypes=dtypes,
        )

    def set_pre(self, read: Readout, step: int) -> None:
        """Fill the columns that are known before the step, and check them."""
        tokens, b, j = self.tokens, self._b, self._j
        sequence = _per_token(tokens.sequence, b, j)
        topk_ids = _numpy(tokens.topk_ids[b, j], np.int32)
        used = topk_ids >= 0
        behavior_topk = np.where(
            used, _numpy(tokens.topk_logprobs[b, j], np.float32), np.float32(np.nan)
        )
        behavior = _numpy(tokens.behavior_logprobs[b, j], np.float32)
        rows: Rows = {
            "step": np.full(len(b), step, np.int32),
            "group": _numpy(_per_token(tokens.group, b, j), np.int32),
            "sequence": _numpy(sequence, np.int32),
            "position": _positions(_numpy(b, np.int64), _numpy(sequence, np.int64)),
            "token_id": _numpy(self._ids[:, -1], np.int32),
            "advantage": _numpy(_per_token(tokens.advantages, b, j), np.float32),
            "behavior_logprob": behavior,
            "topk_ids": topk_ids,
            "topk_behavior_logprobs": behavior_topk,
            **_policy_columns(read, "pre"),
        }
        self._refuse_where(
            torch.from_numpy(~np.isfinite(rows["advantage"])), "`advantages` is not finite"
        )
        try:
            # In float64, as every reader of the dump computes.
            topk_support(
                topk_ids,
                behavior_topk.astype(np.float64),
                rows["topk_pre_logprobs"].astype(np.float64),
                rows["token_id"],
                behavior.astype(np.float64),
                rows["pre_logprob"].astype(np.float64),
                vocab_size=self._vocab_size,
            )
        except SupportError as error:
            raise ProbeError(f"{self._place(error.row)}: {error.reason}") from error
        # An entry of the top-K may differ from its scalar by rounding; one number is stored.
        hit = used & (topk_ids == rows["token_id"][:, None])
        at = hit.argmax(1)
        listed = hit.any(1)
        entry = np.take_along_axis(behavior_topk, at[:, None], 1)[:, 0]
        rows["behavior_logprob"] = np.where(listed, entry, behavior)
        self._rows = rows

    def complete(self, read: Readout) -> Rows:
        """All columns, after the step."""
        return {**self.rows, **_policy_columns(read, "post")}

    def _in_loss(self) -> np.ndarray[Any, Any]:
        """Column in_loss."""
        if self._keep is None:
            return np.ones(len(self._b), np.bool_)
        return _numpy(
            self._keep[self._b.to(self._keep.device), self._j.to(self._keep.device)], np.bool_
        )

    def _check_attended(self, attention_mask: Any) -> None:
        """Refuse response tokens that are padding or come right after it."""
        if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
            return
        if attention_mask.shape != self.tokens.response_mask.shape:
            return
        b, j = self._b.to(attention_mask.device), self._j.to(attention_mask.device)
        self._refuse_where(
            (attention_mask[b, j] == 0) | (attention_mask[b, j - 1] == 0),
            "a response token is masked out by attention_mask, or the position before it is",
        )

    def _refuse_where(self, bad: Tensor, what: str) -> None:
        """Name the first row where `bad` is True."""
        found = bad.nonzero()
        if found.numel():
            raise ProbeError(f"{self._place(int(found[0, 0]))}: {what}")

    def _place(self, row: int) -> str:
        """Where a row lies in the micro-batch."""
        return f"response token at row {int(self._b[row])}, position {int(self._j[row])}"


def _index_in_head_input(
    forward: Forward, batch: int, length: int, b: Tensor, j: Tensor
) -> tuple[Tensor, int]:
    """Row of the flattened hidden states at j − 1 (−1 where it was left out), and their width."""
    grid = torch.arange(batch * length, device=b.device).view(batch, length)
    kept: Any = None
    if forward.from_head:
        kept = forward.call.argument("logits_to_keep")
        if kept is None:
            kept = forward.call.argument("num_logits_to_keep")
    if isinstance(kept, Tensor):
        kept = kept.to(b.device)
        if kept.ndim == 2 and kept.dtype != torch.bool:
            grid = grid.gather(1, kept.long())
        else:
            grid = grid[kept] if kept.ndim == 2 else grid[:, kept]
    elif kept is not None:
        grid = grid[:, -int(kept) :]
    flat = grid.reshape(-1)
    if forward.hidden is not None:
        rows = forward.hidden.numel() // forward.hidden.shape[-1]
        if rows != flat.numel():
            raise ProbeError(
                f"the head got {rows} positions, expected {flat.numel()} of a batch of shape "
                f"{(batch, length)}: the model drops or adds positions that the probe does not "
                "know of"
            )
    back = torch.full((batch * length,), -1, dtype=torch.long, device=b.device)
    back[flat] = torch.arange(flat.numel(), device=b.device)
    return back[b * length + j - 1], grid.shape[-1]


def _policy_columns(read: Readout, when: str) -> Rows:
    """Columns of the policy before or after the step."""
    logprobs = read.logprobs.cpu().numpy().astype(np.float32)
    return {
        f"{when}_logprob": logprobs[:, -1].copy(),
        f"topk_{when}_logprobs": logprobs[:, :-1].copy(),
        f"{when}_collision": read.collision.cpu().numpy().astype(np.float32),
        f"{when}_entropy": read.entropy.cpu().numpy().astype(np.float32),
    }


def _per_token(values: Tensor, b: Tensor, j: Tensor) -> Tensor:
    """Values a sequence or a token, at the rows."""
    return values[b] if values.ndim == 1 else values[b, j]


def _positions(b: np.ndarray[Any, Any], sequence: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Count the response tokens of each sequence from 0; rows come in order of (b, j)."""
    fresh = np.ones(len(b), np.bool_)
    fresh[1:] = (b[1:] != b[:-1]) | (sequence[1:] != sequence[:-1])
    starts = np.flatnonzero(fresh)
    counted: np.ndarray[Any, Any] = np.arange(len(b)) - starts[np.cumsum(fresh) - 1]
    return counted.astype(np.int32)


def _numpy(values: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    """To NumPy; through float32 where NumPy has no such type."""
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        values = values.float()
    found: np.ndarray[Any, Any] = values.numpy().astype(dtype)
    return found
