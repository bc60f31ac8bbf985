"""One self-contained HTML page of a dump: tables, figures, findings and the token viewer."""

from __future__ import annotations

from .page import Report, report
from .viewer import MAX_TOKENS, Viewer, token_viewer

__all__ = ["MAX_TOKENS", "Report", "Viewer", "report", "token_viewer"]
