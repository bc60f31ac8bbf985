"""One training engine of verl with the plugin: read, train, read again, record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

from deltad.losses import PolicyLogprobs
from deltad.probes.errors import ProbeError
from deltad.probes.random_state import RandomState
from deltad.probes.sharded.fsdp import is_fsdp1, reshard

from .columns import Columns, Layout, read_logits, unpack
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

_HALF: Final = ("bfloat16", "float16")


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
        wanted = self._recorder is not None and self.step % self._settings.every == 0
        loss = WatchedLoss(
            loss_function, layout=self._layout, vocab_size=self._vocab_size(), kept=None
        )
        if not wanted and not loss.wants_topk:
            self.step += 1
            return original(data, loss_function)
        self._must_hand_over_logits(data)
        if loss.wants_topk and not has_topk(data):
            raise ProbeError(
                f"policy loss {loss.loss_mode} needs the behaviour policy's top-K in the batch: "
                "set actor_rollout_ref.rollout.agent.default_agent_loop=deltad_rescored, without "
                "a distillation"
            )
        recorder = self._recorder
        if recorder is None or not wanted:
            self.step += 1
            return original(asking_for_logits(data), loss)
        fields = read_fields(
            data,
            rank=int(self._engine.get_data_parallel_rank()),
            ranks=int(self._engine.get_data_parallel_size()),
        )
        kept = Kept.none_of(fields.mask)
        loss = WatchedLoss(
            loss_function, layout=self._layout, vocab_size=self._vocab_size(), kept=kept
        )
        random = RandomState.capture(self._devices())
        before = self._read(data)
        random.restore()
        numbered = asking_for_logits(data, ask=loss.wants_topk)
        numbered[ROW] = torch.arange(len(fields.mask))
        output = original(numbered, loss)
        afterwards = RandomState.capture(self._devices())
        random.restore()
        after = self._read(data)
        afterwards.restore()
        if self._engine.is_mp_src_rank_with_outputs():
            self._record(recorder, fields, before, after, kept, output, loss_function)
        self.step += 1
        return output

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
            vocab_size=self._vocab_size(),
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
        self._leave_sharded()
        if not self._engine.is_mp_src_rank_with_outputs():
            return None
        return unpack(output["model_output"], data)

    def _answer(self, student_logits: Any = None, data: Any = None, **options: Any) -> Any:
        """What stands in for the loss while the policy is read."""
        if student_logits is None:
            return torch.zeros((), device=_device_of(data)), {}
        dtype = str(student_logits.dtype).removeprefix("torch.")
        self._logits_dtype = dtype
        if self._hidden is not None and (self._settings.readout == "hidden" or dtype in _HALF):
            return self._hidden.columns(student_logits)
        columns: Columns = read_logits(
            student_logits, data, self._layout, vocab_size=self._vocab_size()
        )
        return columns

    def _hidden_reader(self) -> HiddenReader | None:
        """A reader of the head's input, where that is wanted and possible."""
        if self._settings.readout == "logits":
            return None
        if can_read_hidden(self._engine):
            return self._hidden or HiddenReader(self._engine, self._layout)
        if self._settings.readout == "hidden":
            raise ProbeError(
                "DELTAD_VERL_READOUT=hidden works with verl's fsdp2 engine and a model that "
                "names its head; use auto or logits here"
            )
        return None

    def _readout_metadata(self) -> dict[str, Any]:
        """How the policy was read."""
        if self._hidden is not None and self._hidden.used:
            return {"from": "hidden states", **self._hidden.metadata, "forward": "matching"}
        return {
            "from": "logits",
            "logits_dtype": self._logits_dtype,
            "accumulation": "float32",
            "logits_rounded": self._logits_dtype in _HALF,
            "forward": "matching",
        }

    def _must_hand_over_logits(self, data: Any) -> None:
        """Refuse the options of verl under which nobody sees the logits."""
        from verl.utils import tensordict_utils as tu

        config = self._engine.engine_config
        fused = tu.get_non_tensor_data(
            data, key="use_fused_kernels", default=getattr(config, "use_fused_kernels", False)
        )
        if fused:
            raise ProbeError(
                "the logits, which deltad's plugin reads, are never made under fused kernels: set "
                "actor_rollout_ref.model.use_fused_kernels=False"
            )
        if getattr(self._engine, "enable_routing_replay", False):
            raise ProbeError(
                "the forwards in which deltad's plugin reads the policy would use up the routes that "
                "router replay keeps for the training: set router_replay.mode=disabled"
            )
        if getattr(config, "pad_to_length", False):
            raise ProbeError(
                "verl does not hand over logits of packed batches that it pads to a length: set "
                "actor_rollout_ref.actor.fsdp_config.pad_to_length=False (or the Megatron engine's)"
            )

    def _leave_sharded(self) -> None:
        """Leave no weight gathered: the optimizer would pass it by."""
        module = self._engine.module
        if not isinstance(module, torch.nn.Module):
            return  # Megatron's list of chunks, whose weights stay where they are
        reshard(module)
        if is_fsdp1(module) and torch.distributed.get_world_size() > 1:
            module._handle.reshard(True)  # type: ignore[union-attr, operator]

    def _devices(self) -> list[torch.device]:
        """Where random numbers are drawn."""
        from verl.utils.device import get_device_id, get_device_name

        name = get_device_name()
        return [torch.device(name, int(get_device_id()))] if name == "cuda" else []

    def _vocab_size(self) -> int:
        """Number of ids, by the model's config."""
        config = self._engine.model_config.hf_config
        getter = getattr(config, "get_text_config", None)
        return int((getter() if callable(getter) else config).vocab_size)

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
            "deltad's plugin is loaded; policy loss %s; %s", loss_mode_of(loss_function), recorded
        )


def layout_of(engine: Any) -> Layout:
    """How an engine lays out its positions."""
    config = engine.engine_config
    if getattr(config, "strategy", None) != "megatron":
        return Layout()
    return Layout("thd" if config.use_remove_padding else "bshd")


def is_policy(engine: Any) -> bool:
    """Whether an engine trains a language model (not a critic)."""
    return getattr(engine.model_config, "model_type", "language_model") == "language_model"


def _device_of(data: Any) -> torch.device:
    """Where a micro-batch lies."""
    device: torch.device = data["input_ids"].device
    return device
