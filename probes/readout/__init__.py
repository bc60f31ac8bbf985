"""From hidden states to log-probs, collision and entropy, without the logits in memory.

`readout` and `read_logits` are the fast paths, `reference_readout` the plain one that they are
held against and fall back on.
"""

from .pivoted import read_logits, readout
from .precision import PRODUCTS, Product, full_precision
from .reference import reference_readout
from .result import Readout, ReadoutError

__all__ = [
    "PRODUCTS",
    "Product",
    "Readout",
    "ReadoutError",
    "full_precision",
    "read_logits",
    "readout",
    "reference_readout",
]
