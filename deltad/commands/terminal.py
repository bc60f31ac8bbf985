"""What every command does at a terminal: errors, notes, progress bars, files written whole."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO


class Status(IntEnum):
    """Exit statuses; the last is what a shell reports where nobody read on (SIGPIPE)."""

    BAD_CONTENT = 1
    BAD_OPTION = 2
    FINDINGS = 3
    NOT_ENOUGH = 4
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class OptionError(ValueError):
    """A bad option value, or a RUN that does not exist."""


def complain(message: object, what: str = "error") -> None:
    """Print one line, never wrapped and fit for any terminal, to standard error."""
    from deltad._checks import printable

    sys.stderr.write(f"{what}: {printable(' '.join(str(message).split()))}\n")


class Bar:
    """A progress bar; does nothing where nobody looks."""

    def __init__(self, update: Callable[..., object] = lambda **how: None) -> None:
        self._update = update

    def advance(self, steps: int) -> None:
        """Go on by some steps."""
        self._update(advance=steps)

    def at(self, done: int, total: int) -> None:
        """Stand at `done` of `total`."""
        self._update(completed=done, total=total)


def is_url(path: object) -> bool:
    """Whether a place on the command line was a URL."""
    return getattr(path, "is_remote", False) is True


def must_be_folder(run: Path) -> None:
    """Refuse a RUN that is none."""
    if not run.is_dir():
        raise OptionError(f"{run} {'is no folder' if run.exists() else 'does not exist'}")


def check_output(output: Path, runs: Iterable[Path]) -> None:
    """Refuse a file that cannot be written or would replace what is read, before any work."""
    target = output.resolve()
    for run in runs:
        if not is_url(run) and target == run.resolve():
            raise OptionError(f"{output} is what is read: name another file")
        if not is_url(run) and run.is_dir() and target.is_relative_to(run.resolve()):
            raise OptionError(f"{output} lies in the dump {run}: name a file outside of it")
    if target.is_dir():
        raise OptionError(f"cannot write {output}: it is a folder")
    if not target.parent.is_dir():
        raise OptionError(f"cannot write {output}: there is no folder {target.parent}")


@contextlib.contextmanager
def sink(output: Path | None) -> Iterator[BinaryIO]:
    """Open standard output, or a file that appears whole or not at all."""
    if output is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        return
    target = output.resolve()
    if target.exists() and not target.is_file():  # a device or a pipe has no whole to appear
        with _writable(output), target.open("wb") as file:
            yield file
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _writable(output):
            file = aside.open("wb")
        with file:
            yield file
        with _writable(output):
            aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _writable(output: Path) -> Iterator[None]:
    """Make an operating system's refusal an error about the option."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OptionError(f"cannot write {output}: {error.strerror or error}") from error
