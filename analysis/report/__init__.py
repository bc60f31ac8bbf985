"""One self-contained HTML page of a dump: tables, figures, findings and the token viewer."""

from __future__ import annotations

from .page import Report, report
from .payload import MAX_TOKENS, Payload, build_payload

__all__ = ["MAX_TOKENS", "Payload", "Report", "build_payload", "report"]
