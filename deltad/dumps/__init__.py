"""The dump contract: columns, metadata, writing, reading, checking.

Names are imported when they are first used, so that who needs the metadata alone does not
wait for the rest.
"""

from __future__ import annotations

import lazy_loader

# What there is to import stands in `__init__.pyi`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
