"""Texts that no page should run, lose or hide."""

from __future__ import annotations

from typing import Final

HOSTILE: Final = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{script}}&\u2028'\""
)
HOSTILE_ARM: Final = "<img src=x onerror=alert(3)>"
ODD: Final = (" the", "\n", "x", "سلام", "<b>", "\t", "\u202e", "<0x0A>", "é", "")
