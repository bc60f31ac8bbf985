"""Real GRPO trainers on a model of a few thousand parameters, offline and on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = 61
PROMPTS = (2, 5, 3, 4)


def is_old() -> bool:
    """TRL before 1.9: its dapo loss does not know accumulation windows, nor None as a log-prob."""
    import trl

    return tuple(int(part) for part in trl.__version__.split(".")[:2]) < (1, 9)


def tokenizer() -> Any:
    """Words w0, w1, … split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


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


def ending() -> Any:
    """The model with an end of sequence that comes now and then."""
    made = model(tie_word_embeddings=False)
    with torch.no_grad():
        made.lm_head.weight[1] = 1.5 * made.lm_head.weight.mean(0) + 0.1
    return made


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
    import trl

    lazy: Any = trl  # its names are found when they are asked for
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
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
    return lazy.GRPOTrainer(
        model=model() if policy is None else policy,
        reward_funcs=even,
        args=lazy.GRPOConfig(**settings),
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


class Witness:
    """What a trainer did, seen beside the probe: weights around each step, and its batches.

    Attributes
    ----------
    before, after : dict of step to state dict
        Weights.
    gradients : dict of step to dict
        Right before the optimizer's step.
    batches : dict of step to list
        What the loss was computed of, in order; copies.
    """

    def __init__(self, made: Any) -> None:
        from transformers import TrainerCallback

        self.before: dict[int, Any] = {}
        self.after: dict[int, Any] = {}
        self.gradients: dict[int, Any] = {}
        self.batches: dict[int, list[Any]] = {}
        witness = self

        class Seen(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                witness.before[state.global_step] = weights(made)

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                witness.gradients[state.global_step] = {
                    name: each.grad.clone()
                    for name, each in made.model.named_parameters()
                    if each.grad is not None
                }

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                witness.after[state.global_step - 1] = weights(made)

        made.add_callback(Seen())
        inner = made._compute_loss

        def seen(policy: Any, inputs: Any) -> Any:
            if made.model.training:
                self.batches.setdefault(made.state.global_step, []).append(
                    {
                        name: each.clone() if isinstance(each, torch.Tensor) else each
                        for name, each in inputs.items()
                    }
                )
            return inner(policy, inputs)

        made._compute_loss = seen


def logprobs(state: dict[str, Any], inputs: dict[str, Any], *, temperature: float) -> Any:
    """log π over the vocabulary at the completion tokens, (B, T, V): a forward of our own."""
    policy = model()
    policy.load_state_dict(state, strict=False)
    policy.eval()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=attended, use_cache=False).logits
    first = inputs["prompt_ids"].shape[1] - 1
    return (logits[:, first:-1].double() / temperature).log_softmax(-1)


def rows(run: Path | str) -> Any:
    """All rows of a dump, in the order in which they were written."""
    import pandas as pd
    import pyarrow.parquet as pq

    parts = sorted(
        Path(run).glob("arm=*/seed=*/part-*.parquet"),
        key=lambda part: [int(number) for number in part.stem.split("-")[1:]],
    )
    return pd.concat([pq.ParquetFile(part).read().to_pandas() for part in parts])
