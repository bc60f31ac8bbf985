"""Names of folders and files: `RUN/arm=<name>/seed=<int>/part-<rank>-<n>.parquet`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from deltad._checks import is_integer

PROMPTS: Final = "_prompts"
"""Folder in RUN for prompts; dataset readers skip names that begin with `_`."""

_PART: Final = re.compile(r"part-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.parquet")
_END: Final = re.compile(r"_ended-(0|[1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
_SEED: Final = re.compile(r"0|-?[1-9][0-9]*")
# What needs no escaping in a folder's name on any system, nor in `shared:<arm>`.
_ARM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,99}")


def check_arm(name: str) -> None:
    """Refuse an arm's name that a folder cannot carry everywhere.

    Raises
    ------
    ValueError
        A character is not allowed, or the name is empty or too long.
    """
    if not _ARM.fullmatch(name):
        raise ValueError(
            "an arm's name must be letters, digits and . _ + @ - (100 at most, the first a "
            f"letter or digit), got {name!r}"
        )


def check_seed(seed: int) -> None:
    """Refuse a seed that is no int32.

    Raises
    ------
    ValueError
        `seed` is out of range.
    """
    if not is_integer(seed) or not -(2**31) <= seed < 2**31:
        raise ValueError(f"a seed must be an int32, got {seed!r}")


def part_path(run: Path, arm: str, seed: int, rank: int, part: int) -> Path:
    """Where one part lies."""
    return run / f"arm={arm}" / f"seed={seed}" / f"part-{rank}-{part}.parquet"


def parse_arm(name: str) -> str | None:
    """Arm of a folder's name, percent-decoded as dataset readers do; None for another name."""
    if not name.startswith("arm="):
        return None
    arm = unquote(name.removeprefix("arm="))
    return arm if arm.strip() and arm.isprintable() else None


def parse_seed(name: str) -> int | None:
    """Seed of a folder's name; None where it is not written as `seed=<int32>`."""
    text = name.removeprefix("seed=")
    if text == name or not _SEED.fullmatch(text) or not -(2**31) <= int(text) < 2**31:
        return None
    return int(text)


def parse_part(name: str) -> tuple[int, int] | None:
    """Rank and number of a part's name; None for another name."""
    found = _PART.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def parse_end(name: str) -> tuple[int, int] | None:
    """Rank and number of files of an end note's name; None for another name."""
    found = _END.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def is_skipped(name: str) -> bool:
    """Whether dataset readers skip the name."""
    return name.startswith(("_", "."))
