"""Notes that say which recordings have not ended, and how many files those that ended wrote.

Files appear when they are complete, and a file that never came, or was lost later, cannot be
missed by looking at the others. So a writer leaves a note in RUN when it opens and takes it away
when it has closed; and when it closes it leaves an end note, an empty file
`_ended-<rank>-<files>`, next to its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from deltad._checks import parse_json

from .errors import DumpError
from .layout import parse_end, parse_part, part_path
from .storage import place, read_bytes

END_NOTE_KEY: Final = b"deltad_end_note"
"""Key in the footer of a file whose writer leaves an end note."""

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
        import secrets  # slow to import

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
            if text is None or read_bytes(self.path) == text:
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
            found = parse_json(read_bytes(self.path))
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
    places = map(parse_part, _names(part_path(place(run), arm, seed, rank, 0).parent))
    return sorted(place[1] for place in places if place is not None and place[0] == rank)


def next_part(run: Path, *, arm: str, seed: int, rank: int = 0) -> int:
    """Number of the file that follows those of one arm, seed and rank.

    Raises
    ------
    DumpError
        The last file is missing, as the end note tells.
    """
    folder = part_path(run, arm, seed, rank, 0).parent
    following = max(part_numbers(run, arm=arm, seed=seed, rank=rank), default=-1) + 1
    if (ended := ended_ranks(_names(folder)).get(rank, 0)) > following:
        raise DumpError(
            folder / f"part-{rank}-{following}.parquet",
            f"is missing: {ended} files were written, so none can follow; record the seed anew",
        )
    return following


def leave_end_note(folder: Path, rank: int, files: int) -> None:
    """Note that a rank has ended with so many files in a seed's folder; with none, take it away."""
    if files:
        (folder / f"_ended-{rank}-{files}").write_bytes(b"")
    for name in _names(folder):
        if (found := parse_end(name)) and found[0] == rank and found[1] != files:
            (folder / name).unlink(missing_ok=True)


def drop_parts(folder: Path, rank: int, first: int = 0) -> None:
    """Remove a rank's files from a number on, as if they had never been written."""
    places = (parse_part(name) for name in _names(folder))
    numbers = sorted(each[1] for each in places if each and each[0] == rank and each[1] >= first)
    if first and not numbers:
        return
    leave_end_note(folder, rank, first)
    for number in numbers:  # ascending: if this is interrupted, readers see a gap
        (folder / f"part-{rank}-{number}.parquet").unlink(missing_ok=True)


def ended_ranks(names: Iterable[str]) -> dict[int, int]:
    """How many files each rank has written that has ended, by the names in a seed's folder."""
    return dict(sorted(found for name in names if (found := parse_end(name))))


def is_recorded(run: str | Path, *, arm: str, seed: int) -> bool:
    """Whether the recording of an arm and seed has ended and no file of it is missing.

    Parameters
    ----------
    run : str or Path
        RUN; need not exist.
    arm, seed : str, int
        Which recording.

    Returns
    -------
    bool
        By names alone; files without an end note are taken for all that were written.
    """
    if unfinished(run, arm=arm, seed=seed):
        return False
    names = _names(part_path(place(run), arm, seed, 0, 0).parent)
    ended = ended_ranks(names)
    ranks: dict[int, list[int]] = {rank: [] for rank in ended}
    for rank, number in sorted(found for name in names if (found := parse_part(name))):
        ranks.setdefault(rank, []).append(number)
    return bool(ranks) and all(
        numbers == list(range(len(numbers))) and ended.get(rank, len(numbers)) == len(numbers)
        for rank, numbers in ranks.items()
    )


def _names(folder: Path) -> list[str]:
    """Names in a folder; none where there is no folder."""
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
