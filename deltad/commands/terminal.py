"""What every command does at a terminal: errors, notes, progress bars, files written whole."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAD_CONTENT: Final = 1
BAD_OPTION: Final = 2
FINDINGS: Final = 3
NOT_ENOUGH: Final = 4
INTERRUPTED: Final = 130
CLOSED_PIPE: Final = 141
"""Exit statuses; the last is what a shell reports of a program that ended because nobody read on
(SIGPIPE)."""


class OptionError(ValueError):
    """A bad option value, or a RUN that does not exist."""


def complain(message: str) -> None:
    """Print one error line, never wrapped, to standard error."""
    sys.stderr.write(f"error: {one_line(message)}\n")


def note(message: str, *, quiet: bool) -> None:
    """Print one line that is good to know to standard error."""
    if not quiet:
        sys.stderr.write(f"note: {one_line(message)}\n")


def one_line(text: str) -> str:
    """The same words with single spaces between them, fit for any terminal."""
    from deltad._checks import printable

    return printable(" ".join(text.split()))


class Bar:
    """A progress bar on standard error; does nothing where nobody looks."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        """Wrap a task of a rich progress display, or nothing."""
        self._progress, self._task = progress, task

    def advance(self, steps: int) -> None:
        """Go on by some steps."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, steps)

    def at(self, done: int, total: int) -> None:
        """Stand at `done` of `total`."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)


@contextlib.contextmanager
def progress_bar(total: int | None, unit: str, *, quiet: bool) -> Iterator[Bar]:
    """Show a progress bar while the block runs; silent where standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), unit, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, progress.add_task(unit, total=total))


def is_url(path: object) -> bool:
    """Whether a place on the command line was a URL."""
    return getattr(path, "is_remote", False) is True


def check_output(output: Path | None, run: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it.

    Raises
    ------
    OptionError
        The file would lie in the dump, would replace what is read, or lies in no folder, or it
        is a folder itself.
    """
    if output is None:
        return
    target = output.resolve()
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
    """Open what a command writes to: standard output, or a file that appears whole or not at all.

    Raises
    ------
    OptionError
        The file cannot be written.
    """
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


@contextlib.contextmanager
def termination_as_interruption() -> Iterator[None]:
    """Let SIGTERM stop the workers and tidy up, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
