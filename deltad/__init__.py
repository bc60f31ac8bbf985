"""deltad (ΔD): token-level diagnostics for trust-region masks in LLM RL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltad.masks import Rule as Rule

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `Rule` when it is first used: the command line must not wait for NumPy."""
    if name == "Rule":
        from deltad.masks import Rule

        return Rule
    raise AttributeError(f"module 'deltad' has no attribute {name!r}")
