"""Hooks on a real training step: every response token's divergence before and after it.

Names are imported when they are first used, so that who lists recipes does not wait for torch.
"""

from __future__ import annotations

import lazy_loader

if __name__ != "deltad.probes":
    raise ImportError(
        f"this folder is the package `deltad.probes`, imported here as {__name__!r}: "
        "run `pip install -e '.[probes]'` in the repository and `import deltad.probes`"
    )

# What there is to import stands in `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
