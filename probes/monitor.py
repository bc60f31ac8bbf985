"""A live monitor: what each optimizer step did, in a few numbers, while training runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np

from deltad.dumps import Batch, Metadata
from deltad.masks import DEFAULT_THRESHOLD, VALUES, CriterionError, Rule
from deltad.steps import StepQuestion, StepScalars, count_steps

from .rows import Rows
from .sinks import AnySink, Sink, StepSink

ACTUAL: Final = "actual"
"""The arm that a training without arms is recorded as; its numbers have no arm in their names."""

_ANY_SIZE: Final = 2**31 - 1
"""Stands for a vocabulary of unknown size: there is always a tail."""


class Monitor:
    """Counts the rows of a probe step by step and logs each step when it is complete.

    Give it to `UpdateProbe` as `record`, alone or before a `Recorder`, which then gets the same
    rows. A step is complete when the next one begins, or at the end of the block. Training is
    not changed: the rows are NumPy copies and are only read, no random number is drawn, nothing
    of torch is touched.

    Parameters
    ----------
    sink : sink, callable, or a sequence of them
        Where steps go: see `deltad.probes.sinks`; a function takes `(scalars, step)`.
    threshold, divergence, criterion, baseline, masked
        What is counted; see `deltad.steps.StepQuestion`.
    every : int
        Count and log one step in this many: those whose number it divides.
    then : callable, optional
        Gets every call after the monitor: a `Recorder`, say. Its errors are its own and are
        always raised; as a context manager it is entered and left with the monitor.
    seed, rank : int
        Where the rows are from; ranks log for themselves, and `deltad watch` adds them up.
    vocab_size : int, optional
        n; needed by criteria with a uniform or exact tail, and where K reaches n.
    prefix : str
        Begins all names. Numbers of another arm than `actual` are named `<prefix>/<arm>/…`.
    sums : bool
        With the sums that metrics are quotients of, as `<prefix>_sums/…`.
    on_error : {"warn", "raise"}
        What to do where counting or a sink fails: one warning for each sink and for counting,
        then silence, and training goes on; or raise.

    Attributes
    ----------
    last : dict of str to StepScalars
        The newest complete step that was counted, by arm.
    failures : int
        Errors that were not raised.

    Raises
    ------
    CriterionError
        The question makes no sense, or needs `vocab_size`.
    ValueError
        `every` is below 1, or `on_error` unknown.
    """

    def __init__(
        self,
        sink: AnySink | Sequence[AnySink],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        divergence: str = "kl",
        criterion: str | Rule = "",
        baseline: str | Rule = "ratio",
        masked: Sequence[str | Rule] = ("clip-higher",),
        every: int = 1,
        then: Callable[[str, Rows], None] | None = None,
        seed: int = 0,
        rank: int = 0,
        vocab_size: int | None = None,
        prefix: str = "deltad",
        sums: bool = True,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every!r}")
        if on_error not in ("warn", "raise"):
            raise ValueError(f'`on_error` must be "warn" or "raise", got {on_error!r}')
        self.question = StepQuestion(threshold, divergence, criterion, baseline, tuple(masked))
        if vocab_size is None:
            for name, each in self.question.rules.items():
                if any(VALUES[value].counts_ids for value in each.named):
                    raise CriterionError(f"criterion {name} needs to know `vocab_size`")
        self.sinks: tuple[AnySink, ...] = tuple(sink) if isinstance(sink, Sequence) else (sink,)
        self.last: dict[str, StepScalars] = {}
        self.failures = 0
        self._every = every
        self._then = then
        self._seed, self._rank = seed, rank
        self._vocab_size = _ANY_SIZE if vocab_size is None else vocab_size
        self._prefix, self._sums = prefix, sums
        self._on_error = on_error
        self._open: dict[str, StepScalars] = {}
        self._warned: set[int] = set()

    def __call__(self, arm: str, rows: Rows) -> None:
        """Count the rows of one micro-batch, then hand them on."""
        try:
            self._count(arm, rows)
        except Exception as error:
            self._failed(self, "counting a step", error)
        if self._then is not None:
            self._then(arm, rows)

    def flush(self) -> None:
        """Log what is counted so far of steps that are not known to be complete."""
        for arm in list(self._open):
            self._close(self._open.pop(arm))

    def __enter__(self) -> Self:
        enter = getattr(self._then, "__enter__", None)
        if enter is not None:
            enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            leave = getattr(self._then, "__exit__", None)
            if leave is not None:
                leave(kind, error, trace)

    def _count(self, arm: str, rows: Rows) -> None:
        """Close the steps that are over, and add one micro-batch to its own."""
        numbers = np.unique(rows["step"])
        for name, step in list(self._open.items()):
            if step.step not in numbers:
                self._close(self._open.pop(name))
        if (numbers % self._every != 0).all():
            return
        metadata = Metadata(top_k=rows["topk_ids"].shape[1], vocab_size=self._vocab_size)
        batch = Batch("the rows of the probe", 0, rows, np.ones(len(rows["step"]), np.bool_))
        for step in count_steps(
            batch, metadata, self.question, arm=arm, seed=self._seed, rank=self._rank
        ):
            known = self._open.pop(arm, None)
            if known is not None and known.step != step.step:
                self._close(known)
                known = None
            self._open[arm] = step if known is None else known + step

    def _close(self, step: StepScalars) -> None:
        """Log a complete step."""
        if step.step % self._every:
            return
        self.last[step.arm] = step
        prefix = self._prefix if step.arm == ACTUAL else f"{self._prefix}/{step.arm}"
        for sink in self.sinks:
            try:
                _send(sink, step, step.scalars(prefix=prefix, sums=self._sums))
            except Exception as error:
                self._failed(sink, f"logging step {step.step} to {type(sink).__name__}", error)

    def _failed(self, whose: object, doing: str, error: Exception) -> None:
        """Raise, or warn once for each sink."""
        if self._on_error == "raise":
            raise error
        self.failures += 1
        if id(whose) not in self._warned:
            self._warned.add(id(whose))
            warnings.warn(
                f"{doing} failed ({type(error).__name__}: {error}); training goes on and further "
                "failures of this kind are only counted, in `Monitor.failures`",
                RuntimeWarning,
                stacklevel=2,
            )


def _send(sink: AnySink, step: StepScalars, scalars: Mapping[str, float]) -> None:
    """Give a sink what it takes."""
    if isinstance(sink, StepSink):
        sink.log_step(step)
    elif isinstance(sink, Sink):
        sink.log(scalars, step.step)
    else:
        sink(scalars, step.step)
