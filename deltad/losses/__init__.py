"""The masks as losses: what recipes train with and what trainers plug in.

The one place of the ground floor that needs torch; nothing else there imports it.
"""

from .aggregation import AGGREGATIONS, Aggregation, aggregate, count
from .conventions import CONVENTIONS, Convention
from .metrics import Metric, add_metrics
from .readout import PolicyLogprobs, policy_logprobs
from .surrogate import policy_loss
from .topk import TopKLogprobs
from .trust_region import PolicyLoss, trust_region_loss
from .vocab_parallel import vocab_parallel_logprobs

__all__ = [
    "AGGREGATIONS",
    "CONVENTIONS",
    "Aggregation",
    "Convention",
    "Metric",
    "PolicyLogprobs",
    "PolicyLoss",
    "TopKLogprobs",
    "add_metrics",
    "aggregate",
    "count",
    "policy_logprobs",
    "policy_loss",
    "trust_region_loss",
    "vocab_parallel_logprobs",
]
