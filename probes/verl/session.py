"""One training engine of verl with the plugin: read, train, read again, record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Final

import torch

from deltad.losses import PolicyLogprobs
from deltad.probes.errors import ProbeError
from deltad.probes.random_state import RandomState

from .columns import Columns, read_logits, unpack
from .engines import (
    HALF,
    computes_in_half,
    devices,
    is_policy,
    layout_of,
    leave_sharded,
    must_hand_over_logits,
    vocab_size_of,
)
from .fields import (
    ROW,
    BatchFields,
    asking_for_logits,
    has_topk,
    is_policy_batch,
    read_fields,
)
from .hidden import HiddenReader, can_read_hidden
from .recording import StepRecorder, update_metadata
from .settings import Settings
from .watched_loss import Kept, WatchedLoss, loss_mode_of

LOG: Final = logging.getLogger("deltad.verl")


class EngineSession:
    """What the plugin keeps of one engine.

    Parameters
    ----------
    engine : BaseEngine
        verl's: FSDP2 (run in the tests) or Megatron (read, not run).
    settings : Settings
        What is recorded and how.

    Attributes
    ----------
    step : int
        Number of the next optimizer step.
    """

    def __init__(self, engine: Any, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._layout = layout_of(engine)
        self._recorder = (
            None
            if settings.run is None
            else StepRecorder(
                settings,
                rank=int(engine.get_data_parallel_rank()),
                ranks=int(engine.get_data_parallel_size()),
            )
        )
        self.step = 0 if self._recorder is None else self._recorder.first_step
        self._hidden: HiddenReader | None = None
        self._logits_dtype: str | None = None
        self._announced = False

    def train_batch(self, original: Callable[..., Any], data: Any, loss_function: Any) -> Any:
        """Stand in for the engine's `train_batch`.

        Parameters
        ----------
        original : callable
            The engine's own, of data and loss function.
        data, loss_function
            As the engine is given them.

        Returns
        -------
        dict
            What the original returns.

        Raises
        ------
        ProbeError
            An option of verl that hides the logits, or a batch that lacks what is asked for.
        """
        if not is_policy_batch(data) or not is_policy(self._engine):
            return original(data, loss_function)
        self._announce(loss_function)
        recorder = self._recorder
        if recorder is not None and self.step % self._settings.every:
            recorder = None  # this step is left out
        loss = self._watched(loss_function)
        if recorder is None and not loss.wants_topk:
            output = original(data, loss_function)
        else:
            must_hand_over_logits(self._engine, data)
            if loss.wants_topk and not has_topk(data):
                raise ProbeError(
                    f"policy loss {loss.loss_mode} needs the behaviour policy's top-K in the "
                    "batch: set actor_rollout_ref.rollout.agent.default_agent_loop="
                    "deltad_rescored, without a distillation"
                )
            if recorder is None:
                output = original(asking_for_logits(data), loss)
            else:
                output = self._train_and_record(recorder, original, data, loss_function)
        self.step += 1
        return output

    def _train_and_record(
        self, recorder: StepRecorder, original: Callable[..., Any], data: Any, loss_function: Any
    ) -> Any:
        """Read, train, read again with the same random numbers, and hand the rows over."""
        fields = read_fields(
            data,
            rank=int(self._engine.get_data_parallel_rank()),
            ranks=int(self._engine.get_data_parallel_size()),
        )
        kept = Kept.none_of(fields.mask)
        loss = self._watched(loss_function, kept)
        numbered = asking_for_logits(data, ask=loss.wants_topk)
        numbered[ROW] = torch.arange(len(fields.mask))
        random = RandomState.capture(devices())
        before = self._read(data)
        random.restore()
        output = original(numbered, loss)
        afterwards = RandomState.capture(devices())
        random.restore()
        after = self._read(data)
        afterwards.restore()
        if self._engine.is_mp_src_rank_with_outputs():
            self._record(recorder, fields, before, after, kept, output, loss_function)
        return output

    def _watched(self, loss_function: Any, kept: Kept | None = None) -> WatchedLoss:
        """The engine's loss, watched."""
        return WatchedLoss(
            loss_function, layout=self._layout, vocab_size=self._vocab_size, kept=kept
        )

    def _record(
        self,
        recorder: StepRecorder,
        fields: BatchFields,
        before: PolicyLogprobs | None,
        after: PolicyLogprobs | None,
        kept: Kept,
        output: Any,
        loss_function: Any,
    ) -> None:
        """Hand a step's rows over, unless the engine skipped it."""
        norm = output["metrics"].get("grad_norm")
        if norm is not None and not math.isfinite(float(norm)):
            LOG.warning("optimizer step %d was skipped (gradient norm %s)", self.step, norm)
            return
        if before is None or after is None or not bool(kept.seen.all()):
            raise ProbeError("the engine gave no output of its forwards on the rank that records")
        recorder.write(
            fields,
            before,
            after,
            kept.keep,
            step=self.step,
            vocab_size=self._vocab_size,
            model=str(self._engine.model_config.path),
            readout=self._readout_metadata(),
            update=update_metadata(self._engine, loss_function),
        )

    def _read(self, data: Any) -> PolicyLogprobs | None:
        """Read the policy with the weights as they are, in the batch's own micro-batches."""
        self._hidden = self._hidden_reader()
        with nullcontext() if self._hidden is None else self._hidden.reading():
            asked = asking_for_logits(data, distillation_only=True, calculate_entropy=False)
            output = self._engine.infer_batch(asked, loss_function=self._answer)
        leave_sharded(self._engine)
        if not self._engine.is_mp_src_rank_with_outputs():
            return None
        return unpack(output["model_output"], data)

    def _answer(self, student_logits: Any = None, data: Any = None, **options: Any) -> Any:
        """What stands in for the loss while the policy is read."""
        if student_logits is None:
            return torch.zeros((), device=_device_of(data)), {}
        self._logits_dtype = str(student_logits.dtype).removeprefix("torch.")
        if self._hidden is not None and self._hidden.has_read:
            return self._hidden.columns(student_logits)
        if self._settings.readout == "hidden":
            raise ProbeError(
                "the engine made logits and its output head did not run: set "
                "DELTAD_VERL_READOUT=logits"
            )
        columns: Columns = read_logits(
            student_logits, data, self._layout, vocab_size=self._vocab_size
        )
        return columns

    def _hidden_reader(self) -> HiddenReader | None:
        """A reader of the head's input, where that is wanted and possible."""
        if self._settings.readout == "logits":
            return None
        if can_read_hidden(self._engine):
            always = self._settings.readout == "hidden"
            return self._hidden or HiddenReader(self._engine, self._layout, always=always)
        if self._settings.readout == "hidden":
            raise ProbeError(
                "DELTAD_VERL_READOUT=hidden works with verl's fsdp2 engine and a model that "
                "names its head; use auto or logits here"
            )
        return None

    def _readout_metadata(self) -> dict[str, Any]:
        """How the policy was read."""
        if self._hidden is not None and self._hidden.metadata:
            return {"from": "hidden states", **self._hidden.metadata, "forward": "matching"}
        return {
            "from": "logits",
            "logits_dtype": self._logits_dtype,
            "accumulation": "float32",
            "logits_rounded": self._logits_dtype in HALF or computes_in_half(self._engine),
            "forward": "matching",
        }

    @cached_property
    def _vocab_size(self) -> int:
        """Number of ids."""
        return vocab_size_of(self._engine)

    def _announce(self, loss_function: Any) -> None:
        """Say once that the plugin is there and what it does."""
        if self._announced:
            return
        self._announced = True
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        recorded = (
            "nothing is recorded (DELTAD_VERL_RUN is not set)"
            if self._settings.run is None
            else f"step {self.step} and every {self._settings.every} on are recorded to "
            f"{self._settings.run}"
        )
        # verl shows warnings and what is above.
        LOG.warning(
            "deltad's plugin is loaded; policy loss %s; %s",
            loss_mode_of(loss_function),
            recorded,
        )


def _device_of(data: Any) -> torch.device:
    """Where a micro-batch lies."""
    device: torch.device = data["input_ids"].device
    return device
