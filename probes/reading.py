"""Read the policy before and after a step, so that the two can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from .errors import ProbeError
from .forward import Forward, again, own_logits
from .head import Head
from .microbatch import MicroBatch
from .readout import Readout
from .sharded.sharding import Sharding
from .watch import Watcher

T = TypeVar("T")

Pre = Literal["auto", "training", "matching"]
"""Where *pre* comes from; see `UpdateProbe`."""

_PRE: Final = ("auto", "training", "matching")


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
    pre : {"auto", "training", "matching"}
        As asked for.
    temperature : float
        Of all log-probs.
    token_chunk, vocab_chunk : int
        Size of the largest block of logits.

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
        *,
        pre: Pre,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
    ) -> None:
        if pre not in _PRE:
            raise ProbeError(f"`pre` must be one of {', '.join(_PRE)}, got {pre!r}")
        for name, value in (
            ("temperature", temperature),
            ("token_chunk", token_chunk),
            ("vocab_chunk", vocab_chunk),
        ):
            if not value > 0:
                raise ProbeError(f"`{name}` must be positive, got {value}")
        if pre == "training" and watcher.compiled:
            raise ProbeError(
                "`pre` cannot be 'training' for a compiled model: hooks inside it are ignored, "
                "so its hidden states cannot be seen; leave it at 'auto'"
            )
        self._head = head
        self._watcher = watcher
        self._sharding = sharding
        self._pre: Pre = "matching" if watcher.compiled else pre
        self._reading = {
            "temperature": temperature,
            "token_chunk": token_chunk,
            "vocab_chunk": vocab_chunk,
        }
        self._temperature = temperature
        self._verified: bool | None = None
        self._unproved_after = True
        self._exact: bool | None = None
        self._hidden_dtype: torch.dtype | None = None
        self._head_dtype: torch.dtype | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """See `UpdateProbe.readout_metadata`."""
        hidden, weight = self._hidden_dtype, self._head_dtype or self._head.weight.dtype
        return {
            "hidden_dtype": None if hidden is None else str(hidden).removeprefix("torch."),
            "head_dtype": str(weight).removeprefix("torch."),
            "accumulation": "float64" if torch.float64 in (hidden, weight) else "float32",
            "logits_rounded": False,
            "forward": self._pre,
            "verified": self._verified,
            "exact": self._exact,
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
                return self._read_first(batch, forward)
            if self._pre == "training" and forward.hidden is not None:
                return self._read_hidden(batch, forward.hidden)
            return self._read_again(batch, forward)[1]

    def after(self, batch: MicroBatch, forward: Forward) -> Readout:
        """Read *post*, after the step."""
        with self._sharding.visit(stale=True):
            # Once after a step too: what an adapter on the head adds may begin at zero.
            _, read = self._read_again(batch, forward, verify=self._unproved_after)
            self._unproved_after = False
            return read

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

    def _read_hidden(self, batch: MicroBatch, hidden: Tensor) -> Readout:
        """Read the rows from hidden states of a whole forward, with all of the head."""
        self._sharding.gather(self._head.module)
        self._head_dtype = self._head.weight.dtype
        return batch.read(hidden, self._head, **self._reading)


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
