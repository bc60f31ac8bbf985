"""Progress of a training on standard error: a bar on a terminal, in a log a line a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deltad.probes.recipes.workers import Progress

from .options import Training


@contextmanager
def shown(training: Training, count: int, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Show how far a training is.

    Parameters
    ----------
    training
        What is trained.
    count
        Runs to come.
    quiet
        Show nothing.

    Yields
    ------
    callable
        Takes the workers' messages.
    """
    if quiet:
        yield lambda message: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console, training.recipe_name, count)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield _Bar(bars, training, count)


class _Lines:
    """A line for what is prepared, and for each run that is done."""

    def __init__(self, console: Any, name: str, count: int) -> None:
        self._console, self._name, self._count, self._done = console, name, count, 0
        self._preparing = ""

    def __call__(self, message: Progress) -> None:
        """Print a line where there is something new."""
        text = ""
        if message.seed is None and message.text not in ("", self._preparing):
            self._preparing = text = message.text
        elif message.seed is not None and message.done:
            self._done += 1
            text = f"{message.seed} trained, {self._done} of {self._count}"
        if text:
            self._console.print(f"{self._name}: {text}", soft_wrap=True, highlight=False)


class _Bar:
    """One bar over the rollout batches of all runs."""

    def __init__(self, bars: Any, training: Training, count: int) -> None:
        self._bars, self._training, self._count = bars, training, count
        self._at: dict[str, float] = {}
        self._done = 0
        self._task = bars.add_task(training.recipe_name, total=float(count), state="")

    def __call__(self, message: Progress) -> None:
        """Show a message."""
        if message.seed is None:
            self._bars.update(self._task, state=f"{message.text} {message.fraction:.0%}")
            if message.done:
                self._bars.reset(self._task)
            return
        run = str(message.seed)
        self._done += message.done
        self._at[run] = message.fraction
        state = f"{self._done}/{self._count} runs · {run}: {message.text or 'done'}"
        self._bars.update(self._task, completed=sum(self._at.values()), state=state)
