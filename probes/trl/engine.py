"""The behavior policy as vLLM reports it through TRL, without disturbing what TRL reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltad.probes.errors import ProbeError

from .batch import loss_mask


@dataclass(frozen=True)
class _Scored:
    """What vLLM said of one completion; lists of one entry a token."""

    token_ids: list[int]
    ids: list[list[int]]
    logprobs: list[list[float]]
    sampled: list[float]


class EngineAsBehavior:
    """Asks vLLM for the top-K log-probs, keeps them, and gives TRL the sampled token's alone.

    TRL takes the first log-prob of every position for the sampled token's. It asks for no
    others; where more come, sorted, the first would be the largest instead. So K is asked for
    within one call only, and what goes back has one entry a position again.

    Parameters
    ----------
    generation : VLLMGeneration
        `trainer.vllm_generation`.
    top_k : int
        K.
    wanted : callable
        Whether the completions of this call are to be trained on.
    """

    def __init__(self, generation: Any, top_k: int, wanted: Callable[[], bool]) -> None:
        self._generation = generation
        self._top_k = top_k
        self._wanted = wanted
        self._calls: list[list[_Scored]] = []
        self._completions: list[_Scored] = []

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around `VLLMGeneration.generate`."""
        if not self._wanted():
            return original(*args, **kwargs)
        asked = self._generation.logprobs
        self._generation.logprobs = max(asked or 0, self._top_k)
        try:
            prompts, completions, logprobs, ids = original(*args, **kwargs)
        finally:
            self._generation.logprobs = asked
        if logprobs is None or ids is None:
            raise ProbeError(
                "vLLM gave no log-probs with their ids, so the behavior policy's top-K is not "
                "known: a server must be at least as new as this TRL; or attach with "
                "behavior='policy'"
            )
        scored = [
            _scored(tokens, values, names, self._top_k)
            for tokens, values, names in zip(completions, logprobs, ids, strict=True)
        ]
        self._calls.append(scored)
        return (
            prompts,
            completions,
            [[[_or_none(value)] for value in each.sampled] for each in scored],
            [[[token] for token in each.token_ids] for each in scored],
        )

    def begin(self) -> None:
        """Before TRL generates a batch."""
        self._calls.clear()

    def end(self, batch: Mapping[str, Any]) -> None:
        """After TRL generated a batch: hold what was kept against it.

        Raises
        ------
        ProbeError
            The completions are not those of one call, as they came.
        """
        completions = batch["completion_ids"]
        if len(self._calls) != 1 or len(self._calls[0]) != len(completions):
            raise ProbeError(
                f"a batch of {len(completions)} completions took {len(self._calls)} calls of "
                f"vLLM with {[len(call) for call in self._calls]} completions: top-K log-probs of "
                "rollouts with several turns are not put together; attach with behavior='policy'"
            )
        self._completions = self._calls.pop()
        for row, each in enumerate(self._completions):
            taken = completions[row, : len(each.token_ids)].tolist()
            if taken != each.token_ids:
                raise ProbeError(
                    f"completion {row} of the batch is not what vLLM generated, from token "
                    f"{_first_difference(taken, each.token_ids)} on: its top-K log-probs are of "
                    "other tokens; attach with behavior='policy'"
                )

    def read(
        self, inputs: Mapping[str, Any], rows: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give what vLLM said of one micro-batch.

        Parameters
        ----------
        inputs : mapping
            The micro-batch.
        rows : sequence of int
            Which completions of the generated batch are in it.

        Returns
        -------
        mask, logprobs, topk_ids, topk_logprobs
            As `PolicyAsBehavior.read`; tokens that vLLM could not score are not in `mask`.
        """
        mask = loss_mask(inputs).cpu()
        logprobs = torch.full(mask.shape, math.nan, dtype=torch.float64)
        ids = torch.full((*mask.shape, self._top_k), -1, dtype=torch.int64)
        values = torch.full((*mask.shape, self._top_k), math.nan, dtype=torch.float64)
        for b, row in enumerate(rows):
            each = self._completions[row]
            length = len(each.token_ids)
            logprobs[b, :length] = torch.tensor(each.sampled, dtype=torch.float64)
            for t in range(length):
                width = len(each.ids[t])
                ids[b, t, :width] = torch.tensor(each.ids[t], dtype=torch.int64)
                values[b, t, :width] = torch.tensor(each.logprobs[t], dtype=torch.float64)
        mask &= logprobs.isfinite()
        device = inputs["completion_ids"].device
        return (
            mask.to(device),
            logprobs[mask].to(device),
            ids[mask].to(device),
            values[mask].to(device),
        )


def _scored(
    tokens: Sequence[int],
    logprobs: Sequence[Sequence[float | None]],
    ids: Sequence[Sequence[int]],
    top_k: int,
) -> _Scored:
    """Take one completion apart: K entries a position, and the sampled token's log-prob."""
    found = _Scored(list(tokens), [], [], [])
    if not len(tokens) == len(logprobs) == len(ids):
        raise ProbeError(
            f"vLLM gave log-probs at {len(logprobs)} and ids at {len(ids)} positions for a "
            f"completion of {len(tokens)} tokens"
        )
    for at, (token, values, names) in enumerate(zip(tokens, logprobs, ids, strict=True)):
        known = {
            int(name): float(value)
            for name, value in zip(names, values, strict=True)
            if value is not None and not math.isnan(value)
        }
        if token not in names:
            raise ProbeError(
                f"vLLM gave no log-prob of token {token} at position {at} of a completion, which "
                "it sampled there"
            )
        # One more than K came where the sampled token is not among the K likeliest.
        best = sorted(known, key=lambda name: -known[name])[:top_k]
        found.ids.append(best)
        found.logprobs.append([known[name] for name in best])
        found.sampled.append(known.get(int(token), math.nan))
    return found


def _or_none(value: float) -> float | None:
    """As TRL marks what vLLM could not score."""
    return None if math.isnan(value) else value


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Where two lists begin to differ."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
