"""Notes in RUN that say whose recording is not finished.

A writer leaves one when it opens and takes it away when it has closed, so that what it left
behind when it was killed is not taken for the whole: files appear when they are complete, and a
file that never came cannot be missed by looking at the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from .layout import parse_part, part_path
from .storage import place

_NOTE: Final = re.compile(
    r"_unfinished\.arm=(?P<arm>.+)\.seed=(?P<seed>-?[0-9]+)\.rank=(?P<rank>[0-9]+)"
)


@dataclass(frozen=True)
class Unfinished:
    """One arm, seed and rank whose writer has not closed.

    Attributes
    ----------
    run : Path
        RUN.
    arm, seed, rank : str, int, int
        Whose files.
    """

    run: Path
    arm: str
    seed: int
    rank: int = 0

    @property
    def path(self) -> Path:
        """The note; dataset readers skip it."""
        return self.run / f"_unfinished.arm={self.arm}.seed={self.seed}.rank={self.rank}"

    def leave(self) -> bytes:
        """Leave the note, or take over that of an earlier writer.

        Returns
        -------
        bytes
            What it says, and no other does.

        Raises
        ------
        OSError
            The file system refuses.
        """
        about = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": secrets.token_hex(8),
        }
        text = json.dumps(about).encode() + b"\n"
        self.path.write_bytes(text)
        return text

    def take(self, text: bytes | None = None) -> None:
        """Take the note away, where there is one, and where it says `text` if that is given."""
        with contextlib.suppress(FileNotFoundError):
            if text is None or self.path.read_bytes() == text:
                self.path.unlink(missing_ok=True)

    def sentence(self) -> str:
        """What of the recording is there, and what is not."""
        found = part_numbers(self.run, arm=self.arm, seed=self.seed, rank=self.rank)
        there = {0: "no file is", 1: "one file is"}.get(len(found), f"{len(found)} files are")
        return (
            f"the recording of arm {self.arm}, seed {self.seed}, rank {self.rank} is not finished: "
            f"{there} complete, and what was to come after is missing ({self._whose()}); wait for "
            "it, or record it anew"
        )

    def _whose(self) -> str:
        """Who left the note."""
        try:
            found = json.loads(self.path.read_bytes())
            return f"begun by process {found['process']} on {found['host']} at {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "the note does not say by whom it was begun"


def unfinished(
    run: str | Path, *, arm: str | None = None, seed: int | None = None
) -> list[Unfinished]:
    """What in a dump is not finished, by its notes.

    Parameters
    ----------
    run : str or Path
        RUN; need not exist.
    arm, seed : str and int, optional
        Only of these.

    Returns
    -------
    list of Unfinished
        By arm, seed and rank; of recordings that go on too.
    """
    return sorted(
        (
            each
            for each in _notes(place(run))
            if (arm is None or each.arm == arm) and (seed is None or each.seed == seed)
        ),
        key=lambda each: (each.arm, each.seed, each.rank),
    )


def _notes(run: Path) -> Iterator[Unfinished]:
    """The notes in RUN."""
    if not run.is_dir():
        return
    for entry in run.iterdir():
        if found := _NOTE.fullmatch(entry.name):
            yield Unfinished(run, found["arm"], int(found["seed"]), int(found["rank"]))


def part_numbers(run: str | Path, *, arm: str, seed: int, rank: int = 0) -> list[int]:
    """Numbers of the complete files of one arm, seed and rank, ascending; none is a list of none.

    Parameters
    ----------
    run : str or Path
        RUN; need not exist.
    arm, seed, rank : str, int, int
        Whose files.

    Returns
    -------
    list of int
        From 0 without gaps, unless files are missing.
    """
    folder = part_path(place(run), arm, seed, rank, 0).parent
    if not folder.is_dir():
        return []
    places = (parse_part(entry.name) for entry in folder.iterdir())
    return sorted(place[1] for place in places if place is not None and place[0] == rank)
