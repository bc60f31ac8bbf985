"""The rows of one micro-batch: checked, read before the step, completed after it."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltad.divergence import DIVERGENCES
from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.masks import Tokens
from deltad.support import SupportError, topk_support

from .behavior import ResponseTokens
from .choice import Choice
from .cutting import Grid
from .errors import ProbeError
from .forward import Forward
from .head import Head
from .noise import delta_d_noise
from .parts import taken
from .places import Places
from .readout import Readout
from .rows import Rows as Rows
from .rows import at_rows, behavior_columns, entry_or_scalar, policy_columns, to_numpy
from .sampled import sampled_ids
from .whole import checked_whole, read_whole

_NOT_FINITE_BEFORE: Final = "the policy before the step is not finite"


class MicroBatch:
    """What `UpdateProbe.expect` returns: one micro-batch on its way to the optimizer step.

    Attributes
    ----------
    tokens : ResponseTokens
        As given.
    idle : bool
        Whether its step is one that the probe does not read: then there are no rows.
    choice : Choice or None
        What of it is read after the step and recorded; None for everything.
    """

    def __init__(self, tokens: ResponseTokens, *, idle: bool = False) -> None:
        self.tokens = tokens
        self.idle = idle
        self.choice: Choice | None = None
        self.forward: Forward | None = None
        self._rows: Rows | None = None
        self._keep: Tensor | None = tokens.keep
        none = torch.empty(0, dtype=torch.long)
        self._b, self._j = (none, none) if idle else tokens.where()
        self._ids = torch.empty(0)
        self._full: Tensor | None = None
        self._places: Places | None = None
        self._vocab_size = 0
        self._pre: tuple[np.ndarray[Any, Any], Readout] | None = None

    @property
    def size(self) -> int:
        """Number of response tokens."""
        return self._b.numel()

    @property
    def ready(self) -> bool:
        """Whether the training forward has come."""
        return self._rows is not None

    @property
    def vocab_size(self) -> int:
        """Number of ids n, known once the training forward has come."""
        return self._vocab_size

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
            The training forward has not come yet, or the step is one that is not read.
        """
        if self.idle:
            raise ProbeError(
                "this step is not read, so there are no rows of it: with `every` above 1 ask "
                "`probe.reads` first, or decide masks without the probe"
            )
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
        if self.idle:
            return
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
        sampled = sampled_ids(tokens, forward)
        self._check_attended(forward.call.argument("attention_mask"))
        b, j = self._b.to(sampled.device), self._j.to(sampled.device)
        ids = sampled[b, j]
        self._refuse_where(
            (ids < 0) | (ids >= vocab_size), f"input id outside the vocabulary of {vocab_size}"
        )
        topk = at_rows(tokens.topk_ids, self._b, self._j).to(sampled.device)
        self._refuse_where(
            ((topk < -1) | (topk >= vocab_size)).any(-1),
            f"id in `topk_ids` outside the vocabulary of {vocab_size}",
        )
        self._ids = torch.cat([topk, ids[:, None]], 1).long()
        self._full = checked_whole(tokens, self._ids[:, -1], vocab_size, self._refuse_where)
        places = self._places = Places.of(
            forward, b, j - tokens.shift, batch=batch, length=length, device=b.device
        )
        low = (places.index < 0).nonzero()
        if low.numel():
            row = int(low[0])
            raise ProbeError(
                f"logits_to_keep leaves out position {int(j[row]) - tokens.shift} of row "
                f"{int(b[row])}, whose logits predict the response token at {int(j[row])}"
            )

    def select(self, hidden: Tensor) -> Tensor:
        """Hidden states of the rows, shape (row, hidden)."""
        return self.places.select(hidden)

    @property
    def places(self) -> Places:
        """Where the rows are in the hidden states, known once the training forward has come."""
        if self._places is None:
            raise ProbeError("the rows' places are known once the training forward has been made")
        return self._places

    def ids(self, rows: Tensor) -> Tensor:
        """Ids of some rows, the sampled token's last, shape (row, K + 1); −1 is padding."""
        return self._ids[rows.to(self._ids.device)]

    def batch_rows(self, rows: Tensor) -> Tensor:
        """Rows of the model's batch that hold these rows, each once, ascending."""
        found: Tensor = torch.unique(self._b.cpu()[rows.cpu()])
        return found

    def grid(self) -> Grid:
        """Where the rows stand in the batch that the model was called on."""
        mask, group = self.tokens.response_mask, self.tokens.group
        return Grid(
            to_numpy(self._b, np.int64),
            to_numpy(self._j - self.tokens.shift, np.int64),
            mask.shape[0],
            mask.shape[1],
            to_numpy(group, np.int64) if group.ndim == 1 else None,
        )

    def select_of(self, hidden: Tensor, rows: Tensor, batch_rows: Tensor | None) -> Tensor:
        """Hidden states of some rows, from a forward of the whole batch or of `batch_rows`.

        Parameters
        ----------
        hidden : Tensor
            What the forward gave.
        rows : Tensor of int, shape (row,)
            Which rows are wanted.
        batch_rows : Tensor of int, optional
            What the forward was made of, as `batch_rows` gives it; by default all.

        Returns
        -------
        Tensor, shape (row, hidden)
            In the order of `rows`.

        Raises
        ------
        ProbeError
            The forward's hidden states have another shape than was to be expected.
        """
        return self.places.select_of(hidden, rows, batch_rows)

    def read(self, hidden: Tensor, head: Head, **options: Any) -> Readout:
        """Read the policy at the rows from hidden states of the whole forward."""
        return self.read_at(self.select(hidden), slice(None), head, **options)

    def read_at(
        self,
        selected: Tensor,
        rows: Tensor | slice,
        head: Head,
        *,
        logits: Tensor | None = None,
        **options: Any,
    ) -> Readout:
        """Read the policy at some rows.

        Parameters
        ----------
        selected : Tensor, shape (row, hidden)
            What enters the head there.
        rows : Tensor of int, shape (row,), or slice
            Which rows they are.
        head : Head
            Of the model.
        logits : Tensor, shape (position, vocab), optional
            What the head made in the training forward: the mass beyond the ids of all rows is
            then taken from there.
        **options
            For `Head.read`.

        Returns
        -------
        Readout
            At these rows.
        """
        ids = self._ids[rows]
        if logits is None:
            read = head.read(selected, ids.to(selected.device), **options)
        else:
            read = head.read_logits(
                selected,
                logits,
                ids.to(selected.device),
                rows=self.places.index.to(logits.device),
                **options,
            )
        if self._full is not None:
            full = read_whole(self._full[rows], selected, ids[:, -1], head, options)
            read = dataclasses.replace(read, full=full)
        return read

    def read_nothing(self) -> Readout:
        """Readout of no rows."""
        none = torch.empty(0, dtype=torch.float64)
        full = {} if self._full is None else {family: (none, none) for family in DIVERGENCES}
        return Readout(none, none.new_empty(0, self.tokens.top_k + 1), none, none, full)

    def replace_pre(self, rows: np.ndarray[Any, Any], read: Readout) -> None:
        """Put another reading of some rows in the place of the one of before.

        Parameters
        ----------
        rows : array of int, shape (row,)
            Which rows.
        read : Readout
            At these rows, with the same weights.
        """
        self._refuse_where(_of(~read.logsumexp.isfinite(), rows), _NOT_FINITE_BEFORE)
        columns = policy_columns(read, "pre")
        known = self.rows
        for name, values in columns.items():
            known[name] = known[name].copy()
            known[name][rows] = values
        self._rows = known
        self._pre = rows, read

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
        rows, index = self.places.among(columns, logits.device)
        head.check_against(
            head.own_logits(logits, index),
            read.logprobs.to(logits.device)[rows],
            self._ids.to(logits.device)[rows],
            temperature=temperature,
            dtypes=dtypes,
        )

    def set_pre(self, read: Readout, step: int) -> None:
        """Fill the columns that are known before the step, and check them."""
        bad = ~read.logsumexp.isfinite()
        self._refuse_where(bad.cpu(), _NOT_FINITE_BEFORE)
        rows = {
            **behavior_columns(self.tokens, self._ids[:, -1], step),
            **policy_columns(read, "pre"),
        }
        self._refuse_where(
            torch.from_numpy(~np.isfinite(rows["advantage"])), "`advantages` is not finite"
        )
        try:
            # In float64, as every reader of the dump computes.
            topk_support(
                rows["topk_ids"],
                rows["topk_behavior_logprobs"].astype(np.float64),
                rows["topk_pre_logprobs"].astype(np.float64),
                rows["token_id"],
                rows["behavior_logprob"].astype(np.float64),
                rows["pre_logprob"].astype(np.float64),
                vocab_size=self._vocab_size,
            )
        except SupportError as error:
            raise ProbeError(f"{self._place(error.row)}: {error.reason}") from error
        # They may differ by rounding, as checked above; one number is stored.
        rows["behavior_logprob"] = entry_or_scalar(rows)
        self._rows = rows
        self._pre = np.arange(self.size), read

    def complete(self, read: Readout, divergence: str = "kl") -> Rows:
        """All columns of the rows that are recorded, after the step.

        Parameters
        ----------
        read : Readout
            At the rows that `choice` has read; at all where it has them all.
        divergence : {"kl", "tv"}
            Whose ΔD the bound of its error is of.

        Returns
        -------
        Rows
            In the order of `response_mask.nonzero()`.
        """
        every = np.arange(self.size)
        choice = self.choice
        kept = every if choice is None else choice.kept
        # A readout of no rows, too, has only what was chosen: also where forwards are whole.
        given = every if choice is None or len(read.logsumexp) == self.size else choice.read
        bad = ~read.logsumexp.isfinite()
        self._refuse_where(_of(bad, given), "the policy after the step is not finite: it diverged")
        after = taken(read, torch.from_numpy(np.searchsorted(given, kept)))
        found = {**self.recorded(self.rows), **policy_columns(after, "post")}
        if self._pre is not None:
            rows, before = self._pre
            before = taken(before, torch.from_numpy(np.searchsorted(rows, kept)))
            found["delta_d_noise"] = delta_d_noise(
                found, before, after, divergence, vocab_size=self._vocab_size
            )
        if choice is not None and choice.weight is not None:
            found["weight"] = np.full(len(kept), choice.weight, np.float32)
        return found

    def recorded(self, columns: Rows) -> Rows:
        """Take of columns of all rows those of the rows that are recorded."""
        if self.choice is None:
            return columns
        return {name: values[self.choice.kept] for name, values in columns.items()}

    def _in_loss(self) -> np.ndarray[Any, Any]:
        """Column in_loss."""
        if self._keep is None:
            return np.ones(len(self._b), np.bool_)
        return to_numpy(at_rows(self._keep, self._b, self._j), np.bool_)

    def _check_attended(self, attention_mask: Any) -> None:
        """Refuse response tokens that are padding or come right after it."""
        if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
            return
        if attention_mask.shape != self.tokens.response_mask.shape:
            return
        b, j = self._b.to(attention_mask.device), self._j.to(attention_mask.device)
        shift = self.tokens.shift
        self._refuse_where(
            (attention_mask[b, j] == 0) | (attention_mask[b, j - shift] == 0),
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


def _of(bad: Tensor, rows: np.ndarray[Any, Any]) -> Tensor:
    """Numbers of the rows that are bad, as a mask over all rows up to the last of them."""
    found = torch.zeros(int(rows[-1]) + 1 if len(rows) else 0, dtype=torch.bool)
    found[torch.from_numpy(rows)] = bad.cpu()
    return found
