"""One seed: roll out, then step through the batch, measuring each step's arms from one state."""

from __future__ import annotations

import importlib.metadata
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltad.dumps import Metadata, write_prompts
from deltad.dumps.batch import Batch
from deltad.dumps.tokens import batch_tokens
from deltad.losses import policy_loss
from deltad.masks import criterion
from deltad.probes.arms import ZERO_STEP, Snapshot, branch
from deltad.probes.behavior import ResponseTokens
from deltad.probes.microbatch import MicroBatch, Rows
from deltad.probes.probe import UpdateProbe
from deltad.probes.recorder import Recorder

from .batch import TOKEN_CHUNK, VOCAB_CHUNK, Minibatch, SharedPrefix, read_behavior, split
from .recipe import Recipe
from .rollout import Group, World, mixed_groups, stream
from .weights import round_weights
from .workers import Report

UNMASKED = "none"
"""The arm that keeps every token."""


@dataclass(frozen=True)
class Chain:
    """What one worker needs to record seeds of a recipe.

    Attributes
    ----------
    recipe
        What to do.
    world
        Its model and task.
    policy, optimizer
        What is updated.
    start
        The state that every seed begins from, after the warm-up.
    """

    recipe: Recipe
    world: World
    policy: SharedPrefix
    optimizer: torch.optim.Optimizer
    start: Snapshot

    @classmethod
    def load(cls, recipe: Recipe, report: Report) -> Chain:
        """Load model and task of a prepared recipe, and warm the optimizer up."""
        world = recipe.load()
        policy = SharedPrefix(world.model)
        optimizer = _optimizer(recipe, policy)
        for update in range(recipe.warmup_updates):
            groups = _groups(recipe, world, 0, f"warmup-{update}", recipe.prompts)
            for minibatch in split(groups, recipe.prompts, world.pad_id):
                _step(recipe, policy, optimizer, minibatch, None, lambda: None)
            report("warm-up", (update + 1) / recipe.warmup_updates)
        optimizer.zero_grad(set_to_none=True)
        return cls(recipe, world, policy, optimizer, Snapshot(policy, optimizer))

    def record(self, run: Path, seed: int, stored: Mapping[str, Any], report: Report) -> None:
        """Record one seed into a dump.

        Parameters
        ----------
        run
            The dump's folder.
        seed
            Everything random follows from it.
        stored
            Which rows are kept, as in the dump's metadata; whole dumps get prompts and decoded
            tokens too.
        report
            Told what goes on.

        Raises
        ------
        RecipeError
            No groups with mixed rewards were found.
        """
        recipe, world, policy, optimizer = self.recipe, self.world, self.policy, self.optimizer
        self.start.restore()
        groups, batches = self._roll_out(seed, report)
        whole = stored["rule"] == "all"
        if whole:
            write_prompts(run, seed=seed, rows=_prompt_rows(groups))

        recorder = Recorder(
            run,
            seed=seed,
            metadata_for=lambda arm: self._metadata(arm, probe, stored),
            existing="replace",
        )

        def record_rows(arm: str, rows: Rows) -> None:
            if whole:
                texts = world.pieces(rows["token_id"].tolist())
                rows = {**rows, "token": np.asarray(texts, dtype=object)}
            recorder(arm, rows)

        probe = UpdateProbe(
            policy,
            optimizer,
            record_rows,
            temperature=recipe.temperature,
            token_chunk=TOKEN_CHUNK,
            vocab_chunk=VOCAB_CHUNK,
        )
        with recorder, probe:
            for index, (minibatch, tokens) in enumerate(batches):
                if index < recipe.unmeasured:
                    _step(recipe, policy, optimizer, minibatch, tokens, lambda: None)
                else:
                    optimizer.zero_grad(set_to_none=True)  # so that arms need no copy of them
                    branch(
                        policy,
                        optimizer,
                        recipe.arms_of(seed),
                        partial(self._measured_step, probe, minibatch, tokens),
                        go_on=recipe.go_on,
                        probe=probe,
                    )
                report("updates", (index + 1) / len(batches))

    def _measured_step(
        self, probe: UpdateProbe, minibatch: Minibatch, tokens: ResponseTokens, arm: str
    ) -> None:
        """Make one arm's update under the probe."""
        measured = probe.expect(tokens)

        def keep() -> Tensor:
            mask = self._keep(arm, measured)
            measured.keep(mask)
            return mask

        _step(self.recipe, self.policy, self.optimizer, minibatch, tokens, keep)

    def _roll_out(
        self, seed: int, report: Report
    ) -> tuple[list[Group], list[tuple[Minibatch, ResponseTokens]]]:
        """Sample the batch from the behavior policy and keep what it says of every token."""
        recipe, world = self.recipe, self.world
        wanted = recipe.minibatches * recipe.prompts
        with _rounded(world.model, recipe.behavior_rounding):
            groups = _groups(
                recipe,
                world,
                seed,
                "rollout",
                wanted,
                lambda found: report("rollouts", found / wanted),
            )
            batches = [
                (
                    minibatch,
                    read_behavior(
                        self.policy,
                        minibatch,
                        temperature=recipe.temperature,
                        top_k=recipe.top_k,
                    ),
                )
                for minibatch in split(groups, recipe.prompts, world.pad_id)
            ]
        return groups, batches

    def _keep(self, arm: str, measured: MicroBatch) -> Tensor:
        """Decide an arm's mask from the very numbers that the dump will hold."""
        if arm in (UNMASKED, ZERO_STEP):
            return torch.ones(measured.size, dtype=torch.bool)
        batch = Batch("", 0, measured.rows, np.ones(measured.size, dtype=np.bool_))
        kept = criterion(arm).keep(
            batch_tokens(batch, self._shape()),
            threshold=self.recipe.threshold,
            divergence=self.recipe.divergence,
        )
        return torch.from_numpy(np.ascontiguousarray(kept))

    def _shape(self) -> Metadata:
        """Metadata as far as the mathematics needs them."""
        return Metadata(
            top_k=self.recipe.top_k,
            vocab_size=self.world.vocab_size,
            temperature=self.recipe.temperature,
        )

    def _metadata(self, arm: str, probe: UpdateProbe, stored: Mapping[str, Any]) -> Metadata:
        """Metadata of an arm's files."""
        recipe, facts = self.recipe, self.recipe.model_facts()
        return Metadata(
            top_k=recipe.top_k,
            vocab_size=self.world.vocab_size,
            temperature=recipe.temperature,
            model=facts["model"],
            tokenizer=facts["tokenizer"],
            behavior={
                "engine": "transformers, key-value cache; log-probs by one forward",
                "precision": facts["precision"],
                "staleness": "the policy moved by the earlier minibatches of the rollout batch",
                "logprobs_mode": "processed_logprobs",
                "top_p": 1.0,
                "top_k": -1,
                "support": "union",
            },
            readout=probe.readout_metadata,
            update={
                "mask": UNMASKED if arm == ZERO_STEP else arm,
                "threshold": recipe.threshold,
                "divergence": recipe.divergence,
                "optimizer": recipe.optimizer,
                "lr": 0.0 if arm == ZERO_STEP else recipe.lr,
                "batch": recipe.prompts * recipe.responses,
            },
            stored=dict(stored),
            versions={
                name: importlib.metadata.version(name)
                for name in ("torch", "transformers", "numpy")
            }
            | {"python": platform.python_version()},
            extra={"recipe": recipe.to_json()},
        )


