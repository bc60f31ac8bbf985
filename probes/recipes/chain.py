"""One seed: roll out, then step through the batch, measuring each step's arms from one state."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from deltad.dumps import Metadata, write_prompts
from deltad.dumps.batch import Batch
from deltad.dumps.content import Vectors
from deltad.dumps.tokens import batch_tokens
from deltad.masks import rule
from deltad.probes.arms import ZERO_STEP, Snapshot, branch
from deltad.probes.behavior import ResponseTokens
from deltad.probes.ladder import Ladder
from deltad.probes.microbatch import MicroBatch, Rows
from deltad.probes.probe import UpdateProbe
from deltad.probes.recorder import Recorder
from deltad.probes.selection import Keep

from .batch import TOKEN_CHUNK, VOCAB_CHUNK, Minibatch, SharedPrefix, read_behavior, split
from .describe import UNMASKED, describe, prompt_rows, start_of
from .engine import RolloutEngine, behavior_facts, engine_tokens, open_engine
from .recipe import Recipe
from .rollout import Group, World, mixed_groups, stream
from .update import make_optimizer, take_step
from .weights import rounded
from .workers import Report


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
    source
        The policy that was loaded, as the metadata name it.
    engine
        What samples the rollouts from that state; None where the policy itself does.
    """

    recipe: Recipe
    world: World
    policy: SharedPrefix
    optimizer: torch.optim.Optimizer
    start: Snapshot
    source: Mapping[str, Any]
    engine: RolloutEngine | None = None

    @classmethod
    def load(cls, recipe: Recipe, report: Report) -> Chain:
        """Load model and task of a prepared recipe, and warm the optimizer up."""
        world = recipe.load()
        source = start_of(recipe, world.model.state_dict())
        policy = SharedPrefix(world.model)
        optimizer = make_optimizer(recipe, policy)
        for update in range(recipe.warmup_updates):
            groups = _groups(recipe, world, 0, f"warmup-{update}", recipe.prompts)
            for minibatch in split(groups, recipe.prompts, world.pad_id):
                take_step(recipe, policy, optimizer, minibatch, None, lambda: None)
            report("warm-up", (update + 1) / recipe.warmup_updates)
        optimizer.zero_grad(set_to_none=True)
        start = Snapshot(policy, optimizer)
        return cls(recipe, world, policy, optimizer, start, source, open_engine(recipe, world))

    def record(
        self,
        run: Path,
        seed: int,
        stored: Mapping[str, Any],
        report: Report,
        *,
        ladder_tokens: int | None = None,
        vectors: Vectors = "all",
        cut: str | None = None,
    ) -> None:
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
        ladder_tokens
            Measure the ladder of every step, with the gradients of so many tokens; None for no
            ladder.
        vectors
            Which rows keep their vectors, as `DumpWriter` takes it.
        cut
            What the forward after the step is cut to, by the probe's name for it; None for a
            whole one.

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
            write_prompts(run, seed=seed, rows=prompt_rows(groups))

        ladder = self._ladder(ladder_tokens, seed, stored)
        recorder = Recorder(
            run,
            seed=seed,
            metadata_for=lambda arm: describe(
                recipe,
                arm,
                vocab_size=world.vocab_size,
                readout=probe.readout_metadata,
                stored=stored,
                start=self.source,
                ladder=probe.ladder_metadata if ladder and ladder.measures(arm) else None,
                behavior=behavior_facts(self.engine, recipe) if self.engine else None,
            ),
            existing="replace",
            vectors=vectors,
        )

        def record_pieces(arm: str, rows: Rows) -> None:
            texts = world.pieces(rows["token_id"].tolist())
            recorder(arm, {**rows, "token": np.asarray(texts, dtype=object)})

        probe = UpdateProbe(
            policy,
            optimizer,
            record_pieces if whole else recorder,
            temperature=recipe.temperature,
            keep=cast(Keep, cut or "all"),
            threshold=recipe.threshold,
            divergence=recipe.divergence,
            token_chunk=TOKEN_CHUNK,
            vocab_chunk=VOCAB_CHUNK,
            entropy=True,
            ladder=ladder,
        )
        with recorder, probe:
            for index, (minibatch, tokens) in enumerate(batches):
                if index < recipe.unmeasured:
                    take_step(recipe, policy, optimizer, minibatch, tokens, lambda: None)
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

    def _ladder(self, tokens: int | None, seed: int, stored: Mapping[str, Any]) -> Ladder | None:
        """What the probe measures of the ladder; nothing of tokens that are not stored."""
        recipe = self.recipe
        if tokens is None:
            return None
        return Ladder(
            tokens=tokens,
            divergence=recipe.divergence,
            threshold=recipe.threshold,
            least=stored.get("threshold", 0.0)
            if stored.get("divergence") == recipe.divergence
            else 0.0,
            seed=seed,
            ratio_cap=recipe.ratio_cap,
        )

    def _measured_step(
        self, probe: UpdateProbe, minibatch: Minibatch, tokens: ResponseTokens, arm: str
    ) -> None:
        """Make one arm's update under the probe."""
        measured = probe.expect(tokens)

        def keep() -> Tensor:
            mask = self._keep(arm, measured)
            measured.keep(mask)
            return mask

        take_step(self.recipe, self.policy, self.optimizer, minibatch, tokens, keep)

    def _roll_out(
        self, seed: int, report: Report
    ) -> tuple[list[Group], list[tuple[Minibatch, ResponseTokens]]]:
        """Sample the batch from the behavior policy and keep what it says of every token."""
        recipe, world = self.recipe, self.world
        wanted = recipe.minibatches * recipe.prompts
        if self.engine is not None:
            self.engine.reset()
        with rounded(world.model, recipe.behavior_rounding):
            groups = _groups(
                recipe,
                world,
                seed,
                "rollout",
                wanted,
                lambda found: report("rollouts", found / wanted),
                self.engine,
            )
            batches = [
                (minibatch, self._behavior(groups, index, minibatch))
                for index, minibatch in enumerate(split(groups, recipe.prompts, world.pad_id))
            ]
        return groups, batches

    def _behavior(self, groups: list[Group], index: int, minibatch: Minibatch) -> ResponseTokens:
        """What the behavior policy says of a minibatch: the engine's words, or a forward."""
        recipe = self.recipe
        if self.engine is None:
            return read_behavior(
                self.policy,
                minibatch,
                temperature=recipe.temperature,
                top_k=recipe.top_k,
                full=recipe.full,
            )
        return engine_tokens(
            groups[index * recipe.prompts : (index + 1) * recipe.prompts],
            minibatch,
            top_k=recipe.top_k,
            vocab_size=self.world.vocab_size,
            full=recipe.full,
        )

    def _keep(self, arm: str, measured: MicroBatch) -> Tensor:
        """Decide an arm's mask from the very numbers that the dump will hold."""
        if arm in (UNMASKED, ZERO_STEP):
            return torch.ones(measured.size, dtype=torch.bool)
        batch = Batch("", 0, measured.rows, np.ones(measured.size, dtype=np.bool_))
        kept = rule(arm).keeps(
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


def _groups(
    recipe: Recipe,
    world: World,
    seed: int,
    purpose: str,
    count: int,
    watch: Callable[[int], None] = lambda found: None,
    engine: RolloutEngine | None = None,
) -> list[Group]:
    """Groups with mixed rewards, from random streams of their own."""
    return mixed_groups(
        recipe,
        world,
        count,
        source=random.Random(stream(seed, f"{purpose}/prompts")),
        generator=torch.Generator().manual_seed(stream(seed, f"{purpose}/responses")),
        watch=watch,
        engine=engine,
    )
