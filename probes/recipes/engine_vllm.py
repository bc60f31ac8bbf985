"""vLLM as the engine that samples, in this process and with a seed for each request.

In this process: the engine's own core process would take requests as they come in, and what runs
together in a batch, hence the rounding, would be left to chance.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from deltad.probes.engines import EngineResponse, read_vllm

from .engine import Sampling, saved_weights
from .recipe import RecipeError
from .rollout import SAMPLING_BATCH

KV_CACHE_BYTES: Final = 2**29
"""Memory for keys and values: 23 thousand tokens of SmolLM2-135M in bfloat16."""

LONGEST: Final = 4096
"""Longest prompt and response together, where the model allows as many; and tokens in a step."""

BLOCK: Final = 32
"""Tokens that the prefix cache shares at once, the fewest that vLLM's attention on CPU takes."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set while the engine is opened, where the user has not set them: one process, which keeps its
cores to choose from, and only errors in the log."""

_OPENED: weakref.WeakSet[VllmEngine] = weakref.WeakSet()
"""Engines of this process that are open: at most one."""


def open_engine(model: Any, sampling: Sampling, precision: str) -> VllmEngine:
    """Load a transformers model into vLLM; an engine opened earlier in this process is closed.

    vLLM's process groups belong to the process: closing one engine takes them from any other.

    Parameters
    ----------
    model
        A causal language model.
    sampling
        How to sample.
    precision
        "float32" or "bfloat16".

    Raises
    ------
    RecipeError
        vLLM refuses the model; its own words are handed on.
    """
    for earlier in list(_OPENED):
        earlier.close()
    with saved_weights(model) as folder, _as_it_was():
        import vllm

        longest = min(int(model.config.get_text_config().max_position_embeddings), LONGEST)
        try:
            llm = vllm.LLM(
                model=str(folder),
                dtype=precision,
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=longest,
                max_num_seqs=SAMPLING_BATCH,
                max_num_batched_tokens=max(longest, LONGEST),
                # A prompt that is cut in two while its request has a seed ends vLLM 0.32 on CPU:
                # it winds the request's generator back, which a generator on CPU cannot.
                enable_chunked_prefill=False,
                block_size=BLOCK,
                max_logprobs=sampling.top_k,
                logprobs_mode="processed_logprobs",
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                disable_log_stats=True,
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise RecipeError(f"vLLM cannot take this model in {precision}: {error}") from error
    return VllmEngine(llm, sampling, precision)


class VllmEngine:
    """An offline `vllm.LLM` with the policy's weights.

    Parameters
    ----------
    llm
        Opened with `logprobs_mode="processed_logprobs"` and without a tokenizer.
    sampling
        How to sample.
    precision
        Its dtype.
    """

    def __init__(self, llm: Any, sampling: Sampling, precision: str) -> None:
        self._llm, self._sampling, self._precision = llm, sampling, precision
        # vLLM would do so itself, but late: its objects refer to each other in circles.
        self._close = weakref.finalize(self, llm.llm_engine.engine_core.shutdown)
        _OPENED.add(self)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Version, precision, kind of log-probs and what a seed covers."""
        import vllm

        return {
            "version": vllm.__version__,
            "precision": self._precision,
            "logprobs_mode": "processed_logprobs",
            "seeds": "one for each request",
        }

    def close(self) -> None:
        """Give memory and process groups back; nothing can be generated afterwards."""
        self._close()
        _OPENED.discard(self)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[EngineResponse]:
        """Sample one response to each prompt, each from its own seed."""
        from vllm import SamplingParams

        if not self._close.alive:
            raise RecipeError(
                "this vLLM was closed, perhaps because another was opened: a process has one"
            )
        wanted = self._sampling
        parameters = [
            SamplingParams(
                temperature=wanted.temperature,
                max_tokens=wanted.max_new_tokens,
                stop_token_ids=list(wanted.stop_ids),
                logprobs=wanted.top_k,
                seed=seed,
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with _as_it_was():
            outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        responses = []
        for output in outputs:
            responses += read_vllm(
                output,
                mode="processed",
                temperature=wanted.temperature,
                top_p=1.0,
                top_k=-1,
                listed=wanted.top_k,
            )
        return responses

    def reset(self) -> None:
        """Empty the prefix cache, which would make the rounding depend on earlier seeds."""
        self._llm.reset_prefix_cache()


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Put back what vLLM changes in its process: torch's random state and its thread setting."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update(added)
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        for name in added:
            del os.environ[name]
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
