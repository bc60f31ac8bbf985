"""Log-probs of the behavior policy, as serving engines report them.

Readers need NumPy only; `deltad.probes.engines.packing`, which makes tensors of what they return,
needs torch.
"""

from __future__ import annotations

from .errors import EngineError
from .response import EngineResponse, Missing, shared_metadata
from .vllm import read_vllm, read_vllm_prompt

__all__ = [
    "EngineError",
    "EngineResponse",
    "Missing",
    "read_vllm",
    "read_vllm_prompt",
    "shared_metadata",
]
