"""Log-probs of the behavior policy, as serving engines report them.

Readers need NumPy only; `deltad.probes.engines.packing`, which makes tensors of what they return,
needs torch.
"""

from __future__ import annotations

from .ctranslate2 import read_ctranslate2
from .errors import EngineError
from .llama_cpp import read_llama_cpp
from .missing import Missing
from .openai import read_openai
from .prime_rl import read_prime_rl
from .registry import READERS, Reader, reader_for
from .response import EngineResponse, count_missing, shared_metadata
from .rollout_dump import read_rollout_dump
from .sglang import read_sglang, read_sglang_prompt
from .texts import vocabulary_of
from .transformers import read_transformers
from .vllm import read_vllm, read_vllm_prompt

__all__ = [
    "READERS",
    "EngineError",
    "EngineResponse",
    "Missing",
    "Reader",
    "count_missing",
    "read_ctranslate2",
    "read_llama_cpp",
    "read_openai",
    "read_prime_rl",
    "read_rollout_dump",
    "read_sglang",
    "read_sglang_prompt",
    "read_transformers",
    "read_vllm",
    "read_vllm_prompt",
    "reader_for",
    "shared_metadata",
    "vocabulary_of",
]
