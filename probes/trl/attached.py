"""A probe on a trainer: when it is put in place, what it is told, and where its rows go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from torch import Tensor

from deltad.dumps import Metadata
from deltad.dumps.writer import Existing
from deltad.probes.errors import ProbeError
from deltad.probes.microbatch import MicroBatch
from deltad.probes.monitor import ACTUAL
from deltad.probes.probe import UpdateProbe
from deltad.probes.rows import Rows
from deltad.steps import StepQuestion

from . import checks
from .batch import KNOWN, without_ours
from .checks import Behavior
from .describe import describe
from .events import Events
from .loss import MaskedLoss, check_trainer, in_loss
from .metrics import StepSums, over_ranks
from .patches import Patches, undecorated
from .policy import PolicyAsBehavior
from .recording import RunRecorder
from .source import BehaviorSource

_CHUNKS: Final = {"token_chunk": 512, "vocab_chunk": 4096}


@dataclass
class _Current:
    """The micro-batch whose loss is being computed."""

    batch: MicroBatch
    inputs: dict[str, Any]
    mask: Tensor


class Attached:
    """A probe on a trainer; `attach` makes it.

    Attributes
    ----------
    trainer : trl.GRPOTrainer
        As given.
    dropped_steps : int
        Optimizer steps that were skipped (overflow) and therefore not recorded.
    unknown_batches : int
        Micro-batches trained on that were generated before the probe was attached.
    """

    def __init__(
        self,
        trainer: Any,
        run: str | Path | Callable[[str, Rows], None] | None,
        *,
        top_k: int,
        behavior: Behavior,
        loss: MaskedLoss | None,
        question: StepQuestion,
        metrics: bool,
        prefix: str,
        seed: int,
        existing: Existing,
        probe_options: Mapping[str, Any],
    ) -> None:
        if loss is not None:
            check_trainer(trainer)
        if top_k < 1:
            raise ProbeError(f"`top_k` must be at least 1, got {top_k}")
        self.trainer = trainer
        self.dropped_steps = 0
        self.unknown_batches = 0
        self._top_k = top_k
        self._loss = loss
        self._question = question
        self._metrics = metrics
        self._prefix = prefix
        self._seed = seed
        self._rank = int(trainer.accelerator.process_index)
        self._options = {**_CHUNKS, **probe_options}
        self._then = run if callable(run) else None
        self._recorder = (
            None
            if run is None or callable(run)
            else RunRecorder(
                run,
                arm=ACTUAL,
                seed=seed,
                rank=self._rank,
                metadata=self._describe,
                existing=existing,
            )
        )
        self._probe: UpdateProbe | None = None
        self._current: _Current | None = None
        self._sums = StepSums()
        self._verified: bool | None = None
        self._offset = 0
        self._last_step = -1
        self.behavior: Behavior = checks.behavior_of(trainer, behavior)
        self._patches = Patches()
        self._patches.around(trainer, "train", self._around_train)
        self._patches.around(trainer, "compute_loss", self._around_loss)
        self._score = self._patches.around(
            trainer, "_get_per_token_logps_and_entropies", self._around_score
        )
        self._source = BehaviorSource(
            trainer,
            self._patches,
            engine=self.behavior == "engine",
            top_k=top_k,
            wanted=self._is_training,
        )
        self._events = Events(self)
        trainer.add_callback(self._events)
        trainer.__dict__[checks.MARK] = self

    def detach(self) -> None:
        """Take everything off the trainer; files are complete afterwards."""
        if self.trainer.__dict__.get(checks.MARK) is not self:
            return
        self._stop(None, None, None)
        self._patches.restore()
        self.trainer.remove_callback(self._events)
        del self.trainer.__dict__[checks.MARK]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def begin(self, step: int) -> None:
        """When training begins and the optimizer is there; called by the trainer's callback."""
        self._stop(None, None, None)  # a batch size that was too large: the trainer begins anew
        if step == 0:
            self._offset = self._last_step + 1
        if self._recorder is not None:
            self._recorder.begin(self._offset + step, resumed=step > 0)
        trainer, options = self.trainer, self._options
        probe = UpdateProbe(
            trainer.model_wrapped,
            trainer.optimizer,
            self._record,
            temperature=trainer.temperature,
            arm=ACTUAL,
            step=self._offset + step,
            **options,
        )
        self._source.policy = PolicyAsBehavior(
            trainer.model,
            probe.head,
            undecorated(self._score),
            trainer.compute_loss_context_manager,
            top_k=self._top_k,
            temperature=trainer.temperature,
            token_chunk=options["token_chunk"],
            vocab_chunk=options["vocab_chunk"],
        )
        self._verified = None
        self._probe = probe.__enter__()

    def step_begins(self, step: int) -> None:
        """Before an optimizer step's first micro-batch; called by the trainer's callback."""
        if self._probe is None:
            raise ProbeError(
                "the probe was attached while `train()` was running and would record nothing: "
                "attach before it"
            )
        self._sums = StepSums()
        self._probe.step = self._offset + step

    def before_step(self) -> None:
        """Right before the optimizer's step; called by the trainer's callback."""
        if self._probe is not None and not self._wants_rows:
            self._probe.discard()

    def step_ends(self) -> None:
        """After an optimizer step; called by the trainer's callback."""
        probe = self._probe
        if probe is None:
            return
        if probe.pending:  # the step was skipped and no hook fired
            probe.discard()
            self.dropped_steps += 1
        self._last_step = max(self._last_step, probe.step - 1)
        if self._metrics:
            sums = over_ranks(self._sums, self.trainer.accelerator.num_processes)
            for name, value in sums.named(self._prefix).items():
                self.trainer._metrics["train"][name].append(value)
        self._sums = StepSums()

    def saved(self) -> None:
        """After a checkpoint was saved; called by the trainer's callback."""
        if self._recorder is not None:
            self._recorder.cut()

    @property
    def unscored_tokens(self) -> int:
        """Response tokens that vLLM gave no log-prob of, and that are not recorded."""
        return self._source.unscored_tokens

    @property
    def _wants_rows(self) -> bool:
        """Whether anybody reads the policy after the step."""
        return self._metrics or self._recorder is not None or self._then is not None

    def _is_training(self) -> bool:
        """Whether what the trainer does now is part of a recorded training."""
        return self._probe is not None and bool(self.trainer.model.training)

    def _around_train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around `train`: however it ends, the files are complete."""
        with self._until_stop():
            return original(*args, **kwargs)

    @contextmanager
    def _until_stop(self) -> Iterator[None]:
        """Stop recording at the end of the block."""
        try:
            yield
        except BaseException as error:
            self._stop(type(error), error, error.__traceback__)
            raise
        self._stop(None, None, None)

    def _stop(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the probe off the model and complete the files."""
        probe, self._probe = self._probe, None
        self._current = None
        if probe is None:
            return
        probe.discard()  # micro-batches of a step that was not made
        probe.__exit__(kind, error, trace)
        self.dropped_steps += probe.dropped_steps
        if self._recorder is not None:
            if kind is None:
                self._recorder.cut(whole=True)
            else:
                self._recorder.__exit__(kind, error, trace)

    def _around_loss(
        self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Announce the training forward to the probe."""
        probe, known = self._probe, inputs.get(KNOWN)
        inputs = without_ours(inputs)
        if probe is None or not self._is_training():
            return original(model, inputs, *args, **kwargs)
        if known is None:
            if self._loss is not None:
                raise ProbeError(
                    "this micro-batch was generated before the probe was attached, so that a "
                    "criterion cannot judge it: attach before the first `train()`"
                )
            self.unknown_batches += 1
            return original(model, inputs, *args, **kwargs)
        self._current = _Current(probe.expect(known.tokens(inputs)), inputs, known.mask)
        try:
            return original(model, inputs, *args, **kwargs)
        finally:
            self._current = None

    def _around_score(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Right after the training forward, before the loss is made of it."""
        result = original(*args, **kwargs)
        current = self._current
        if current is None or not current.batch.ready:
            return result
        self._current = None
        logps: Tensor = result[0]
        if self._verified is None and current.batch.size:
            if self._probe is None:
                raise ProbeError("the probe is no longer in place")
            checks.check_logps(
                current.batch.rows["pre_logprob"],
                logps[current.mask],
                self._probe.readout_metadata,
                str(self.trainer.accelerator.mixed_precision),
            )
            self._verified = True
        if self._loss is not None:
            self._sums.add_loss(
                self._loss.put_into(current.inputs, logps, current.batch, current.mask)
            )
        elif logps.requires_grad and self._wants_rows:
            logps.register_hook(in_loss(current.batch, current.mask, current.inputs["advantages"]))  # type: ignore[no-untyped-call]
        return result

    def _record(self, arm: str, rows: Rows) -> None:
        """Take the rows of one micro-batch from the probe."""
        if self._recorder is not None:
            self._recorder(rows)
        if self._metrics and self._probe is not None:
            self._sums.add_rows(
                arm,
                rows,
                self._question,
                self._probe.head.vocab_size,
                seed=self._seed,
                rank=self._rank,
            )
        if self._then is not None:
            self._then(arm, rows)

    def _describe(self, arm: str) -> Metadata:
        """Metadata of the dump."""
        if self._probe is None:
            raise ProbeError("the probe is no longer in place")
        return describe(
            self.trainer,
            self._probe.head.vocab_size,
            {**self._probe.readout_metadata, "verified": bool(self._verified)},
            top_k=self._top_k,
            behavior=self.behavior,
            loss=self._loss,
            ladder=self._probe.ladder_metadata,
        )
