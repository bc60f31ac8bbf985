"""Decides what of a micro-batch is read after the step, and by which forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .choice import Choice
from .cutting import CutError, Rows, plan_cut, run_cut
from .forward import Forward
from .head import Head
from .microbatch import MicroBatch
from .parts import widened
from .plan import Plan
from .readout import Readout
from .selection import Selection
from .sharded.sharding import Sharding
from .trial import Trial, try_cut
from .watch import Watcher

# Rounding in other shapes, root mean square in nats, with which *pre* may come from the whole
# forward and *post* from the cut one: float32 stays below, TF32 and half precision far above.
_GOOD_ENOUGH: Final = 1e-5


class Cutter:
    """Cuts forwards to what is wanted of them, where that is proved to change nothing.

    Parameters
    ----------
    head : Head
        Of the model.
    watcher : Watcher
        Is paused while the model is called.
    sharding : Sharding
        Which ranks must make the same forwards: these are not cut.
    selection : Selection
        What is wanted.
    share_prompts : bool
        Forward what the sequences of a group begin with alike once.
    pre : {"auto", "training", "matching"}
        Whether *pre* of what is recorded is read again, by the cut forward; see `UpdateProbe`.
    **reading
        Options for `Head.read`.

    Attributes
    ----------
    trial : Trial or None
        What came of trying it; None before, and where nothing is to be cut.
    """

    def __init__(
        self,
        head: Head,
        watcher: Watcher,
        sharding: Sharding,
        selection: Selection,
        *,
        share_prompts: bool,
        pre: str,
        **reading: Any,
    ) -> None:
        self.trial: Trial | None = None
        self._head = head
        self._watcher = watcher
        self._sharding = sharding
        self._selection = selection
        self._share = share_prompts
        self._asked = pre
        self._reading = reading

    @property
    def wanted(self) -> bool:
        """Whether the options ask for anything but whole forwards."""
        return self._share or not self._selection.whole

    @property
    def cuts(self) -> bool:
        """Whether forwards after the step are cut."""
        return self.trial is not None and self.trial.cut

    @property
    def reads_again(self) -> bool:
        """Whether *pre* of what is recorded is read again, by the cut forward of *post*."""
        if self.trial is None or not self.trial.cut or self._asked == "training":
            return False
        return self._asked == "matching" or self.trial.rms > _GOOD_ENOUGH

    @property
    def exact(self) -> bool:
        """Whether a cut forward before and one after a step of length zero give the same bits."""
        return self.reads_again and self.trial is not None and self.trial.repeatable

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the readout: the key `cut`, where anything is to be cut."""
        trial = self.trial
        if trial is None:
            return {}
        return {
            "cut": {
                "forward": "cut" if trial.cut else "whole",
                "prompts": "shared" if trial.shared else "each",
                "noise": trial.noise,
                "rms": trial.rms,
                "reason": trial.reason,
            }
        }

    def attempt(self, batch: MicroBatch, forward: Forward, read: Readout) -> None:
        """Find out whether forwards may be cut, with the weights of before a step.

        Parameters
        ----------
        batch : MicroBatch
            The first with rows.
        forward : Forward
            Its training forward.
        read : Readout
            Of it, at all rows.
        """
        if not self.wanted:
            return
        if self._sharding.joint:
            self.trial = Trial(False, reason="ranks make their forwards together")
        elif batch.tokens.at == "logits":
            self.trial = Trial(False, reason="a rank's slice of a sequence is not cut again")
        else:
            dtypes = {each.dtype for each in forward.call.module.parameters()}
            dtypes |= {dtype for _, enabled, dtype in forward.call.autocast if enabled}
            self.trial = try_cut(
                forward,
                batch.grid(),
                read,
                lambda rows, plan: self._made(batch, forward, rows, plan),
                share_prompts=self._share,
                dtypes=dtypes,
            )

    def choose(
        self, batch: MicroBatch, forward: Forward, step: int, whole: Callable[[], Readout] | None
    ) -> None:
        """Choose what of a micro-batch is read after the step, once its rows are known.

        Parameters
        ----------
        batch : MicroBatch
            Is given its choice; *pre* of some of its rows may be read again.
        forward : Forward
            The training forward.
        step : int
            Number of the step.
        whole : callable, optional
            Reads *pre* by a whole forward that *post* may be compared with, where that is not
            the training forward.
        """
        selection = self._selection
        if not batch.size or not self.wanted:
            return
        drawn = selection.drawn(step, batch.rows["sequence"])

        def wanted(slack: float = 0.0) -> Rows:
            if selection.keep == "all":
                return np.flatnonzero(drawn)
            return np.flatnonzero(drawn & selection.wanted(batch.criterion_tokens(), slack=slack))

        plan: Plan | None = None
        read = wanted()
        if self.trial is not None and self.trial.cut and batch.tokens.at == "token":
            if self.reads_again:
                # What differs by rounding in a log-prob differs by no more in D.
                read = wanted(2 * self.trial.noise)
            plan = plan_cut(forward, batch.grid(), read, share_prompts=self.trial.shared)
            try:
                if self.reads_again and len(read):
                    batch.replace_pre(read, self._made(batch, forward, read, plan)[1])
            except CutError:  # an argument that the first forward did not have
                plan = None
        if plan is None and self.cuts and whole is not None:
            batch.replace_pre(np.arange(batch.size), whole())
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

    def read(self, batch: MicroBatch, forward: Forward, choice: Choice) -> Readout | None:
        """Read *post* by the forwards that were planned.

        Parameters
        ----------
        batch : MicroBatch
            Of the step.
        forward : Forward
            The training forward.
        choice : Choice
            What is read of it.

        Returns
        -------
        Readout or None
            At the rows of `choice.read`; None where only a whole forward can be made.
        """
        if choice.plan is None:
            return None
        try:
            read = self._made(batch, forward, choice.read, choice.plan)[1]
        except CutError:
            return None
        if self.reads_again or self.trial is None:
            return read
        # *Pre* is of the whole forward, whose products were rounded in other shapes.
        return widened(read, self.trial.rms)

    def _made(
        self, batch: MicroBatch, forward: Forward, rows: Rows, plan: Plan
    ) -> tuple[Tensor, Readout]:
        """Make a cut forward and read the rows that it was made for."""
        with self._watcher.paused():
            hidden = run_cut(forward, self._head.module, batch.grid(), rows, plan)
        read = batch.read_at(hidden, torch.from_numpy(rows), self._head, **self._reading)
        return hidden, read
