"""Read the policy before and after a step, so that the two can be compared bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from .cutter import Cutter
from .errors import ProbeError
from .forward import Forward, again, own_logits
from .head import Head
from .microbatch import MicroBatch
from .readout import Readout
from .readout.checks import check_options
from .selection import Selection
from .sharded.sharding import Sharding
from .sharded.tensors import is_sharded
from .watch import Watcher

T = TypeVar("T")

Pre = Literal["auto", "training", "matching"]
"""Where *pre* comes from; see `UpdateProbe`."""

Tail = Literal["auto", "head", "logits"]
"""Where the mass beyond a row's ids comes from in *pre*; see `UpdateProbe`."""


class PolicyReader:
    """Decides where *pre* is read, proves that *post* is comparable, and reads both.

    Parameters
    ----------
    head : Head
        Of the model.
    watcher : Watcher
        Is paused while the model is called again.
    sharding : Sharding
        Which ranks must do the same.
    selection : Selection
        What is read after the step.
    pre : {"auto", "training", "matching"}
        As asked for.
    tail : {"auto", "head", "logits"}
        As asked for.
    share_prompts : bool
        As asked for.
    temperature : float
        Of all log-probs.
    token_chunk, vocab_chunk : int
        Size of the largest block of logits.
    **reading
        Further options for `Head.read`.

    Raises
    ------
    ProbeError
        An option that makes no sense, or "training" for a compiled model.
    """

    def __init__(
        self,
        head: Head,
        watcher: Watcher,
        sharding: Sharding,
        selection: Selection,
        *,
        pre: Pre,
        tail: Tail = "head",
        share_prompts: bool = False,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
        **reading: Any,
    ) -> None:
        for name, value, allowed in (
            ("pre", pre, get_args(Pre)),
            ("tail", tail, get_args(Tail)),
        ):
            if value not in allowed:
                raise ProbeError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}")
        check_options(
            head.softcap,
            temperature,
            token_chunk,
            vocab_chunk,
            scale=head.scale,
            workers=reading.get("workers", 1),
        )
        if pre == "training" and watcher.compiled:
            raise ProbeError(
                "`pre` cannot be 'training' for a compiled model: hooks inside it are ignored, "
                "so its hidden states cannot be seen; leave it at 'auto'"
            )
        self._head = head
        self._watcher = watcher
        self._sharding = sharding
        self._selection = selection
        self._pre: Pre = "matching" if watcher.compiled else pre
        self._tail: Tail = tail
        self._reading = {
            "temperature": temperature,
            "token_chunk": token_chunk,
            "vocab_chunk": vocab_chunk,
            **reading,
        }
        self._cutter = Cutter(
            head,
            watcher,
            sharding,
            selection,
            share_prompts=share_prompts,
            pre=pre,
            **self._reading,
        )
        self._temperature = temperature
        self._verified: bool | None = None
        self._unproved_after = True
        self._exact: bool | None = None
        self._reads_logits = False
        self._hidden_dtype: torch.dtype | None = None
        self._head_dtype: torch.dtype | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """See `UpdateProbe.readout_metadata`."""
        hidden, weight = self._hidden_dtype, self._head_dtype or self._head.weight.dtype
        cutter, forward = self._cutter, str(self._pre)
        if cutter.cuts:
            forward = "matching" if cutter.reads_again else "training"
        return {
            "hidden_dtype": None if hidden is None else str(hidden).removeprefix("torch."),
            "head_dtype": str(weight).removeprefix("torch."),
            "accumulation": "float64" if torch.float64 in (hidden, weight) else "float32",
            "logits_rounded": False,
            "forward": forward,
            "verified": self._verified,
            "exact": self._exact,
            "noise_divergence": self._selection.divergence,
            **cutter.metadata,
            **({"tail": "logits"} if self._reads_logits else {}),
        }

    def before(self, batch: MicroBatch, forward: Forward) -> Readout:
        """Read *pre* right after the training forward: from it, or from a matching one.

        Where ranks make forwards together, one without response tokens makes them too.
        """
        if not (batch.size or self._sharding.joint):
            return batch.read_nothing()
        with self._sharding.visit():
            if self._verified is None:
                # Until some rank has tokens, nothing is proved.
                if not self._sharding.any(batch.size > 0):
                    return batch.read_nothing()
                read = self._read_first(batch, forward)
                self._settle(batch, forward, read)
                if not (self._cutter.cuts or self._reads_logits):
                    return read
                # Now as every micro-batch after this one, and every other arm of this one.
            if forward.hidden is not None and (self._pre == "training" or self._cutter.cuts):
                logits = forward.logits if self._reads_logits else None
                return self._read_hidden(batch, forward.hidden, logits)
            return self._read_again(batch, forward)[1]

    def choose(self, batch: MicroBatch, forward: Forward, step: int) -> None:
        """Choose what of a micro-batch is read after the step; right after `before`.

        Parameters
        ----------
        batch : MicroBatch
            Knows its rows; of some of them *pre* may be read again.
        forward : Forward
            The training forward.
        step : int
            Number of the step.
        """
        whole = None if self._pre == "training" else lambda: self._read_again(batch, forward)[1]
        with self._sharding.visit():
            self._cutter.choose(batch, forward, step, whole)

    def after(self, batch: MicroBatch, forward: Forward) -> Readout:
        """Read *post*, after the step: at the rows that the micro-batch's choice has read."""
        choice = batch.choice
        if choice is not None and not len(choice.read) and not self._sharding.joint:
            return batch.read_nothing()
        with self._sharding.visit(stale=True):
            # Once after a step too: what an adapter on the head adds may begin at zero.
            unproved, self._unproved_after = self._unproved_after, False
            if choice is None or choice.plan is None:
                return self._read_again(batch, forward, verify=unproved)[1]
            whole = self._read_again(batch, forward, verify=True)[1] if unproved else None
            read = self._cutter.read(batch, forward, choice)
            if read is not None:
                return read
            batch.choice = dataclasses.replace(choice, plan=None)
            return self._read_again(batch, forward)[1] if whole is None else whole

    def read(self, batch: MicroBatch) -> Readout:
        """Read the policy with the weights as they are now, as *post* is read."""
        if batch.forward is None:
            raise ProbeError("the micro-batch's training forward is gone")
        with self._sharding.visit(stale=True):
            return self._read_again(batch, batch.forward)[1]

    def undisturbed(self, function: Callable[[], T]) -> T:
        """Call a function whose forwards are the probe's own."""
        with self._watcher.paused():
            return function()

    def _read_first(self, batch: MicroBatch, forward: Forward) -> Readout:
        """Decide where *pre* comes from: prove that a forward made again gives the same bits."""
        trained = forward.hidden
        if self._pre != "matching" and trained is not None:
            asked, self._pre = self._pre, "training"
            hidden, read = self._read_again(batch, forward, verify=True)
            same = _same_bits(batch.select(trained), batch.select(hidden))
            if self._sharding.all(same):
                self._exact = True
                return read
            if asked == "training":
                raise ProbeError(
                    "the training forward made again with the same inputs and weights gives "
                    "other hidden states, so `pre` from it could not be compared with `post`; "
                    "use pre='auto'"
                )
        self._pre = "matching"
        hidden, read = self._read_again(batch, forward, verify=True)
        with self._watcher.paused():
            once_more = again(forward, self._head.module, grad=False).hidden
        same = _same_bits(batch.select(hidden), batch.select(once_more))
        self._exact = self._sharding.all(same)
        return read

    def _read_again(
        self, batch: MicroBatch, forward: Forward, *, verify: bool = False
    ) -> tuple[Tensor, Readout]:
        """Make a forward again and read it; with `verify` hold it against the model's logits."""
        columns = batch.places.columns() if verify and batch.size and forward.shortens else None
        grad = forward.call.grad and self._pre == "training"
        with self._watcher.paused():
            self._sharding.gather_around(forward.call.module)
            made = again(forward, self._head.module, grad=grad, columns=columns)
            logits = None
            if verify:
                model = self._watcher.model
                logits = _logits(made.output) if forward.from_head else own_logits(model, forward)
        hidden = made.hidden
        self._hidden_dtype = hidden.dtype
        read = self._read_hidden(batch, hidden)
        # Policies that are not finite are refused with their place by the micro-batch.
        if verify and self._sharding.all(bool(read.logsumexp.isfinite().all())):
            self._verified = logits is not None
            if logits is not None and batch.size:
                dtypes = made.dtypes | {hidden.dtype, logits.dtype, self._head.weight.dtype}
                dtypes |= {dtype for _, enabled, dtype in forward.call.autocast if enabled}
                batch.check_logits(
                    logits, columns, self._head, read, temperature=self._temperature, dtypes=dtypes
                )
        return hidden, read

    def _read_hidden(
        self, batch: MicroBatch, hidden: Tensor, logits: Tensor | None = None
    ) -> Readout:
        """Read the rows from hidden states of a whole forward, with all of the head."""
        self._sharding.gather(self._head.module)
        self._hidden_dtype = hidden.dtype
        self._head_dtype = self._head.weight.dtype
        if logits is None:
            return batch.read(hidden, self._head, **self._reading)
        flat = logits.reshape(-1, logits.shape[-1])
        return batch.read_at(
            batch.select(hidden), slice(None), self._head, logits=flat, **self._reading
        )

    def _settle(self, batch: MicroBatch, forward: Forward, read: Readout) -> None:
        """Try what the options ask for beside a whole forward, once."""
        cutter = self._cutter
        cutter.attempt(batch, forward, read)
        if cutter.cuts:
            self._exact = cutter.exact
        if self._tail == "logits" or (
            self._tail == "auto" and cutter.cuts and not cutter.reads_again
        ):
            self._reads_logits = self._try_logits(batch, forward, read)
            self._exact = self._exact and not self._reads_logits

    def _try_logits(self, batch: MicroBatch, forward: Forward, read: Readout) -> bool:
        """Find out whether the logits of the training forward give what hidden states give."""
        logits, why = forward.logits, ""
        if logits is None or forward.hidden is None:
            why = "the training forward makes none that can be seen"
        elif is_sharded(logits) or logits.shape[-1] != self._head.vocab_size:
            why = "a rank has some of them only"
        elif self._tail == "auto" and logits.dtype.itemsize < 4:
            return False  # rounded: better from the head, at more cost
        else:
            found = self._read_hidden(batch, forward.hidden, logits)
            error = (found.logprobs - read.logprobs).abs()
            worst = float(error[~error.isnan()].max()) if batch.size else 0.0
            allowed = 1e-3 if logits.dtype.itemsize >= 4 else 0.1
            if not worst <= allowed:
                why = f"with them log-probs differ by {worst:.2g} nats"
        if why and self._tail == "logits":
            raise ProbeError(
                f"the tail of `pre` cannot be taken from the model's own logits: {why}; leave "
                "`tail` at 'auto'"
            )
        return not why


def _logits(output: Any) -> Tensor | None:
    """Logits in what a model returns."""
    if isinstance(output, dict):
        output = output.get("logits")
    elif isinstance(output, tuple):
        output = next((part for part in output if _is_logits(part)), None)
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    return output.detach() if _is_logits(output) else None


def _is_logits(value: Any) -> bool:
    """Whether this can be logits: neither a loss nor a mask."""
    return isinstance(value, Tensor) and value.ndim in (2, 3) and value.is_floating_point()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal everywhere, NaN with NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
