"""Places on the command line: folders, or URLs, which typer's own way with paths would break."""

from __future__ import annotations

from pathlib import Path


def as_place(text: str) -> Path:
    """Give the place that an argument names; see `deltad.dumps.storage.place`."""
    if "://" not in text:
        return Path(text)
    from deltad.dumps.storage import place

    return place(text)


def is_url(path: object) -> bool:
    """Whether `as_place` made it of a URL."""
    return getattr(path, "is_remote", False) is True
