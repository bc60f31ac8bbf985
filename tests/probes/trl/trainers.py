"""Real GRPO trainers on a model of a few thousand parameters, offline and on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = 61
PROMPTS = (2, 5, 3, 4)


def tokenizer() -> Any:
    """Words w0, w1, … split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(**options: Any) -> Any:
    """Qwen3 with a vocabulary of 64, peaked enough that a step moves it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    sizes = {
        "vocab_size": WORDS + 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **options}))


def dataset(rows: int = 32) -> Any:
    """Prompts of unequal length."""
    from datasets import Dataset

    prompts = [
        " ".join(f"w{(7 * row + 3 * at) % WORDS}" for at in range(PROMPTS[row % len(PROMPTS)]))
        for row in range(rows)
    ]
    return Dataset.from_dict({"prompt": prompts})


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward: share of even ids, so that groups are mixed."""
    return [sum(each % 2 == 0 for each in ids) / len(ids) for ids in completion_ids]


def trainer(
    folder: Path | str,
    *,
    policy: Any = None,
    peft: Any = None,
    callbacks: Any = None,
    evaluate: bool = False,
    **options: Any,
) -> Any:
    """A GRPO trainer; 4 steps of 2 micro-batches of 4 completions unless told otherwise."""
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "temperature": 0.7,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    settings.update(options)
    return GRPOTrainer(
        model=model() if policy is None else policy,
        reward_funcs=even,
        args=GRPOConfig(**settings),
        train_dataset=dataset(),
        eval_dataset=dataset(4) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft,
        callbacks=callbacks,
    )


TIMES = ("runtime", "per_second", "step_time", "total_flos")
"""Parts of the names of what is logged that are of the clock's."""


def logs(made: Any) -> list[dict[str, Any]]:
    """What a trainer logged, without the clock's numbers and without the probe's."""
    return [
        {
            name: value
            for name, value in entry.items()
            if not name.startswith("deltad") and not any(part in name for part in TIMES)
        }
        for entry in made.state.log_history
    ]


def weights(made: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: each.detach().clone() for name, each in made.model.named_parameters()}
