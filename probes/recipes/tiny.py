"""The recipe `tiny`: a Qwen3 of an eighth of a million parameters that learned to add.

It starts from one of ten base models that ship with deltad, or pre-trains one in well under a
minute, so it needs no hub and no download.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .recipe import Recipe, RecipeError, option

if TYPE_CHECKING:
    from .rollout import World
    from .workers import Report

NUMBERS = 64
"""Token ids 0 to 63 are the numbers 0 to 63; the signs follow."""

VLLM_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head that vLLM's attention on CPU knows (0.32)."""


@dataclass(frozen=True, kw_only=True)
class TinyRecipe(Recipe):
    """Chained sums on a tiny Qwen3: prompt `a op b op c =`, response `s1 ; s2 EOS`.

    The reward is 1 where the final number is right and EOS follows it. Off-policyness comes
    from the earlier minibatches of the same rollout batch.
    """

    name: ClassVar[str] = "tiny"
    summary: ClassVar[str] = "A tiny Qwen3 that learned chained sums."
    default_seeds: ClassVar[int] = 61
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fresh-adamw": {},
        "warm-adamw": {"warmup_updates": 20},
        "sgd": {"optimizer": "sgd", "lr": 0.03},
        "few-outside": {"lr": 5e-5},
    }
    variants_help: ClassVar[Mapping[str, str]] = {
        "fresh-adamw": "the defaults",
        "warm-adamw": "AdamW comes with the state of 20 updates on other batches",
        "sgd": "plain SGD without momentum",
        "few-outside": "1 to 2 % of tokens outside, as in the paper",
    }

    zero_step_seeds: int = option(
        3, "The first so many seeds also record the arm zero-step, the noise floor.", minimum=0
    )
    full: bool = option(True, "Record the divergences over the whole vocabulary too.")
    base: int | None = option(
        None,
        "Which of the ten shipped base models to start from; 0 unless pretrain_seed is given.",
        minimum=0,
        below=10,
    )
    pretrain_seed: int | None = option(
        None,
        "Pre-train a new base model with this seed. Its weights depend on the processor.",
        minimum=0,
        pretraining=True,
    )
    operands: int = option(
        32, "Operands are below this number; 2 to 64.", minimum=2, pretraining=True
    )
    hidden_size: int = option(64, "Width of the model.", minimum=8, pretraining=True)
    intermediate_size: int = option(256, "Width of its MLPs.", minimum=8, pretraining=True)
    layers: int = option(2, "Layers of the model.", minimum=1, pretraining=True)
    heads: int = option(
        4, "Attention heads; half as many key-value heads.", minimum=2, pretraining=True
    )
    pretrain_steps: int = option(700, "Steps of pre-training.", minimum=1, pretraining=True)
    pretrain_batch: int = option(
        64, "Examples in a pre-training step.", minimum=1, pretraining=True
    )
    pretrain_lr: float = option(
        4e-3, "Peak learning rate of pre-training (AdamW, one cycle).", above=0.0, pretraining=True
    )
    careless: float = option(
        0.0,
        "Share of pre-training examples whose result is one too high, a habit that a training "
        "with rewards can take away.",
        minimum=0.0,
        below=1.0,
        pretraining=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operands > NUMBERS:
            raise RecipeError(f"`operands` must be at most {NUMBERS}, got {self.operands}")
        if self.heads % 2 or self.hidden_size % (2 * self.heads):
            raise RecipeError(
                "`heads` must be even and `hidden_size` a multiple of twice their number, got "
                f"{self.heads} and {self.hidden_size}"
            )

        width = self.hidden_size // self.heads
        if self.engine == "vllm" and width not in VLLM_HEAD_WIDTHS:
            raise RecipeError(
                f"`hidden_size` / `heads` must be one of "
                f"{', '.join(map(str, VLLM_HEAD_WIDTHS))} for vLLM's attention on CPU, got "
                f"{width}: use for instance --heads {max(2, self.hidden_size // 32)} "
                "--pretrain-seed 0"
            )
        if self.pretrain_seed is None:
            self._must_fit_the_shipped_bases()
            object.__setattr__(self, "base", self.base or 0)
        elif self.base is not None:
            raise RecipeError(
                f"`base` {self.base} is a shipped model and `pretrain_seed` {self.pretrain_seed} "
                "makes a new one: give one of the two"
            )

    def _must_fit_the_shipped_bases(self) -> None:
        """Refuse options under which the shipped bases were not pre-trained."""
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.metadata.get("pretraining") and value != entry.default:
                raise RecipeError(
                    f"`{entry.name}` is {value} and the shipped base models were pre-trained with "
                    f"{entry.default}: give `pretrain_seed` to pre-train a new one"
                )

    def pretraining_key(self) -> dict[str, Any]:
        """Fields that the pre-trained weights depend on."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.metadata.get("pretraining")
        }

    def model_facts(self) -> dict[str, Any]:
        """Name the model, its tokenizer and the behavior's precision."""
        return {
            "model": f"tiny Qwen3, {self.layers} layers of {self.hidden_size}",
            "tokenizer": f"numbers 0 to {NUMBERS - 1} and signs",
            "precision": "float32",
        }

    def prepare(self, report: Report) -> None:
        """Check the shipped base, or pre-train where the cache has no such model."""
        from .arithmetic import start_weights

        start_weights(self, report)

    def load(self) -> World:
        """Load model and task."""
        from .arithmetic import ArithmeticWorld

        return ArithmeticWorld(self)
