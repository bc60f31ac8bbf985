"""The place of an import in RUN: what is there already, and how the new files get there."""

from __future__ import annotations

import os
from pathlib import Path

from deltad.dumps import DumpError, Metadata, part_batches, part_numbers
from deltad.dumps.aside import publish as publish_file
from deltad.dumps.footers import scan
from deltad.dumps.layout import part_path
from deltad.dumps.storage import is_remote
from deltad.dumps.unfinished import drop_parts, leave_end_note, next_part


def check_run(run: Path, metadata: Metadata, arm: str, seed: int, existing: str) -> None:
    """Refuse a RUN that these rows cannot stand in."""
    if not run.exists():
        return
    parts, problems = scan(run)
    if parts and problems:
        raise problems[0]
    mine = [part for part in parts if (part.arm, part.seed) == (arm, seed)]
    if mine and existing == "refuse":
        raise DumpError(
            mine[0].path,
            "exists already: give `--existing replace`, `--existing append`, another arm or seed, "
            "or another RUN",
        )
    for part in parts:
        if part in mine and existing == "replace":
            continue
        for key in ("top_k", "vocab_size", "temperature"):
            have, there = getattr(metadata, key), getattr(part.metadata, key)
            if have != there:
                raise DumpError(
                    part.path,
                    f"`{key}` must be the same in all files of a dump, found {there}, and {have} "
                    "in what is imported",
                )


def top_k_of(run: Path, arm: str, seed: int, existing: str) -> int | None:
    """K of what will stay in RUN; None where that is nothing."""
    for part in scan(run)[0] if run.exists() else []:
        if existing != "replace" or (part.arm, part.seed) != (arm, seed):
            return part.metadata.top_k
    return None


def known_keys(run: Path, arm: str, seed: int) -> set[tuple[int, int | str]]:
    """Step and sequence of the responses that are there already."""
    found: set[tuple[int, int | str]] = set()
    for part in scan(run)[0] if run.exists() else []:
        if (part.arm, part.seed) == (arm, seed):
            for batch in part_batches(part, columns=("step", "sequence")):
                found |= set(zip(batch["step"].tolist(), batch["sequence"].tolist(), strict=True))
    return found


def publish(staging: Path, run: Path, arm: str, seed: int, existing: str) -> tuple[Path, ...]:
    """Put complete files into their places.

    In a folder they appear together. Behind a URL they come one by one, the first one last, so
    that until then readers see that files are missing.
    """
    numbers = part_numbers(staging, arm=arm, seed=seed)
    target = part_path(run, arm, seed, 0, 0).parent
    staged = part_path(staging, arm, seed, 0, 0).parent
    first = 0
    if existing == "append":
        first = next_part(run, arm=arm, seed=seed)
    behind_url = is_remote(run)  # by itself it would narrow the type of `run`
    if behind_url:
        if existing != "append":
            drop_parts(target, 0)
        for number in reversed(numbers):
            place = part_path(run, arm, seed, 0, first + number)
            publish_file(part_path(staging, arm, seed, 0, number), place)
    elif existing == "append" and target.is_dir():
        for number in numbers:
            os.rename(
                staged / f"part-0-{number}.parquet", target / f"part-0-{first + number}.parquet"
            )
    else:
        if target.is_dir():
            os.rename(target, staging / "replaced")
        if target.parent.is_dir():
            os.rename(staged, target)
        else:
            os.rename(staged.parent, target.parent)
    leave_end_note(target, 0, first + len(numbers))
    return tuple(part_path(run, arm, seed, 0, first + number) for number in numbers)
