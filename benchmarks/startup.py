"""Rows of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

from .row import Row


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    yield from ()
