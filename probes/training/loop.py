"""The loop: roll out, step through the batch under the mask, evaluate now and then."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltad.curves import BatchLine
from deltad.dumps import Metadata
from deltad.losses import TopKLogprobs, trust_region_loss
from deltad.masks import rule
from deltad.probes.behavior import ResponseTokens
from deltad.probes.microbatch import MicroBatch, Rows
from deltad.probes.monitor import Monitor
from deltad.probes.probe import UpdateProbe
from deltad.probes.recipes.batch import (
    TOKEN_CHUNK,
    VOCAB_CHUNK,
    Minibatch,
    SharedPrefix,
    read_behavior,
    split,
)
from deltad.probes.recipes.describe import describe, start_of
from deltad.probes.recipes.rollout import World
from deltad.probes.recipes.update import make_optimizer
from deltad.probes.recipes.workers import Report
from deltad.probes.recorder import Recorder
from deltad.probes.sinks import JsonLines
from deltad.steps import StepScalars

from .files import Run, RunFiles
from .options import Training
from .precision import RolloutModel, RoundedTraining
from .sampling import HeldOut, evaluate, roll_out


@dataclass(frozen=True)
class Trainer:
    """What one worker needs to train one run after the other.

    Attributes
    ----------
    training
        What to do.
    world
        Model and task.
    policy
        What is trained, called as in the recipes.
    start
        The weights that every run begins with.
    held_out
        Prompts of the evaluations.
    """

    training: Training
    world: World
    policy: SharedPrefix
    start: Mapping[str, Tensor]
    source: Mapping[str, Any]
    held_out: HeldOut

    @classmethod
    def load(cls, training: Training) -> Trainer:
        """Load model and task of a prepared recipe."""
        world = training.recipe.load()
        source = start_of(training.recipe, world.model.state_dict())
        start = {name: v.detach().clone() for name, v in world.model.named_parameters()}
        held_out = HeldOut.draw(training, world)
        return cls(training, world, SharedPrefix(world.model), start, source, held_out)

    def train(self, folder: Path, run: Run, report: Report) -> None:
        """Train with one mask and seed, from the newest checkpoint on.

        Parameters
        ----------
        folder
            RUN.
        run
            Which mask and seed.
        report
            Told what goes on.

        Raises
        ------
        RecipeError
            The mask cannot be trained with, or the checkpoint cannot be read.
        """
        training, world = self.training, self.world
        training.mask(run.mask)
        files = RunFiles(folder, run)
        saved = files.load()
        first = 0 if saved is None else int(saved["batch"])
        files.cut(first, training)
        self._put(self.start if saved is None else saved["weights"])
        optimizer = make_optimizer(training.recipe, self.policy)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
        rollouts = RolloutModel(world.model, training.settings)
        with RoundedTraining(world.model, optimizer, training.settings.training_weights) as weights:
            for batch in range(first, training.batches):
                self._batch(files, batch, optimizer, rollouts, report)
                if training.saves(batch + 1):
                    files.save(batch + 1, weights.master, optimizer.state_dict())
                report(f"batch {batch + 1}", (batch + 1) / training.batches)
            with rollouts.serving() as served:
                sums = self._evaluate(served, run, training.batches)
        last = training.batches
        files.write_line(BatchLine(run.mask, run.seed, last, training.steps, sums))

    def _batch(
        self,
        files: RunFiles,
        batch: int,
        optimizer: torch.optim.Optimizer,
        rollouts: RolloutModel,
        report: Report,
    ) -> None:
        """One rollout batch and the steps through it."""
        training, world, run = self.training, self.world, files.run
        with rollouts.serving() as served:
            sums = self._evaluate(served, run, batch) if training.evaluates(batch) else {}
            groups, sampled = roll_out(
                training, world, self.held_out, served.inner, seed=run.seed, batch=batch
            )
            minibatches = [
                (each, self._read(served, each))
                for each in split(groups, training.prompts, world.pad_id)
            ]
        step = batch * training.minibatches
        counted = self._steps(files, step, optimizer, minibatches)
        line = BatchLine(run.mask, run.seed, batch, step, {**sums, **sampled, **counted})
        files.write_line(line)
        shown = line.values()
        report(f"batch {batch + 1}: reward {shown['reward']:.3f}", (batch + 1) / training.batches)

    def _evaluate(self, served: SharedPrefix, run: Run, batch: int) -> dict[str, float]:
        """Held-out accuracy of the policy as it is served."""
        return evaluate(
            self.training, self.world, self.held_out, served.inner, seed=run.seed, batch=batch
        )

    def _read(self, served: SharedPrefix, minibatch: Minibatch) -> ResponseTokens:
        """What the rollout policy gives to a minibatch's tokens."""
        return read_behavior(
            served,
            minibatch,
            temperature=self.training.temperature,
            top_k=self.training.top_k,
            full=self.training.full,
        )

    def _steps(
        self,
        files: RunFiles,
        first: int,
        optimizer: torch.optim.Optimizer,
        minibatches: list[tuple[Minibatch, ResponseTokens]],
    ) -> dict[str, float]:
        """Step through a rollout batch; sums over its tokens."""
        training, run = self.training, files.run
        counts = StepSums(run.mask)
        every = training.probe_every
        recorder = Recorder(
            files.dump,
            seed=run.seed,
            metadata_for=lambda arm: self._metadata(arm, probe.readout_metadata),
            existing="append",
        )

        def record(arm: str, rows: Rows) -> None:
            counts.rows(rows)
            monitor(arm, rows)
            if every and (rows["step"] % every == 0).all():
                texts = self.world.pieces(rows["token_id"].tolist())
                recorder(arm, {**rows, "token": np.asarray(texts, dtype=object)})

        monitor = Monitor(
            [JsonLines(files.folder), counts],
            threshold=training.threshold,
            divergence=training.divergence,
            criterion="" if rule(run.mask).push == "ratio" else run.mask,
            masked=(run.mask, "clip-higher"),
            seed=run.seed,
            vocab_size=self.world.vocab_size,
            on_error="raise",
        )
        probe = UpdateProbe(
            self.policy,
            optimizer,
            record,
            temperature=training.temperature,
            arm=run.mask,
            pre="training",
            step=first,
            token_chunk=TOKEN_CHUNK,
            vocab_chunk=VOCAB_CHUNK,
            entropy=True,
        )
        with ExitStack() as stack:
            stack.enter_context(recorder)
            stack.enter_context(monitor)
            stack.enter_context(probe)
            for minibatch, tokens in minibatches:
                self._step(probe, optimizer, minibatch, tokens, run.mask)
        return counts.sums()

    def _step(
        self,
        probe: UpdateProbe,
        optimizer: torch.optim.Optimizer,
        minibatch: Minibatch,
        tokens: ResponseTokens,
        mask: str,
    ) -> None:
        """One optimizer step under the mask, decided from what the probe reads."""
        training = self.training
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(probe.step)
        measured = probe.expect(tokens)
        logits = minibatch.logits(self.policy(**minibatch.inputs)).float() / training.temperature
        logprob = logits.gather(1, minibatch.sampled()[:, None])[:, 0] - logits.logsumexp(1)
        rows = measured.rows
        # The value of the float32 readout, which the dump holds, with the model's gradient.
        read = torch.from_numpy(rows["pre_logprob"])
        result = trust_region_loss(
            measured.scatter(read + (logprob - logprob.detach())),
            measured.scatter(rows["behavior_logprob"]),
            minibatch.advantages,
            minibatch.response_mask,
            criterion=mask,
            threshold=training.threshold,
            divergence=training.divergence,
            topk=_topk(measured, rows),
            full=_whole(measured, rows),
            ratio_cap=training.ratio_cap,
            aggregation="token-mean",
        )
        measured.keep(result.keep)
        result.loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _metadata(self, arm: str, readout: Mapping[str, Any]) -> Metadata:
        """What the dump of every so many-th step says of itself."""
        training = self.training
        made = describe(
            training.recipe,
            arm,
            vocab_size=self.world.vocab_size,
            readout=readout,
            stored={"rule": "all"},
            start=self.source,
        )
        settings = training.settings
        return dataclasses.replace(
            made,
            behavior={
                **made.behavior,
                "precision": f"{settings.rollout_weights} weights, {settings.rollout_arithmetic}",
            },
            update={**made.update, "criterion": arm},
            extra={
                "training": training.to_json(),
                "start": made.extra["start"],
                "arithmetic": made.extra["arithmetic"],
            },
        )

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model these weights, in place."""
        for name, value in self.world.model.named_parameters():
            value.copy_(weights[name])
            value.grad = None


@dataclass
class StepSums:
    """Adds up what the steps through a rollout batch came to; a monitor's sink."""

    mask: str
    _sums: dict[str, float] = field(default_factory=dict)

    def log_step(self, step: StepScalars) -> None:
        """Take a step's counts."""
        found: dict[str, float] = {
            name: step.counts[name]
            for name in (
                "tokens", "outside", "disagreement", "outside_increase", "outside_determined",
            )
        }  # fmt: skip
        found |= {
            "masked": step.masked.get(self.mask, 0),
            "kl": step.logprobs.k1,
            "clipped": step.logprobs.clipped,
            "clip_tokens": step.logprobs.clip_tokens,
            "delta_d": step.delta_d[0],
            "delta_d_outside": step.delta_d[1],
        }
        for name, value in found.items():
            self._add(name, value)

    def rows(self, rows: Rows) -> None:
        """Take a micro-batch's entropies."""
        self._add("entropy", float(rows["pre_entropy"].astype(np.float64).sum()))

    def sums(self) -> dict[str, float]:
        """By the names of `deltad.curves`."""
        return dict(self._sums)

    def _add(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._sums[name] = self._sums.get(name, 0.0) + value


def _topk(measured: MicroBatch, rows: Rows) -> TopKLogprobs:
    """Both policies at the rollout policy's top-K ids, as the dump will hold them."""

    def laid(name: str, fill: float) -> Tensor:
        values = torch.from_numpy(np.ascontiguousarray(rows[name]))
        shape = (*measured.tokens.response_mask.shape, *values.shape[1:])
        whole = torch.full(shape, fill, dtype=values.dtype)
        whole[measured.tokens.where()] = values
        return whole

    return TopKLogprobs(
        token_ids=laid("token_id", 0).long(),
        topk_ids=laid("topk_ids", -1).long(),
        behavior=laid("topk_behavior_logprobs", 0.0),
        policy=laid("topk_pre_logprobs", 0.0),
        vocab_size=measured.vocab_size,
        collision=laid("pre_collision", 0.0),
    )


def _whole(measured: MicroBatch, rows: Rows) -> dict[str, tuple[Tensor, Tensor]] | None:
    """D and Ḋ over the whole vocabulary, where they were read."""
    if "full_kl_pre" not in rows:
        return None
    return {
        name: (
            measured.scatter(rows[f"full_{name}_pre"]),
            measured.scatter(rows[f"full_{name}_direction"]),
        )
        for name in ("kl", "tv")
    }
