"""The doctor on trial: faults put into a sound dump, and what it called them.

What a trial says holds for these faults at these strengths on this dump, no further.
"""

from __future__ import annotations

import math
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from deltad.analysis.doctor import Diagnosis, examine
from deltad.dumps import Dump

from .broken import write_injected
from .fault import FAULTS, Fault
from .rows import NothingToBreakError

SOUND = "sound"
NOTHING = "nothing"

ROWS_PER_CASE = 1_000
"""A case takes as many seeds as hold about so many rows; the doctor sees a dump of them."""


@dataclass(frozen=True)
class Case:
    """One fault in one subset of the dump, and what was said of it.

    Attributes
    ----------
    fault : Fault
        What was put in.
    strength : float
        Its size.
    said : tuple of str, or None
        Causes named, likeliest first; None where there was nothing to break.
    estimate : float
        Of the first; NaN where it has none.
    """

    fault: Fault
    strength: float
    said: tuple[str, ...] | None
    estimate: float = math.nan

    @property
    def cause(self) -> str:
        """What should be said."""
        return self.fault.cause or SOUND

    @property
    def named(self) -> str:
        """What was said first."""
        return self.said[0] if self.said else NOTHING

    @property
    def right(self) -> bool:
        """Whether that is right."""
        return self.named in (self.fault.cause or NOTHING, *self.fault.also)


def every_case(repeats: int = 1) -> Iterator[tuple[Fault, float]]:
    """Every fault at every strength, so many times."""
    for fault in FAULTS.values():
        for strength in fault.strengths:
            yield from [(fault, strength)] * repeats


def trial(
    run: Dump | str | Path,
    cases: Iterable[tuple[Fault, float]] | None = None,
    *,
    repeats: int = 1,
    seed: int = 0,
    doctor: Callable[[Dump], Diagnosis] = examine,
) -> list[Case]:
    """Put faults into subsets of a sound dump and ask the doctor.

    Parameters
    ----------
    run : Dump, str or Path
        A dump in order; its own health is not doubted.
    cases : iterable of (Fault, float), optional
        Faults and strengths, by default `every_case(repeats)`.
    repeats : int
        Cases per fault and strength, each with other seeds of the dump and other random numbers.
    seed : int
        Of the random numbers. A case does not depend on which others are tried.
    doctor : callable
        Gives the diagnosis of a dump.

    Returns
    -------
    list of Case
        In the order of `cases`. They go through files, as a user's dump does; all arms but
        `zero-step` are broken alike.
    """
    dump = run if isinstance(run, Dump) else Dump.open(run)
    arms = [arm for arm in dump.arms if arm != "zero-step"] or list(dump.arms)
    tried: Counter[tuple[str, float]] = Counter()
    found = []
    for fault, strength in every_case(repeats) if cases is None else cases:
        key = fault.name, strength
        rng = np.random.default_rng([seed, zlib.crc32(repr(key).encode()), tried[key]])
        tried[key] += 1
        seeds = _some_seeds(dump, arms[0], rng)
        with tempfile.TemporaryDirectory(prefix="deltad-trial-") as folder:
            try:
                broken = write_injected(
                    dump, Path(folder) / "run", fault, strength, int(rng.integers(2**31)),
                    arms=arms, seeds=seeds,
                )  # fmt: skip
            except NothingToBreakError:
                found.append(Case(fault, strength, None))
                continue
            findings = doctor(Dump.open(broken)).findings
        estimate = findings[0].estimate if findings else None
        said = tuple(each.cause for each in findings)
        found.append(Case(fault, strength, said, math.nan if estimate is None else estimate))
    return found


def summary(cases: Sequence[Case]) -> str:
    """How often the right cause was named, the errors of the estimates, and every failure."""
    broken = [case for case in cases if case.said is not None]
    by_cause: dict[str, list[Case]] = {}
    for case in sorted(broken, key=lambda case: case.cause == SOUND):
        by_cause.setdefault(case.cause, []).append(case)
    faults = [case for case in broken if case.cause != SOUND]
    lines = [f"right cause named first: {_share(faults)}", ""]
    lines += [f"{cause:16} {_share(mine)}" for cause, mine in by_cause.items()]
    lines += ["", "Intervals: Clopper and Pearson's exact 95 %."]
    errors: dict[str, list[float]] = {}
    for case in faults:
        if case.right and case.fault.estimate:
            errors.setdefault(case.fault.name, []).append(abs(case.estimate - case.strength))
    lines += [
        f"{name}: estimates are off by {np.mean(each):.3g} on average, {max(each):.3g} at most"
        for name, each in errors.items()
    ]
    wrong = Counter(
        f"{case.fault.name} {case.strength:g}: {', '.join(case.said or (NOTHING,))}"
        for case in broken
        if not case.right
    )
    lines += [f"wrong: {what} ({times}×)" for what, times in wrong.items()]
    lines += [
        f"nothing to break: {case.fault.name} {case.strength:g}"
        for case in cases
        if case.said is None
    ]
    return "\n".join(lines)


def _share(cases: Sequence[Case]) -> str:
    """How many of the cases are right, with its interval."""
    right = sum(case.right for case in cases)
    if not cases:
        return "0 of 0"
    low, high = binomtest(right, len(cases)).proportion_ci(method="exact")
    return f"{right:3} of {len(cases):3} = {right / len(cases):.3f} [{low:.3f}, {high:.3f}]"


def _some_seeds(dump: Dump, arm: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Seeds at random until they hold enough rows."""
    chosen: list[int] = []
    for seed in rng.permutation(dump.seeds(arm)).tolist():
        if sum(dump.rows(arm, each) for each in chosen) >= ROWS_PER_CASE:
            break
        chosen.append(seed)
    return tuple(sorted(chosen))
