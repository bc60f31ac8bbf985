"""From hidden states to log-probs, collision and entropy, without the logits in memory.

`readout` and `read_logits` are the fast paths, `reference_readout` the plain one that they are
held against and fall back on.
"""

from .pivoted import read_logits, readout
from .precision import exact_products, is_exclusive
from .reference import reference_readout
from .result import Readout, ReadoutError

__all__ = [
    "Readout",
    "ReadoutError",
    "exact_products",
    "is_exclusive",
    "read_logits",
    "readout",
    "reference_readout",
]
