"""Read the policy before and after a step, so that the two can be compared bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from .choice import Choice
from .cutting import CutError, Rows, plan_cut, run_cut
from .errors import ProbeError
from .forward import Forward, again, own_logits
from .head import Head
from .microbatch import MicroBatch
from .parts import widened
from .plan import Plan
from .readout import Readout
from .selection import Selection
from .sharded.sharding import Sharding
from .sharded.tensors import is_sharded
from .trial import Trial, try_cut
from .watch import Watcher

T = TypeVar("T")

Pre = Literal["auto", "training", "matching"]
"""Where *pre* comes from; see `UpdateProbe`."""

Tail = Literal["auto", "head", "logits"]
"""Where the mass beyond a row's ids comes from in *pre*; see `UpdateProbe`."""

# Rounding in other shapes, in nats, up to which *pre* of a cut forward may come from the whole.
_AS_GOOD_AS_EXACT: Final = 1e-5


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
        for name, number in (
            ("temperature", temperature),
            ("token_chunk", token_chunk),
            ("vocab_chunk", vocab_chunk),
        ):
            if not number > 0:
                raise ProbeError(f"`{name}` must be positive, got {number}")
        if pre == "training" and watcher.compiled:
            raise ProbeError(
                "`pre` cannot be 'training' for a compiled model: hooks inside it are ignored, "
                "so its hidden states cannot be seen; leave it at 'auto'"
            )
        self._head = head
        self._watcher = watcher
        self._sharding = sharding
        self._selection = selection
        self._asked: Pre = pre
        self._pre: Pre = "matching" if watcher.compiled else pre
        self._tail: Tail = tail
        self._share = share_prompts
        self._reading = {
            "temperature": temperature,
            "token_chunk": token_chunk,
            "vocab_chunk": vocab_chunk,
            **reading,
        }
        self._temperature = temperature
        self._verified: bool | None = None
        self._unproved_after = True
        self._exact: bool | None = None
        self._trial: Trial | None = None
        self._reads_logits = False
        self._hidden_dtype: torch.dtype | None = None
        self._head_dtype: torch.dtype | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """See `UpdateProbe.readout_metadata`."""
        hidden, weight = self._hidden_dtype, self._head_dtype or self._head.weight.dtype
        trial = self._trial
        cut: dict[str, Any] = {}
        if trial is not None:
            cut = {
                "cut": {
                    "forward": "cut" if trial.cut else "whole",
                    "prompts": "shared" if trial.shared else "each",
                    "noise": trial.noise,
                    "rms": trial.rms,
                    "reason": trial.reason,
                }
            }
        if self._reads_logits:
            cut["tail"] = "logits"
        return {
            "hidden_dtype": None if hidden is None else str(hidden).removeprefix("torch."),
            "head_dtype": str(weight).removeprefix("torch."),
            "accumulation": "float64" if torch.float64 in (hidden, weight) else "float32",
            "logits_rounded": False,
            "forward": self._pre if not self._cuts else "matching" if self._again else "training",
            "verified": self._verified,
            "exact": self._exact,
            "noise_divergence": self._selection.divergence,
            **cut,
        }

    @property
    def _cuts(self) -> bool:
        """Whether forwards after the step are cut."""
        return self._trial is not None and self._trial.cut

    @property
    def _again(self) -> bool:
        """Whether *pre* of what is recorded is read again, by the cut forward of *post*."""
        trial = self._trial
        if trial is None or not trial.cut or self._asked == "training":
            return False
        return self._asked == "matching" or trial.noise > _AS_GOOD_AS_EXACT

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
                if not (self._cuts or self._reads_logits):
                    return read
                # Now as every micro-batch after this one, and every other arm of this one.
            if forward.hidden is not None and (self._pre == "training" or self._cuts):
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
        selection = self._selection
        if not batch.size or (selection.whole and not self._share):
            return
        drawn = selection.drawn(step, batch.rows["sequence"])

        def wanted(slack: float = 0.0) -> Rows:
            if selection.keep == "all":
                return np.flatnonzero(drawn)
            return np.flatnonzero(drawn & selection.wanted(batch.criterion_tokens(), slack=slack))

        # What differs by rounding in a log-prob differs by no more in D.
        read = wanted(2 * self._trial.noise if self._again and self._trial else 0.0)
        plan: Plan | None = None
        if self._cuts and batch.tokens.at == "token":
            plan = plan_cut(
                forward, batch.grid(), read, share_prompts=bool(self._trial and self._trial.shared)
            )
            try:
                if self._again and len(read):
                    batch.replace_pre(read, self._read_cut(batch, forward, read, plan)[1])
            except CutError:  # an argument that the first forward did not have
                plan = None
        if plan is None and self._cuts and self._pre == "matching":
            with self._sharding.visit():
                batch.replace_pre(np.arange(batch.size), self._read_again(batch, forward)[1])
        kept, outside = wanted(), 0
        if selection.keep == "disagreement":
            outside = int((drawn & selection.outside(batch.criterion_tokens())).sum()) - len(kept)
        batch.choice = Choice(
            kept=kept,
            read=read,
            plan=plan,
            looked_at=int(drawn.sum()),
            outside=outside,
            weight=None if selection.sequences == 1 else selection.weight,
        )

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
            if unproved:
                self._read_again(batch, forward, verify=True)
            try:
                read = self._read_cut(batch, forward, choice.read, choice.plan)[1]
            except CutError:
                batch.choice = dataclasses.replace(choice, plan=None)
                return self._read_again(batch, forward)[1]
            if self._again or self._trial is None:
                return read
            # *Pre* is of the whole forward, whose products were rounded in other shapes.
            return widened(read, self._trial.rms)

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

    def _read_cut(
        self, batch: MicroBatch, forward: Forward, rows: Rows, plan: Plan
    ) -> tuple[Tensor, Readout]:
        """Make a cut forward and read the rows that it was made for."""
        with self._watcher.paused():
            hidden = run_cut(forward, self._head.module, batch.grid(), rows, plan)
        index = torch.from_numpy(rows)
        return hidden, batch.read_at(hidden, index, self._head, **self._reading)

    def _settle(self, batch: MicroBatch, forward: Forward, read: Readout) -> None:
        """Try what the options ask for beside a whole forward, once."""
        if not (self._selection.whole and not self._share):
            self._trial = self._try_cut(batch, forward, read)
            if self._trial.cut:
                self._exact = self._again and self._trial.repeatable
        if self._tail == "logits" or (self._tail == "auto" and self._cuts and not self._again):
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

    def _try_cut(self, batch: MicroBatch, forward: Forward, read: Readout) -> Trial:
        """Find out whether the forward may be cut."""
        if self._sharding.joint:
            return Trial(False, reason="ranks make their forwards together")
        if batch.tokens.at == "logits":
            return Trial(False, reason="a rank's slice of a sequence is not cut again")
        return try_cut(
            forward,
            batch.grid(),
            read,
            lambda rows, plan: self._read_cut(batch, forward, rows, plan),
            share_prompts=self._share,
            dtypes=self._dtypes(forward),
        )

    def _dtypes(self, forward: Forward) -> set[torch.dtype]:
        """All that numbers of a forward may be rounded to."""
        found = {each.dtype for each in forward.call.module.parameters()}
        found |= {dtype for _, enabled, dtype in forward.call.autocast if enabled}
        return found


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
