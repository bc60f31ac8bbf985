"""Tiny models of four families with random weights, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltad.probes import ResponseTokens

VOCAB = 96
TOP_K = 5
FAMILIES = ("llama", "qwen3", "gemma2", "granite")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that policies are peaked and a softcap is felt.
    "initializer_range": 0.2,
}


def tiny(family: str = "llama", *, seed: int = 0, **options: Any) -> Any:
    """A causal LM of transformers in train mode, a few thousand parameters."""
    import transformers  # takes seconds, which processes that build none need not wait for

    torch.manual_seed(seed)
    sizes = {**SIZES, "attn_implementation": "sdpa", **options}
    model: Any
    if family == "llama":
        untied = {"tie_word_embeddings": False}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**untied, **sizes}))
    elif family == "qwen3":
        tied = {"tie_word_embeddings": True, "head_dim": 8}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**tied, **sizes}))
    elif family == "gemma2":
        capped = {"head_dim": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
        sizes["attn_implementation"] = "eager"  # its attention has a softcap too
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**capped, **sizes}))
    else:
        scaled = {"logits_scaling": 0.25, "residual_multiplier": 0.7}
        model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**{**scaled, **sizes}))
    return model.train()


@dataclass
class Batch:
    """Inputs of a forward and what the behavior policy said of them."""

    inputs: dict[str, Tensor]
    tokens: ResponseTokens

    @property
    def ids(self) -> Tensor:
        return self.inputs["input_ids"]


def batch(
    model: Any,
    *,
    seed: int = 0,
    rows: int = 3,
    length: int = 10,
    padding: str = "right",
    top_k: int = TOP_K,
    temperature: float = 1.0,
    first_sequence: int = 0,
    full: bool = False,
) -> Batch:
    """Random prompts and responses; the behavior policy is the model with noise on its logits."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    attended = torch.ones(rows, length, dtype=torch.long)
    response = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        padded = row % 3
        prompt, end = 3 + row % 2, length - padded
        if padding == "left":
            attended[row, :padded] = 0
            response[row, padded + prompt :] = True
        else:
            attended[row, end:] = 0
            response[row, prompt:end] = True
    ids[attended == 0] = 0
    training = model.training
    random = torch.get_rng_state()
    with torch.no_grad():
        model.eval()
        logits = model(input_ids=ids, attention_mask=attended).logits.float()
    model.train(training)
    torch.set_rng_state(random)
    noise = torch.randn(logits.shape, generator=generator) * 0.7
    logprobs = ((logits + noise) / temperature).log_softmax(-1).roll(1, 1)
    best = logprobs.topk(top_k, -1)
    tokens = ResponseTokens(
        response_mask=response,
        advantages=torch.linspace(-1.5, 2.0, rows),
        behavior_logprobs=logprobs.gather(2, ids[..., None])[..., 0],
        topk_ids=best.indices,
        topk_logprobs=best.values,
        sequence=torch.arange(rows) + first_sequence,
        group=torch.arange(rows) // 2,
        full_logprobs=logprobs.double().log_softmax(-1) if full else None,
    )
    return Batch({"input_ids": ids, "attention_mask": attended}, tokens)


def surrogate(logits: Tensor, each: Batch, *, temperature: float = 1.0) -> Tensor:
    """A policy-gradient loss of the batch."""
    logprobs = (logits.float()[:, :-1] / temperature).log_softmax(-1)
    taken = logprobs.gather(2, each.ids[:, 1:, None])[..., 0]
    mask = each.tokens.response_mask[:, 1:]
    return -(taken * mask * each.tokens.advantages[:, None]).sum() / mask.sum()


def backward(loss: Tensor) -> None:
    """Differentiate; torch leaves the method untyped."""
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass
class Sink:
    """Keeps what a probe records."""

    calls: list[tuple[str, dict[str, np.ndarray[Any, Any]]]] = field(default_factory=list)

    def __call__(self, arm: str, rows: dict[str, np.ndarray[Any, Any]]) -> None:
        self.calls.append((arm, rows))

    def column(self, name: str, arm: str | None = None) -> np.ndarray[Any, Any]:
        return np.concatenate([rows[name] for each, rows in self.calls if arm in (None, each)])

    def deltas(self, arm: str | None = None) -> np.ndarray[Any, Any]:
        """post − pre of every number that is recorded twice, flattened."""
        names = ("{}_logprob", "topk_{}_logprobs", "{}_collision", "{}_entropy")
        pairs = [
            (name.format("pre"), name.format("post"))
            for name in names
            if name.format("pre") in self.calls[0][1]
        ]
        return np.concatenate(
            [(self.column(b, arm) - self.column(a, arm)).ravel() for a, b in pairs]
        )


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers."""
    return {
        name: tensor.detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether all tensors agree bit for bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))
        if first[name].ndim
        else torch.equal(first[name], second[name])
        for name in first
    )


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result
