"""GRPO with TRL, each token's divergence before and after each step: runs offline in a minute.

Run it, and ask its dump:

    python examples/trl_grpo.py RUN
    deltad table RUN
"""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from deltad.probes.trl import attach

# A tiny model and its words, made here, so that no hub is needed. For a model of the hub give
# GRPOTrainer `model="Qwen/Qwen3-0.6B"` and no `processing_class`.
words = ["<pad>", "<eos>", *(str(number) for number in range(10)), "+", "="]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
)
torch.manual_seed(0)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.1,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )
)  # fmt: skip
dataset = Dataset.from_list(
    [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(5)]
)


def right_digits(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Reward: the share of a completion's words that are the answer."""
    pairs = zip(completions, answer, strict=True)
    return [each.split().count(right) / max(len(each.split()), 1) for each, right in pairs]


trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=right_digits,
    train_dataset=dataset,
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=24, per_device_train_batch_size=32,
        num_generations=8, steps_per_generation=4, max_completion_length=6, learning_rate=3e-3,
        logging_steps=4, save_strategy="no", report_to="none", bf16=False,
        use_cpu=not torch.cuda.is_available(),
    ),
)  # fmt: skip

attach(trainer, run=sys.argv[1], top_k=8)
# Trained with a mask in the place of TRL's clip:
# attach(trainer, run=sys.argv[1], top_k=8, criterion="predictive-kl-aggregated", threshold=0.15)
trainer.train()
