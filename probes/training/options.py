"""What a training is: one frozen dataclass whose fields are the options, the log and the code.

No torch here: the command line builds its options from these fields.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from deltad.divergence import DIVERGENCES
from deltad.masks import DEFAULT_THRESHOLD, Rule, rule
from deltad.probes.recipes import RECIPES
from deltad.probes.recipes.recipe import Recipe, RecipeError, check_field, option


@dataclass(frozen=True)
class Precision:
    """What rollouts and training are computed in.

    Attributes
    ----------
    rollout_weights, training_weights : {"exact", "bf16", "fp8"}
        Rounding of the matrices; the training keeps float32 master weights in any case.
    rollout_arithmetic : {"float32", "bfloat16"}
        In which the rollouts' forwards are computed; the training's always in float32.
    meaning : str
        In words.
    """

    rollout_weights: str
    rollout_arithmetic: str
    training_weights: str
    meaning: str


PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType(
    {
        "fp32": Precision("exact", "float32", "exact", "float32 everywhere"),
        "bf16": Precision("bf16", "bfloat16", "bf16", "bf16 rollouts, bf16 weights in training"),
        "fp8-rollout": Precision(
            "fp8", "bfloat16", "bf16", "fp8 weights in rollouts, bf16 weights in training"
        ),
        "fp8": Precision("fp8", "bfloat16", "fp8", "fp8 weights in rollouts and in training"),
    }
)
"""Precision settings by name; the low ones are emulated by rounded matrices."""

MASKS: Final = (
    "none",
    "clip-higher",
    "ratio",
    "predictive-kl-aggregated",
    "predictive-kl-uniform",
    "predictive-kl-exact",
)
"""Trained with unless others are asked for."""

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tiny": {},
        "smollm2": {
            "batches": 4,
            "minibatches": 4,
            "prompts": 2,
            "lr": 1e-5,
            "max_new_tokens": 16,
            "eval_every": 2,
            "eval_prompts": 8,
            "checkpoint_every": 2,
        },
    }
)
"""Where a recipe's training differs from the fields' own defaults."""

_NOT_OF_THE_WORLD: Final = ("behavior_weights", "engine", "engine_precision")
"""Fields of recipes that the precision settings stand for, or that trainings do not have."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """GRPO on a recipe's prompts with one mask in the loss.

    Each rollout batch is sampled from the present policy, and gone through once, an optimizer
    step a minibatch; the rollout policy moves to the present one with the next batch.

    Raises
    ------
    RecipeError
        A field holds a value that makes no sense; the message names it.
    """

    recipe_name: str = field(default="tiny")
    world: Mapping[str, Any] = field(default_factory=dict)

    threshold: float = option(
        DEFAULT_THRESHOLD, "Threshold of the masks (nats for kl).", minimum=0.0
    )
    divergence: Literal["kl", "tv"] = option("kl", "Divergence of the masks' region.")
    ratio_cap: float | None = option(
        None, "Upper bound of the importance weight in the loss; none without it.", above=0.0
    )
    precision: Literal["fp32", "bf16", "fp8-rollout", "fp8"] = option(
        "fp32",
        "Precision of rollouts and training: fp32, bf16, fp8-rollout (training in bf16) or fp8; "
        "the low ones are emulated.",
    )
    batches: int = option(24, "Rollout batches.", minimum=1)
    minibatches: int = option(8, "Optimizer steps through a rollout batch.", minimum=1)
    prompts: int = option(8, "Prompts (groups) in a minibatch.", minimum=1)
    responses: int = option(8, "Responses sampled to a prompt.", minimum=2)
    temperature: float = option(1.0, "Sampling temperature.", above=0.0)
    max_new_tokens: int = option(8, "Longest response, in tokens.", minimum=1)
    top_k: int = option(20, "Ids of the rollout policy that masks look at.", minimum=1)
    full: bool = option(
        False, "Read the divergences over the whole vocabulary too, for the full criteria."
    )
    optimizer: Literal["adamw", "sgd"] = option("adamw", "Optimizer of the policy.")
    lr: float = option(1e-3, "Learning rate, constant after the warm-up.", minimum=0.0)
    warmup_steps: int = option(
        8, "Optimizer steps in which the learning rate grows to that, linearly.", minimum=0
    )
    weight_decay: float = option(0.0, "Decoupled weight decay of AdamW.", minimum=0.0)
    beta1: float = option(0.9, "AdamW's decay of the first moment.", minimum=0.0, below=1.0)
    beta2: float = option(0.999, "AdamW's decay of the second moment.", minimum=0.0, below=1.0)
    momentum: float = option(0.0, "Momentum of SGD.", minimum=0.0)
    eval_every: int = option(
        4, "Evaluate before every so many rollout batches, and after the last.", minimum=1
    )
    eval_prompts: int = option(128, "Held-out prompts.", minimum=1)
    eval_samples: int = option(16, "Responses sampled to a held-out prompt.", minimum=1)
    checkpoint_every: int = option(
        4, "Write a checkpoint after every so many rollout batches; 0 for none.", minimum=0
    )
    probe_every: int = option(
        0,
        "Record every response token of each so many-th optimizer step into a dump; 0 for none.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        if self.recipe_name not in RECIPES:
            raise RecipeError(
                f"`recipe_name` must be one of {', '.join(RECIPES)}, got {self.recipe_name!r}"
            )
        hints = typing.get_type_hints(type(self))
        for entry in own_fields():
            check_field(entry, hints[entry.name], getattr(self, entry.name))
        if self.divergence not in DIVERGENCES:
            raise RecipeError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}"
            )
        known = {entry.name for entry in world_fields(self.recipe_name)}
        for name in self.world:
            if name not in known:
                raise RecipeError(
                    f"`world` of {self.recipe_name} has the fields {', '.join(sorted(known))}, "
                    f"got {name!r}"
                )
        _ = self.recipe  # which checks the world's fields

    @classmethod
    def of(cls, recipe_name: str, **values: Any) -> Self:
        """Make the training of a recipe's world.

        Parameters
        ----------
        recipe_name : str
            "tiny" or "smollm2".
        **values
            Fields of `Training`, and of the recipe what makes its model and its prompts.

        Raises
        ------
        RecipeError
            There is no such recipe or field, or a value makes no sense.
        """
        own = {entry.name for entry in own_fields()}
        mine = {**DEFAULTS.get(recipe_name, {})}
        mine |= {name: value for name, value in values.items() if name in own}
        rest = {name: value for name, value in values.items() if name not in own}
        return cls(recipe_name=recipe_name, world=rest, **mine)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe whose world, sampling and optimizer these options describe."""
        kind = RECIPES[self.recipe_name]
        ours = {entry.name for entry in own_fields()}
        shared = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(kind)
            if entry.name in ours
        }
        return kind(**shared, arms=("none",), go_on="none", unmeasured=0, **self.world)

    @property
    def settings(self) -> Precision:
        """What the precision's name stands for."""
        return PRECISIONS[self.precision]

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return self.batches * self.minibatches

    def lr_at(self, step: int) -> float:
        """Learning rate of an optimizer step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))

    def mask(self, name: str) -> Rule:
        """Look a mask up and see that it can be trained with.

        Raises
        ------
        RecipeError
            No such criterion, one of another divergence, or one that needs `full`.
        """
        try:
            found = rule(name)
            found.check_family(self.divergence)
        except ValueError as error:
            raise RecipeError(f"`masks`: {error}") from error
        if not (self.full or found.columns in ((), ("pre_collision",))):
            raise RecipeError(
                f"`masks`: {name} needs the rollout policy's whole vocabulary: set `full`"
            )
        return found

    def evaluates(self, batch: int) -> bool:
        """Whether held-out prompts are tried before a rollout batch (or after the last)."""
        return batch % self.eval_every == 0 or batch == self.batches

    def saves(self, batch: int) -> bool:
        """Whether there is a checkpoint once so many batches are done."""
        every = self.checkpoint_every
        return bool(every) and (batch % every == 0 or batch == self.batches)

    def to_json(self) -> dict[str, Any]:
        """Give all options as JSON values, the world's among them."""
        world = {
            entry.name: getattr(self.recipe, entry.name) for entry in world_fields(self.recipe_name)
        }
        own = {entry.name: getattr(self, entry.name) for entry in own_fields()}
        return {"recipe": self.recipe_name, **own, "world": world}


def own_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a training that are options."""
    return tuple(entry for entry in dataclasses.fields(Training) if "help" in entry.metadata)


def world_fields(recipe_name: str) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a recipe that make its model and its prompts."""
    common = {entry.name for entry in dataclasses.fields(Recipe)} | {*_NOT_OF_THE_WORLD}
    return tuple(
        entry for entry in dataclasses.fields(RECIPES[recipe_name]) if entry.name not in common
    )
