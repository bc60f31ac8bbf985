"""The masks as losses: what recipes train with and what trainers plug in.

The one place of the ground floor that needs torch; nothing else there imports it.
"""

from .aggregation import AGGREGATIONS, Aggregation, aggregate, count
from .conventions import CONVENTIONS, Convention, clip_higher
from .metrics import Metric, add_metrics
from .surrogate import policy_loss
from .topk import TopKLogprobs
from .trust_region import PolicyLoss, trust_region_loss

__all__ = [
    "AGGREGATIONS",
    "CONVENTIONS",
    "Aggregation",
    "Convention",
    "Metric",
    "PolicyLoss",
    "TopKLogprobs",
    "add_metrics",
    "aggregate",
    "clip_higher",
    "count",
    "policy_loss",
    "trust_region_loss",
]
