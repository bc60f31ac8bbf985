"""The heads of other libraries, each as a function (hidden, weight, ids) → log-probs."""

from __future__ import annotations

from .anchor import Anchor
from .liger import LIGER
from .plain import BF16_LOG_SOFTMAX, LOG_SOFTMAX, float64_head
from .prime_rl import PRIME_RL
from .torch_fused import LINEAR_CROSS_ENTROPY
from .trl import TRL
from .verl import VERL

ANCHORS = (LOG_SOFTMAX, BF16_LOG_SOFTMAX, TRL, PRIME_RL, LIGER, VERL, LINEAR_CROSS_ENTROPY)
"""All of them."""

__all__ = [
    "ANCHORS",
    "BF16_LOG_SOFTMAX",
    "LIGER",
    "LINEAR_CROSS_ENTROPY",
    "LOG_SOFTMAX",
    "PRIME_RL",
    "TRL",
    "VERL",
    "Anchor",
    "float64_head",
]
