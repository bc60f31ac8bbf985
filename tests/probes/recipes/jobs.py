"""Jobs for worker processes, which find them by the name of this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltad.probes.recipes import RecipeError
from deltad.probes.recipes.workers import Report


@dataclass(frozen=True)
class Touch:
    """Writes a file a seed; some seeds go wrong in their own ways."""

    folder: Path
    raises: int | None = None
    refuses: int | None = None
    dies: int | None = None
    quits: int | None = None
    hangs: int | None = None
    prepare_raises: bool = False

    def prepare(self, report: Report) -> None:
        report("preparing", 0.5)
        if self.prepare_raises:
            raise RecipeError("cannot prepare")
        (self.folder / "prepared").touch(exist_ok=False)

    def open(self, report: Report) -> Callable[[int, Report], None]:
        return self.one_seed

    def one_seed(self, seed: int, report: Report) -> None:
        report("working", 0.5)
        if seed == self.raises:
            raise ZeroDivisionError("one over nothing")
        if seed == self.refuses:
            raise RecipeError("no such thing")
        if seed == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == self.quits:
            os._exit(7)
        aside = self.folder / f"aside-{seed}"
        aside.touch()
        try:
            if seed == self.hangs:
                (self.folder / "hanging").touch()
                time.sleep(60)
            else:
                time.sleep(0.05)
            (self.folder / f"seed-{seed}").write_text(str(os.getpid()))
        finally:
            aside.unlink()
