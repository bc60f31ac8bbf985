"""`python -m benchmarks.doctor RUN`: put every fault into subsets of RUN, which must be sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import summary, trial


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    repeats: Annotated[int, typer.Option(min=1, help="Cases per fault and strength.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")] = 0,
) -> None:
    """Print what the doctor calls every known fault, and how often it raises a false alarm."""
    print(summary(trial(run, repeats=repeats, seed=seed)))


if __name__ == "__main__":
    typer.run(main)
