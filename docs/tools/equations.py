"""Equations as MathML, which browsers draw by themselves: no script and no font to fetch."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">'
    r"(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>",
    re.DOTALL,
)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the TeX that `pymdownx.arithmatex` marked; called by MkDocs for every page."""
    return _EQUATION.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    """One equation."""
    if found["block"] is not None:
        return str(convert(html.unescape(found["block"]).strip(), display="block"))
    return str(convert(html.unescape(found["inline"]).strip()))
