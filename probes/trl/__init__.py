"""Attach the update probe, and the masks as losses, to TRL's trainers.

TRL itself is never imported here: the trainer is the user's.
"""

from .attach import TOP_K, attach
from .attached import Attached

__all__ = ["TOP_K", "Attached", "attach"]
