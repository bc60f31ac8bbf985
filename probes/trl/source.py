"""Where μ comes from, and how it travels with TRL's batches to the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deltad.probes.errors import ProbeError

from .batch import KNOWN, ROW, BehaviorRows, loss_mask
from .engine import EngineAsBehavior
from .patches import Patches
from .policy import PolicyAsBehavior


class BehaviorSource:
    """Notes what the behavior policy says of every micro-batch of a generation.

    TRL generates for several steps at once, shuffles, and cuts the result into micro-batches,
    which it keeps. A number for each completion goes through that with the rest. After it, and
    before any step is made, μ is noted beside each micro-batch and stays there for as long as
    TRL trains on it.

    Parameters
    ----------
    trainer : trl.GRPOTrainer
        Its methods are stood around.
    patches : Patches
        With which.
    engine : bool
        Whether μ is vLLM's; else it is read from the policy.
    top_k : int
        K.
    wanted : callable
        Whether what the trainer does now is part of a recorded training.

    Attributes
    ----------
    policy : PolicyAsBehavior or None
        Reads the model; set when training begins.
    unscored_tokens : int
        Response tokens that vLLM gave no log-prob of.
    """

    def __init__(
        self,
        trainer: Any,
        patches: Patches,
        *,
        engine: bool,
        top_k: int,
        wanted: Callable[[], bool],
    ) -> None:
        self.policy: PolicyAsBehavior | None = None
        self.unscored_tokens = 0
        self._trainer = trainer
        self._wanted = wanted
        self._buffer: Any = trainer._buffered_inputs  # generated before: nothing is known of it
        self._first = 0  # number of this rank's first completion in the newest generation
        self._completions = 0
        self._engine: EngineAsBehavior | None = None
        if engine:
            generation = trainer.vllm_generation
            self._engine = EngineAsBehavior(generation, top_k, wanted)
            patches.around(generation, "generate", self._engine.generate)
        patches.around(trainer, "_generate_and_score_completions", self._around_generation)
        patches.around(trainer, "_prepare_inputs", self._around_prepare)

    def _around_generation(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Number the completions."""
        if not self._wanted():
            return original(*args, **kwargs)
        if self._engine is not None:
            self._engine.begin()
        batch = original(*args, **kwargs)
        ids = batch["completion_ids"]
        accelerator = self._trainer.accelerator
        self._first = self._completions + accelerator.process_index * len(ids)
        self._completions += accelerator.num_processes * len(ids)
        batch[ROW] = torch.arange(self._first, self._first + len(ids), device=ids.device)
        if self._engine is not None:
            self._engine.end(batch)
        return batch

    def _around_prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """After a generation, note μ beside every micro-batch."""
        inputs = original(*args, **kwargs)
        buffer = self._trainer._buffered_inputs
        if self._wanted() and buffer is not self._buffer:
            self._buffer = buffer
            for each in buffer:
                if ROW in each:
                    each[KNOWN] = self._behavior_of(each)
        return inputs

    def _behavior_of(self, inputs: Mapping[str, Any]) -> BehaviorRows:
        """What the behavior policy says of one micro-batch."""
        rows = inputs[ROW]
        if self._engine is not None:
            read = self._engine.read(inputs, (rows - self._first).tolist())
            self.unscored_tokens += int(loss_mask(inputs).sum()) - int(read[0].sum())
        elif self.policy is not None:
            read = self.policy.read(inputs)
        else:
            raise ProbeError("the probe is no longer in place")
        return BehaviorRows(*read, sequence=rows, group=rows // self._trainer.num_generations)
