"""An agent loop that asks the rollout server for μ's top-K.

verl's servers give the sampled token's log-prob alone while they generate, but K of them for each
token of a *prompt*. So prompt and response are sent once more, as a prompt, to the same server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from uuid import uuid4

import torch
from torch import Tensor

from deltad.probes.errors import ProbeError

from .fields import TOPK_IDS, TOPK_LOGPROBS
from .settings import Settings

NAME: Final = "deltad_rescored"
"""For `actor_rollout_ref.rollout.agent.default_agent_loop`, or a sample's `agent_name`."""

_CLASS: Final = "RescoredAgentLoop"


def __getattr__(name: str) -> Any:
    """`RescoredAgentLoop`, verl's single turn with the rescoring after it; it needs verl."""
    if name != _CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[_CLASS] = made = _agent_loop()
    return made


def register_agent_loop() -> None:
    """Register the loop with verl under `NAME`."""
    from verl.experimental.agent_loop.agent_loop import register

    register(NAME)(__getattr__(_CLASS))


def _agent_loop() -> type[Any]:
    """The class, once verl is there to be subclassed."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    class RescoredAgentLoop(SingleTurnAgentLoop):  # type: ignore[misc]  # verl has no types
        """verl's single turn, and then the behaviour policy's top-K at each of its tokens."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._top_k = Settings.from_environment().topk
            refuse_distillation(self.config)
            check_room(self.rollout_config)

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            """Generate, and score what was generated; see `rescore`."""
            temperature = float(sampling_params.get("temperature", 1.0))
            output = await super().run(sampling_params, **kwargs)
            return await rescore(
                output,
                self.server_manager.generate,
                temperature=temperature,
                top_k=self._top_k,
            )

    # verl finds the class by this name in the worker that runs it.
    RescoredAgentLoop.__qualname__ = _CLASS
    return RescoredAgentLoop


def refuse_distillation(config: Any) -> None:
    """Refuse a training whose teacher uses the same fields of the batch.

    Raises
    ------
    ProbeError
        The distillation is on.
    """
    distillation = config.get("distillation")
    if distillation is not None and distillation.get("enabled"):
        raise ProbeError(
            f"{NAME} puts the top-K where a distillation puts its teacher's: set "
            "distillation.enabled=False or use another agent loop"
        )


def check_room(rollout: Any) -> None:
    """Refuse a server that could not take a longest response as a prompt.

    Raises
    ------
    ProbeError
        `max_model_len` has no room for one more token (SGLang: two).
    """
    most = rollout.get("max_model_len")
    needed = int(rollout.get("prompt_length")) + int(rollout.get("response_length")) + 2
    if most is not None and int(most) < needed:
        raise ProbeError(
            f"{NAME} sends prompt and response as a prompt: actor_rollout_ref.rollout."
            f"max_model_len must be at least {needed} (prompt_length + response_length + 2), "
            f"got {most}"
        )


async def rescore(
    output: Any,
    generate: Callable[..., Awaitable[Any]],
    *,
    temperature: float,
    top_k: int,
) -> Any:
    """Ask the rollout server for its top-K at every token of what it has generated.

    The numbers come from a prefill of the same weights, the sampled ones from decoding: they
    differ by the engine's own rounding, as the dump's metadata says (`topk_source`).

    Parameters
    ----------
    output : AgentLoopOutput
        With `prompt_ids` and `response_ids`.
    generate : coroutine function
        Of verl's server client.
    temperature : float
        Of the generation.
    top_k : int
        K.

    Returns
    -------
    AgentLoopOutput
        The same, with `teacher_ids` and `teacher_logprobs` (token, topk) among its extra fields:
        at each token of prompt and response the distribution of the next one. Greedy responses
        (verl's validation) are left as they are.

    Raises
    ------
    ProbeError
        A temperature other than 1, at which servers do not score prompts, or a server that does
        not give K log-probs.
    """
    if temperature == 0:
        return output
    if temperature != 1:
        raise ProbeError(
            f"{NAME} needs actor_rollout_ref.rollout.temperature=1 (val_kwargs.temperature: 0 or "
            f"1), got {temperature:g}: servers score prompts at temperature 1"
        )
    sequence = [*output.prompt_ids, *output.response_ids]
    scored = await generate(
        request_id=uuid4().hex,
        prompt_ids=sequence,
        sampling_params={
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
            "detokenize": False,
        },
    )
    ids, logprobs = topk_of(scored.extra_fields, len(sequence), top_k)
    output.extra_fields[TOPK_IDS] = ids
    output.extra_fields[TOPK_LOGPROBS] = logprobs
    return output


def topk_of(extra_fields: dict[str, Any], length: int, top_k: int) -> tuple[Tensor, Tensor]:
    """From what a server's answer carries to tensors.

    Parameters
    ----------
    extra_fields : dict
        Of verl's `TokenOutput`: `prompt_ids` and `prompt_logprobs`, a list of K for each token.
    length : int
        Tokens that were sent.
    top_k : int
        K.

    Returns
    -------
    tuple of Tensor, shape (token, topk)
        Ids (int32; −1 where the server gave none) and log-probs in nats (float32).

    Raises
    ------
    ProbeError
        The lists are not there, or not of this shape.
    """
    ids, logprobs = extra_fields.get("prompt_ids"), extra_fields.get("prompt_logprobs")
    if ids is None or logprobs is None:
        raise ProbeError(
            "the rollout server gave no prompt log-probs: verl's vLLM and SGLang servers do, with "
            f"at least {top_k} allowed (vLLM: engine_kwargs.vllm.max_logprobs)"
        )
    shapes = {len(ids), len(logprobs)} != {length} or any(
        len(row) != top_k for rows in (ids, logprobs) for row in rows
    )
    if shapes:
        raise ProbeError(
            f"the rollout server's prompt log-probs must be {length} lists of {top_k}, got "
            f"{len(ids)} lists of ids and {len(logprobs)} of log-probs"
        )
    missing = torch.tensor([[each is None for each in row] for row in ids])
    found = torch.tensor([[each or 0 for each in row] for row in ids], dtype=torch.int32)
    values = torch.tensor(
        [[torch.nan if each is None else each for each in row] for row in logprobs],
        dtype=torch.float32,
    )
    return found.masked_fill(missing, -1), values
