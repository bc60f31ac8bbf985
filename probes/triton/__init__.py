"""The readout on a GPU: two Triton kernels, imported only where they run.

`supports` says whether they can take a readout; `dots` and `sums` are the two halves of the
pivoted readout of `deltad.probes.readout`, with the same results as its torch tiles.
"""

from __future__ import annotations

from .launch import dots, sums
from .support import supports

__all__ = ["dots", "sums", "supports"]