def _groups(
    recipe: Recipe,
    world: World,
    seed: int,
    purpose: str,
    count: int,
    watch: Callable[[int], None] = lambda found: None,
) -> list[Group]:
    """Groups with mixed rewards, from random streams of their own."""
    return mixed_groups(
        recipe,
        world,
        count,
        source=random.Random(stream(seed, f"{purpose}/prompts")),
        generator=torch.Generator().manual_seed(stream(seed, f"{purpose}/responses")),
        watch=watch,
    )


def _step(
    recipe: Recipe,
    policy: SharedPrefix,
    optimizer: torch.optim.Optimizer,
    minibatch: Minibatch,
    tokens: ResponseTokens | None,
    keep: Callable[[], Tensor | None],
) -> None:
    """Make one optimizer step; `keep` is asked after the forward, no `tokens` is on-policy."""
    optimizer.zero_grad(set_to_none=True)
    logits = minibatch.logits(policy(**minibatch.inputs)).float() / recipe.temperature
    logprob = logits.gather(1, minibatch.sampled()[:, None])[:, 0] - logits.logsumexp(1)
    rows, positions = minibatch.response_mask.nonzero(as_tuple=True)
    kept = keep()
    loss = policy_loss(
        logprob,
        logprob if tokens is None else tokens.behavior_logprobs[rows, positions],
        minibatch.advantages[rows],
        torch.ones(len(rows), dtype=torch.bool) if kept is None else kept,
        denominator=len(rows),
        ratio_cap=recipe.ratio_cap,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _optimizer(recipe: Recipe, policy: SharedPrefix) -> torch.optim.Optimizer:
    """Make the recipe's optimizer, without state."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(policy.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    return torch.optim.AdamW(
        policy.parameters(),
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        fused=True,  # one pass over the state instead of eight
    )


@contextmanager
def _rounded(model: torch.nn.Module, kind: str) -> Iterator[None]:
    """Round the model's matrices for a while."""
    if kind == "exact":
        yield
        return
    kept = [value.detach().clone() for value in model.parameters()]
    round_weights(model, kind)
    try:
        yield
    finally:
        with torch.no_grad():
            for value, saved in zip(model.parameters(), kept, strict=True):
                value.copy_(saved)


def _prompt_rows(groups: list[Group]) -> list[dict[str, Any]]:
    """Rows of the dump's prompts."""
    return [
        {
            "group": number,
            "prompt": group.problem.prompt,
            "prompt_ids": list(group.problem.prompt_ids),
            "answer": group.problem.answer,
        }
        for number, group in enumerate(groups)
    ]
