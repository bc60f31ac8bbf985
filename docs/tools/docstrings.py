"""Docstrings as Markdown: what Sphinx calls a math directive becomes a displayed equation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DIRECTIVE = re.compile(r"^( *)\.\. math:: (.+?)(?=\n[ ]*\n|\Z)", re.MULTILINE | re.DOTALL)


class Equations(griffe.Extension):
    """Rewrites docstrings as they are read; called by mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = displayed(obj.docstring.value)


def displayed(text: str) -> str:
    """The text with `$$…$$` for each directive."""
    return _DIRECTIVE.sub(lambda found: f"{found[1]}$${' '.join(found[2].split())}$$", text)
