"""The masks as losses: what recipes train with and what trainers plug in.

The one place of the ground floor that needs torch; nothing else there imports it.
"""

from .surrogate import policy_loss

__all__ = ["policy_loss"]
