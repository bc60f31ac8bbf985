"""Hooks on a real training step: every response token's divergence before and after it.

Names are imported when they are first used, so that who lists recipes does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ != "deltad.probes":
    raise ImportError(
        f"this folder is the package `deltad.probes`, imported here as {__name__!r}: "
        "run `pip install -e '.[probes]'` in the repository and `import deltad.probes`"
    )

if TYPE_CHECKING:
    from .arms import ZERO_STEP as ZERO_STEP
    from .arms import Snapshot as Snapshot
    from .arms import branch as branch
    from .behavior import ResponseTokens as ResponseTokens
    from .errors import ProbeError as ProbeError
    from .microbatch import MicroBatch as MicroBatch
    from .microbatch import Rows as Rows
    from .probe import UpdateProbe as UpdateProbe
    from .readout import Readout as Readout
    from .recorder import Recorder as Recorder

_HOME = {
    "MicroBatch": "microbatch",
    "ProbeError": "errors",
    "Readout": "readout",
    "Recorder": "recorder",
    "ResponseTokens": "behavior",
    "Rows": "microbatch",
    "Snapshot": "arms",
    "UpdateProbe": "probe",
    "ZERO_STEP": "arms",
    "branch": "arms",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
