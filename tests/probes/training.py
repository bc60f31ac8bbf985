"""Training steps of every kind that the probe has to cope with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deltad.probes import MicroBatch, ResponseTokens, UpdateProbe

from .tiny import Batch, backward, surrogate, tiny

Optimizer = torch.optim.Optimizer


def adamw(model: Any, lr: float = 1e-2) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


@contextmanager
def no_probe(*_: Any, **__: Any) -> Iterator[None]:
    yield None


def step_with(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    """Step with a closure; torch leaves the method untyped."""
    take: Any = optimizer.step
    take(closure)


def step(
    model: Any,
    optimizer: Optimizer,
    batches: list[Batch],
    probe: UpdateProbe | None = None,
    *,
    temperature: float = 1.0,
    **call: Any,
) -> list[MicroBatch]:
    """One optimizer step over these micro-batches."""
    optimizer.zero_grad()
    handles = []
    for each in batches:
        if probe is not None:
            handles.append(probe.expect(each.tokens))
        logits = model(**each.inputs, **call).logits
        backward(surrogate(logits, each, temperature=temperature) / len(batches))
    optimizer.step()
    return handles


def reference(model: Any, each: Batch, temperature: float = 1.0) -> Tensor:
    """Log-probs over the vocabulary at the response tokens, float64 head and softmax."""
    with torch.no_grad():
        logits = model(**each.inputs).logits.double() / temperature
    b, j = each.tokens.where()
    logprobs: Tensor = logits.log_softmax(-1)[b, j - 1]
    return logprobs


def expected_rows(logprobs: Tensor, each: Batch, when: str) -> dict[str, np.ndarray[Any, Any]]:
    b, j = each.tokens.where()
    probs = logprobs.exp()
    return {
        f"{when}_logprob": logprobs.gather(1, each.ids[b, j][:, None])[:, 0].numpy(),
        f"topk_{when}_logprobs": logprobs.gather(1, each.tokens.topk_ids[b, j]).numpy(),
        f"{when}_collision": probs.square().sum(1).numpy(),
        f"{when}_entropy": -(probs * logprobs).sum(1).numpy(),
    }


def plain(model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any) -> None:
    step(model, optimizer, batches, probe)


def autocast(model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any) -> None:
    optimizer.zero_grad()
    for each in batches:
        with torch.autocast("cpu", torch.bfloat16):
            if probe is not None:
                probe.expect(each.tokens)
            logits = model(**each.inputs).logits
        backward(surrogate(logits, each))
    optimizer.step()


def step_within_autocast(
    model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step(model, optimizer, batches, probe)


def scaled(model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    for each in batches:
        if probe is not None:
            probe.expect(each.tokens)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**each.inputs).logits
        backward(scaler.scale(surrogate(logits, each)))
    scaler.step(optimizer)
    scaler.update()


def checkpointed_outside(
    model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any
) -> None:
    optimizer.zero_grad()
    for each in batches:
        if probe is not None:
            probe.expect(each.tokens)

        def run(ids: Tensor, attention_mask: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=ids, attention_mask=attention_mask).logits
            return logits

        logits = checkpoint(run, each.ids, each.inputs["attention_mask"], use_reentrant=False)
        backward(surrogate(logits, each))
    optimizer.step()


def _save_products(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if operator is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed_in_part(
    model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any
) -> None:
    """Checkpointing around the model that keeps some results, in order of their making."""
    optimizer.zero_grad()
    for each in batches:
        if probe is not None:
            probe.expect(each.tokens)
        logits = checkpoint(
            lambda inputs: model(**inputs).logits,
            each.inputs,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, _save_products),
        )
        backward(surrogate(logits, each))
    optimizer.step()


def checkpointed_reentrant(
    model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any
) -> None:
    """Checkpointing around the model whose first forward runs without gradients."""
    optimizer.zero_grad()
    for each in batches:
        if probe is not None:
            probe.expect(each.tokens)
        differentiable = torch.zeros((), requires_grad=True)  # without it there is no backward
        logits = checkpoint(
            lambda zero, inputs: model(**inputs).logits + zero,
            differentiable,
            each.inputs,
            use_reentrant=True,
        )
        backward(surrogate(logits, each))
    optimizer.step()


def decoder_alone(model: Any, optimizer: Optimizer, batches: list[Batch], probe: Any) -> None:
    optimizer.zero_grad()
    for each in batches:
        if probe is not None:
            probe.expect(each.tokens)
        hidden = model.model(**each.inputs).last_hidden_state
        backward(surrogate(model.lm_head(hidden), each))
    optimizer.step()


Loop = Callable[[nn.Module, Optimizer, list[Batch], Any], None]


LOOPS: list[Loop] = [
    plain,
    autocast,
    step_within_autocast,
    scaled,
    checkpointed_outside,
    checkpointed_in_part,
    checkpointed_reentrant,
    decoder_alone,
]


DROPOUT: dict[str, Any] = {"attention_dropout": 0.2}


def build(family: str, *, checkpointing: bool | None = None) -> Any:
    """With dropout, and with gradient checkpointing, reentrant (True) or not (False)."""
    model = tiny(family, **DROPOUT)
    if checkpointing is not None:
        older = "gradient_checkpointing_enable"  # its name until transformers 5.2x
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or getattr(
            model, older
        )
        enable({"use_reentrant": checkpointing})
    return model


def changed(each: Batch, **changes: Any) -> Batch:
    return Batch(each.inputs, ResponseTokens(**{**vars(each.tokens), **changes}))


class Plain(nn.Module):
    """A model that is none of transformers'."""

    def __init__(self, *, state: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, 32)
        self.body = nn.Linear(32, 32)
        self.out = nn.Linear(32, 96)
        self.state = state
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.body(self.embedding(input_ids)))
        if self.state == "counts":
            self.calls += 1
            hidden = hidden * (1 + self.calls)
        elif self.state == "random":
            hidden = hidden * (1 + float(torch.randint(2**30, (), generator=_CHAOS)) / 2**30)
        logits = self.out(hidden)
        return type("Output", (), {"logits": logits})()


_CHAOS = torch.Generator()
