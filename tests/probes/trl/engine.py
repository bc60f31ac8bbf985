"""TRL's own vLLM code over an engine of ours, which samples from the model with other rounding."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.probes.trl import trainers

NOISE = 0.3
UNSCORED = 5
"""Of how many tokens one is not scored, where this is asked for."""


class Engine:
    """Answers `LLM.generate` as vLLM does: K or K + 1 entries a position, ranks from 1."""

    def __init__(self, made: Any, *, unscored: bool = False) -> None:
        self._policy = trainers.model()
        self._made = made
        self._random = torch.Generator().manual_seed(5)
        self._unscored = unscored
        self.asked: list[int] = []
        self.said: list[tuple[list[int], list[Any]]] = []
        self.sync()

    def sync(self) -> None:
        """Take the trainer's weights, and noise: another arithmetic."""
        self._policy.load_state_dict(self._made.model.state_dict())
        noise = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for weight in self._policy.parameters():
                weight.mul_(1 + NOISE * 0.1 * torch.randn(weight.shape, generator=noise))
        self._policy.eval()

    def generate(self, prompts: list[Any], *, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        """Sample one completion for each prompt."""
        self.asked.append(sampling_params.logprobs)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[self._complete(prompt["prompt_token_ids"], sampling_params)],
            )
            for prompt in prompts
        ]

    def _complete(self, prompt: list[int], asked: Any) -> Any:
        ids, entries = list(prompt), []
        for at in range(asked.max_tokens):
            with torch.no_grad():
                logits = self._policy(torch.tensor([ids]), use_cache=False).logits[0, -1]
            logp = (logits.double() / asked.temperature).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=self._random))
            order = logp.argsort(descending=True).tolist()
            rank = {name: number + 1 for number, name in enumerate(order)}
            value = {name: float(logp[name]) for name in order}
            if self._unscored and at % UNSCORED == 2:
                value[token] = math.nan
            entries.append(
                {
                    name: SimpleNamespace(logprob=value[name], rank=rank[name])
                    for name in dict.fromkeys([token, *order[: asked.logprobs]])
                }
            )
            ids.append(token)
            if token == 1:
                break
        taken = ids[len(prompt) :]
        self.said.append((taken, entries))
        return SimpleNamespace(token_ids=taken, logprobs=entries)


def put_into(made: Any, monkeypatch: Any, *, unscored: bool = False) -> Engine:
    """Let a trainer sample with TRL's `VLLMGeneration`, in colocate mode, from an engine."""
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    engine = Engine(made, unscored=unscored)
    generation = object.__new__(vllm_generation.VLLMGeneration)
    vars(generation).update(
        model=made.model,
        accelerator=made.accelerator,
        mode="colocate",
        llm=engine,
        logprobs=0,
        temperature=made.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_completion_length=made.max_completion_length,
        generation_kwargs={},
        structured_outputs_regex=None,
        tensor_parallel_size=1,
        enable_sleep_mode=False,
        sync_weights=engine.sync,
    )
    made.use_vllm = True
    made.vllm_generation = generation
    made._last_loaded_step = -1
    return engine
