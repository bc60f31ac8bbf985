"""Every fixture says where it comes from."""

from __future__ import annotations

import re

from .known import FIXTURES


def test_every_file_has_its_place_in_the_readme() -> None:
    text = (FIXTURES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+(?:_\*)?)(?:\.json)?`", text))
    for path in FIXTURES.glob("*.json"):
        stem = path.stem
        assert (
            stem in named
            or any(name.endswith("*") and stem.startswith(name[:-1]) for name in named)
            or stem.rsplit("_", 1)[0] in named
        ), stem
    for path in FIXTURES.glob("record_*.py"):
        assert path.name in text
