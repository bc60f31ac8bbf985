"""Dumps into tables, statistics and figures; never needs torch.

Names are imported when they are first used: a table needs no pandas and only a figure needs
matplotlib.
"""

from __future__ import annotations

import lazy_loader

if __name__ != "deltad.analysis":
    raise ImportError(
        f"this folder is the package `deltad.analysis`, imported here as {__name__!r}: "
        "run `pip install -e .` in the repository and `import deltad.analysis`"
    )

# What there is to import stands in `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
