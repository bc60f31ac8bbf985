"""deltad (ΔD): token-level diagnostics for trust-region masks in LLM RL."""

__version__ = "0.1.0"
