"""Every response token's policy before and after one real optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deltad._checks import is_integer
from deltad.masks import DEFAULT_THRESHOLD

from .behavior import ResponseTokens
from .climber import Climber
from .errors import ProbeError
from .forward import Forward
from .head import Head
from .ladder import Ladder
from .microbatch import MicroBatch, Rows
from .monitor import Monitor
from .reading import PolicyReader, Pre, Tail
from .recorder import Recorder
from .scaling import ScalerWatch
from .selection import NEAR, Keep, Selection
from .sharded.sharding import Sharding
from .unwrap import unwrap_model, unwrap_optimizer
from .watch import Watcher


class UpdateProbe:
    """Record what one optimizer step does to the policy at every response token.

    Before each training forward, `expect` says which response tokens are in it. *Pre* is read
    right after that forward, before backward; *post* right after `optimizer.step()`, from the
    same inputs with the same random numbers, autocast state, train or eval mode and kernels, so
    that a step of zero length gives exactly the same numbers. Then the rows go to `record`.

    Parameters
    ----------
    model : nn.Module
        As it is called in training: a causal LM of transformers, bare or within torch.compile
        or DistributedDataParallel; other modules need `head` and `vocab_size`.
    optimizer : torch.optim.Optimizer
        Steps parameters of this model only; accelerate's wrapper is taken off.
    record : callable
        Takes the arm and its columns, once for each micro-batch of a step; a `Recorder` or any
        function.
    temperature : float
        Sampling temperature that all log-probs are at.
    arm : str
        Name of the update that is being applied; `branch` sets it.
    pre : {"auto", "training", "matching"}
        "training" takes *pre* from the training forward itself; "matching" from a no-grad
        forward right after it, and *post* from the same. "auto" takes the training forward if
        making it again gives the same bits (tried once, on the first forward), else matching.
        Compiled models are always matched, in eager mode. Where the forward after the step is
        cut, "matching" reads *pre* of the tokens that are kept once more, by the same cut
        forward, and "auto" does where the cut changes log-probs by more than 1e-5 nats (rms).
    keep : {"all", "outside", "near", "disagreement"}
        Which tokens are read after the step and recorded, by what the dump will hold of them:
        all, those with D before the step above `threshold`, above `near`, or those outside that
        exactly one of `criterion` and `baseline` keeps. Sequences without any are left out of
        the forward after the step, the others end with their last one. A `Recorder` writes the
        rule into the dump's metadata, another `record` must: `stored=probe.stored_metadata`.
    threshold, divergence, near, criterion, baseline
        Of `keep`; see `deltad.probes.selection.Selection`.
    every : int
        Read only every so many-th optimizer step; between, the probe does nothing.
    sequences : float
        Share of the sequences that are read after the step, each drawn by itself; their rows
        carry the column `weight`. Give the dump's metadata `sampling=probe.sampling_metadata`.
    sequences_seed : int
        Of the draw, which touches no generator.
    share_prompts : bool
        Forward what the sequences of a group begin with alike once, and go on from there.
    scaler : GradScaler, optional
        What gradients are scaled with; a step that it skips is dropped and counted. False says
        that there is none under float16 autocast.
    step : int
        Number of the first optimizer step.
    head, vocab_size, scale, softcap
        Override what the model says of its output head (module, ids, factor and bound of the
        logits).
    tp_group : ProcessGroup, optional
        Ranks that work on the same batch and hold the head's rows of some ids each, where their
        weights are plain tensors (Megatron); found for DTensors.
    cp_group : ProcessGroup, optional
        Ranks that each work on a slice of the same sequences (context parallel); see
        `ResponseTokens.at`.
    token_chunk, vocab_chunk : int
        Size of the largest block of logits that the probe makes.
    tail : {"auto", "head", "logits"}
        Where the probability beyond a token's ids comes from in *pre*: from the head applied
        once more, or from the logits that the training forward made, which costs less. "auto"
        takes logits where they are float32 and the forward after the step is cut.
    entropy : bool
        Record entropies too, which cost as much as the rest of the readout's sums.
    workers : int
        Threads of the readout; any number gives the same bits.
    ladder : Ladder, optional
        Measure also what the token's own gradient, its sequence's, the batch's and parts of the
        step do to D; adds the columns of `LADDER_COLUMNS`.

    Attributes
    ----------
    arm : str
        As above; may be set between steps.
    step : int
        Number of the next optimizer step, counted from when the block was entered.
    selection : Selection
        What is kept.
    dropped_steps, dropped_tokens : int
        Steps that the scaler skipped, and their response tokens.
    skipped_tokens : int
        Response tokens that were looked at and not kept.

    Raises
    ------
    ProbeError
        A model, optimizer or option that is not supported; one sentence says why.

    Notes
    -----
    The probe's own forwards run other people's forward hooks again; nothing else of the model,
    the optimizer or the random number generators is touched.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        record: Callable[[str, Rows], None],
        *,
        temperature: float = 1.0,
        arm: str = "actual",
        pre: Pre = "auto",
        keep: Keep = "all",
        threshold: float = DEFAULT_THRESHOLD,
        divergence: str = "kl",
        near: float = NEAR,
        criterion: str = "",
        baseline: str = "ratio",
        every: int = 1,
        sequences: float = 1.0,
        sequences_seed: int = 0,
        share_prompts: bool = False,
        scaler: Any = None,
        step: int = 0,
        head: nn.Module | None = None,
        vocab_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        tp_group: Any = None,
        cp_group: Any = None,
        token_chunk: int = 512,
        vocab_chunk: int = 2048,
        tail: Tail = "auto",
        entropy: bool = False,
        workers: int = 1,
        ladder: Ladder | None = None,
    ) -> None:
        self.selection = Selection(
            keep=keep,
            threshold=threshold,
            divergence=divergence,
            near=near,
            criterion=criterion,
            baseline=baseline,
            sequences=sequences,
            every=every,
            seed=sequences_seed,
        )
        if isinstance(record, Monitor) and not self.selection.whole:
            raise ProbeError(
                "a Monitor counts every response token of a step: leave `keep` and `sequences` "
                "as they are, or give a Recorder"
            )
        number: Any = step
        if not is_integer(number) or number < 0:
            raise ProbeError(f"`step` must be an integer of at least 0, got {number!r}")
        outer, self.model = unwrap_model(model)
        self._sharding = Sharding.of(self.model, tp_group, cp_group)
        if ladder is not None and self._sharding.joint:
            raise ProbeError(
                "the ladder differentiates the whole model at other weights, which one rank of a "
                "sharded model does not have: leave `ladder` out, or use DistributedDataParallel"
            )
        self.optimizer, found = unwrap_optimizer(optimizer, self.model)
        self.scaler = found if scaler is None else scaler
        self.head = Head.of(
            self.model,
            head=head,
            vocab_size=vocab_size,
            scale=scale,
            softcap=softcap,
            group=self._sharding.replicas,
        )
        self.record = record
        self.temperature = temperature
        self.arm = arm
        self.step = step
        self.dropped_steps = 0
        self.dropped_tokens = 0
        self.skipped_tokens = 0
        cuts = share_prompts or not self.selection.whole
        self._watcher = Watcher(
            outer,
            self.model,
            self.head.module,
            wanted=self._is_awaited,
            seen=self._on_forward,
            logits=tail == "logits" or (tail == "auto" and cuts and pre != "matching"),
        )
        self._reader = PolicyReader(
            self.head,
            self._watcher,
            self._sharding,
            self.selection,
            pre=pre,
            tail=tail,
            share_prompts=share_prompts,
            temperature=temperature,
            token_chunk=token_chunk,
            vocab_chunk=vocab_chunk,
            entropy=entropy,
            workers=workers,
        )
        self._climber = (
            None
            if ladder is None
            else Climber(
                ladder,
                self.model,
                self.optimizer,
                self.head,
                self._reader,
                temperature=temperature,
                token_chunk=token_chunk,
            )
        )
        self._part = self._sharding.part()
        if isinstance(record, Recorder) and self._part is not None:
            record.settle(self._part)
        if isinstance(record, Recorder):
            record.select(self.selection.stored, self.selection.sampling)
        self._pending: list[MicroBatch] = []
        self._awaited: MicroBatch | None = None
        self._handles: list[RemovableHandle] = []
        self._stepping = False
        self._steps_seen = 0
        self._scaling = ScalerWatch(
            self.scaler,
            is_ours=self._is_ours,
            steps=lambda: self._steps_seen,
            skipped=self._drop_skipped,
        )

    def __enter__(self) -> Self:
        if self._handles:
            raise ProbeError("the probe is already in place")
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        self._scaling.install()
        self._watcher.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watcher.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._scaling.remove()
        waiting = len(self._pending)
        awaited = self._awaited is not None
        self.discard()
        if kind is None and awaited:
            raise ProbeError("the training forward of the last `expect` never came")
        if kind is None and waiting:
            raise ProbeError(
                f"{waiting} micro-batches were read and no optimizer.step() followed; call "
                "`discard()` to drop them on purpose"
            )

    @property
    def pending(self) -> tuple[MicroBatch, ...]:
        """Micro-batches that wait for the step."""
        return tuple(self._pending)

    @property
    def readout_metadata(self) -> dict[str, Any]:
        """How the policy is read: `Metadata.readout` of a dump; complete after a forward.

        Returns
        -------
        dict
            `hidden_dtype`, `head_dtype` and `accumulation` name dtypes; `logits_rounded` is
            False; `forward` is "training" or "matching"; `verified` says whether the readout was
            held against the model's own logits (there are none where the loss is fused);
            `exact` whether a step of length zero gives the same bits before and after it. With
            `keep`, `sequences` or `share_prompts`, `cut` says whether forwards are cut
            (`forward`: "cut" or "whole"), whether prompts are shared, the largest change and the
            root mean square change of a log-prob when that was tried (`noise` and `rms`, nats),
            and the `reason` for what is not done; `tail` is "logits" where *pre* rests on them.
            `noise_divergence` is the D whose ΔD the column `delta_d_noise` is about.
        """
        return self._reader.metadata

    @property
    def stored_metadata(self) -> Mapping[str, Any]:
        """Which rows are kept: `Metadata.stored` of a dump."""
        return self.selection.stored

    @property
    def sampling_metadata(self) -> Mapping[str, Any] | None:
        """Share of sequences and of steps: `Metadata.sampling` of a dump; None where all are."""
        return self.selection.sampling

    @property
    def reads(self) -> bool:
        """Whether the next optimizer step is one that is read; see `every`."""
        return self.selection.reads(self.step)

    @property
    def ladder_metadata(self) -> dict[str, Any]:
        """How the ladder is measured: the key `ladder` of a dump; complete after a step.

        Returns
        -------
        dict
            The options of `Ladder`, `methods` by rung ("jvp", "central difference", "forward",
            how the sampled tokens' gradients were taken, "none") and the `reasons` for what was
            not done in the first way. Empty without a ladder.
        """
        return {} if self._climber is None else self._climber.metadata

    def expect(self, tokens: ResponseTokens) -> MicroBatch:
        """Announce the next training forward; call it once before each.

        With gradient accumulation, each micro-batch is announced and run in turn; with a
        closure (LBFGS), announce once before `optimizer.step(closure)`: the first evaluation is
        *pre*.

        Parameters
        ----------
        tokens : ResponseTokens
            Aligned with the input_ids of that forward.

        Returns
        -------
        MicroBatch
            Gives the rows so far once the forward is made, and takes the keep mask. In a step
            that `every` passes over it is idle: it has no rows, and nothing is awaited.

        Raises
        ------
        ProbeError
            Outside the block, within a running step, or before the forward announced last.
        """
        if not self._handles:
            raise ProbeError("`expect` is for use within the probe's block: `with probe:`")
        if self._stepping:
            raise ProbeError(
                "`expect` was called within optimizer.step(): announce the forward before "
                "step(closure), whose first evaluation is read (after a step that raised, call "
                "`discard()` first)"
            )
        if self._awaited is not None:
            raise ProbeError(
                "the forward of the `expect` before never came: the model given to the probe "
                "was not called (its wrapper, its `forward`, or a torch.compile'd function around "
                "it, was?); call `discard()` to drop it on purpose"
            )
        if not self.reads:
            return MicroBatch(tokens, idle=True)
        self._awaited = MicroBatch(tokens)
        return self._awaited

    def discard(self) -> None:
        """Drop what waits for a step that will not come."""
        self._pending = []
        self._awaited = None
        self._stepping = False
        if self._climber is not None:
            self._climber.discard()

    def _is_awaited(self) -> bool:
        """Whether the next forward is one that was announced."""
        return self._awaited is not None

    def _on_forward(self, forward: Forward) -> None:
        """Right after a training forward: read *pre*."""
        batch = self._awaited
        if batch is None:
            return
        if self.scaler is None and any(
            enabled and dtype == torch.float16 for _, enabled, dtype in forward.call.autocast
        ):
            raise ProbeError(
                "training under float16 autocast skips steps: give the GradScaler as `scaler` "
                "(or scaler=False if there is none)"
            )
        batch.receive(forward, self.head.vocab_size)
        read = self._reader.before(batch, forward)
        forward.hidden = forward.logits = None
        batch.set_pre(read, self.step)
        self._reader.choose(batch, forward, self.step)
        self._pending.append(batch)
        self._awaited = None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook; makes no forward: that would corrupt sharded models."""
        self._stepping = True
        awaited = [*self._pending, *([] if self._awaited is None else [self._awaited])]
        climber = self._climber
        if climber is not None and climber.ladder.measures(self.arm) and awaited:
            given = kwargs.get("closure", args[1] if len(args) > 1 else None)
            climber.before_step(closure=given is not None)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: read *post* and hand the rows over."""
        self._stepping = False
        self._steps_seen += 1
        found = getattr(optimizer, "found_inf", None)  # fused optimizers skip inside the step
        if found is not None and bool(found):
            self._drop_skipped()
            return
        if self._awaited is not None:
            raise ProbeError(
                "optimizer.step() ran before the forward that `expect` announced: the model "
                "given to the probe was not called (its wrapper, its `forward`, or a "
                "torch.compile'd function around it, was?)"
            )
        pending, self._pending = self._pending, []
        full = [batch for batch in pending if batch.size or self._sharding.joint]
        done = [
            batch.complete(self._reader.after(batch, batch.forward), self.selection.divergence)
            for batch in full
            if batch.forward is not None
        ]
        if full and self._climber is not None and self._climber.ladder.measures(self.arm):
            climbed = self._climber.climb(full, self.step)
            done = [
                {**rows, **batch.recorded(more)}
                for batch, rows, more in zip(full, done, climbed, strict=True)
            ]
        for batch in full:
            batch.forward = None
        self.step += 1
        if self._part is None or self._part.writes:
            self._hand_over(full, done)

    def _hand_over(self, batches: list[MicroBatch], done: list[Rows]) -> None:
        """Give the rows of a step to `record`; a rank without any has a file of none."""
        if self._part is not None and isinstance(self.record, Recorder):
            self.record.writer(self.arm)
        skip = getattr(self.record, "skip", None)
        for batch, rows in zip(batches, done, strict=True):
            if len(rows["step"]):
                self.record(self.arm, rows)
            choice = batch.choice
            if choice is None:
                continue
            self.skipped_tokens += choice.skipped
            if callable(skip) and choice.skipped:
                skip(self.arm, choice.skipped, outside=choice.outside)

    def _is_ours(self, optimizer: Any) -> bool:
        """Whether this is the optimizer, or accelerate's wrapper of it."""
        return optimizer is self.optimizer or getattr(optimizer, "optimizer", 0) is self.optimizer

    def _drop_skipped(self) -> None:
        """Drop a step that the scaler skipped."""
        self.dropped_steps += 1
        self.dropped_tokens += sum(batch.size for batch in self._pending)
        self._pending = []
        if self._climber is not None:
            self._climber.discard()
