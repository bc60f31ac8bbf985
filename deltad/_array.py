"""One namespace for NumPy arrays and torch tensors."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A NumPy array or a torch tensor; every function gives back the kind that it was given."""


def namespace(*arrays: Array) -> ModuleType:
    """Array API namespace of `arrays`: NumPy itself, or array-api-compat's for anything else."""
    if all(isinstance(array, np.ndarray) for array in arrays):
        return np  # array-api-compat's NumPy wrapper would import numpy.f2py for nothing
    from array_api_compat import array_namespace

    found: ModuleType = array_namespace(*arrays)
    return found
