"""The doctor on trial: faults put into a clean dump, and what it called them.

The answer is a confusion matrix: a row a cause that was put in, and one for sound dumps; a
column a cause that was named first, and one for nothing. What it says holds for these faults
at these strengths on this dump, no further.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from deltad.analysis.result import Result
from deltad.dumps import Dump

from .broken_dump import Rows, named_injection
from .injections import CONTROLS, INJECTIONS, Injection, NothingToBreakError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

FORMAT: Final = 1
"""Version of the JSON object."""

SOUND: Final = "sound"
"""Row of the matrix: nothing was put in that a doctor should find."""

NOTHING: Final = "nothing"
"""Column of the matrix: nothing wrong was found."""

ROWS_PER_CASE: Final = 1_000
"""A case takes as many seeds as hold about so many rows; the doctor sees a dump of them."""

ZERO_STEP: Final = "zero-step"

Interval = tuple[float, float]


class Said(Protocol):
    """One finding, as far as a trial looks at it."""

    @property
    def cause(self) -> str:
        """Its name."""

    @property
    def confidence(self) -> float:
        """In [0, 1]."""

    @property
    def estimate(self) -> float | None:
        """Its size."""


class Answer(Protocol):
    """A diagnosis, as far as a trial looks at it."""

    @property
    def findings(self) -> Sequence[Said]:
        """Likeliest first."""


Doctor = Callable[[Dump], Answer]


@dataclass(frozen=True)
class Case:
    """One fault or control in one subset of the dump, and what was said of it.

    Attributes
    ----------
    injection : str
        Its name.
    strength : float
        Its size.
    cause : str
        What it should be called; `SOUND` for a control.
    accepted : frozenset of str
        All that is right to say first; `NOTHING` for a control.
    said : tuple of str
        Causes named, likeliest first.
    confidence : float
        Of the first; NaN where nothing was found.
    estimate : float
        Of the first; NaN where it has none.
    truth : float
        What the estimate of the right cause should be; NaN where there is no such number.
    seeds : tuple of int
        Seeds of the dump that the case holds.
    """

    injection: str
    strength: float
    cause: str
    accepted: frozenset[str]
    said: tuple[str, ...]
    confidence: float
    estimate: float
    truth: float
    seeds: tuple[int, ...]

    @property
    def named(self) -> str:
        """What was said first."""
        return self.said[0] if self.said else NOTHING

    @property
    def right(self) -> bool:
        """Whether that is right."""
        return self.named in self.accepted


@dataclass(frozen=True)
class Share:
    """How many of some cases.

    Attributes
    ----------
    count, cases : int
        Numerator and denominator.
    """

    count: int
    cases: int

    @property
    def share(self) -> float:
        """In [0, 1]; NaN where there are no cases."""
        return self.count / self.cases if self.cases else math.nan

    @property
    def ci95(self) -> Interval:
        """Clopper and Pearson's exact 95 % interval; NaN where there are no cases."""
        return clopper_pearson(self.count, self.cases)


@dataclass(frozen=True)
class Trial(Result):
    """All cases of a trial.

    Attributes
    ----------
    run : str
        The clean dump.
    cases : tuple of Case
        In the order in which they were tried.
    not_broken : tuple of (str, float)
        Injections and strengths that found nothing to break.
    repeats, seed : int
        How often each strength was tried, and the seed of the random numbers.
    """

    run: str
    cases: tuple[Case, ...]
    not_broken: tuple[tuple[str, float], ...]
    repeats: int
    seed: int

    @property
    def causes(self) -> tuple[str, ...]:
        """Rows of the matrix: causes put in, in the order of the registry, and `SOUND`."""
        found = dict.fromkeys(case.cause for case in self.cases)
        return (*(name for name in found if name != SOUND), *([SOUND] if SOUND in found else []))

    @property
    def named(self) -> tuple[str, ...]:
        """Columns of the matrix: the causes put in, others that were named, and `NOTHING`."""
        others = sorted({case.named for case in self.cases} - {*self.causes, NOTHING})
        return (*(name for name in self.causes if name != SOUND), *others, NOTHING)

    @property
    def matrix(self) -> list[list[int]]:
        """Cases by cause put in and cause named."""
        counts = dict.fromkeys(((row, column) for row in self.causes for column in self.named), 0)
        for case in self.cases:
            counts[case.cause, case.named] += 1
        return [[counts[row, column] for column in self.named] for row in self.causes]

    @property
    def right(self) -> Share:
        """Faults of which the right cause was named first."""
        return _share(case for case in self.cases if case.cause != SOUND)

    @property
    def false_alarms(self) -> Share:
        """Sound dumps in which something was found."""
        sound = [case for case in self.cases if case.cause == SOUND]
        return Share(sum(not case.right for case in sound), len(sound))

    @property
    def failures(self) -> tuple[Case, ...]:
        """Cases of which something else was said."""
        return tuple(case for case in self.cases if not case.right)

    def right_by_cause(self) -> dict[str, Share]:
        """Share of right answers for each row of the matrix."""
        return {cause: _share(c for c in self.cases if c.cause == cause) for cause in self.causes}

    def right_by_injection(self) -> dict[str, Share]:
        """Share of right answers for each fault and control."""
        names = dict.fromkeys(case.injection for case in self.cases)
        return {name: _share(c for c in self.cases if c.injection == name) for name in names}

    def misses_by_injection(self) -> dict[str, list[float]]:
        """Estimate − truth where the right cause was named and has such a number."""
        misses: dict[str, list[float]] = {}
        for case in self.cases:
            if case.right and not math.isnan(case.truth):
                misses.setdefault(case.injection, []).append(case.estimate - case.truth)
        return misses

    def text(self) -> RenderableType:
        """The matrix, shares with intervals, and every failure."""
        from .trial_text import trial_text

        return trial_text(self)

    def columns(self) -> Mapping[str, Sequence[Any]]:
        """A row a case."""
        cases = self.cases
        return {
            "injection": [case.injection for case in cases],
            "strength": [case.strength for case in cases],
            "cause": [case.cause for case in cases],
            "named": [case.named for case in cases],
            "right": [case.right for case in cases],
            "confidence": [case.confidence for case in cases],
            "estimate": [case.estimate for case in cases],
            "truth": [case.truth for case in cases],
            "said": [" ".join(case.said) for case in cases],
            "seeds": [" ".join(map(str, case.seeds)) for case in cases],
        }

    def to_json_object(self) -> dict[str, Any]:
        """Matrix, shares and failures as plain objects."""
        from deltad.analysis.export import without_nan

        known: dict[str, Any] = without_nan(
            {
                "format": FORMAT,
                "run": self.run,
                "repeats": self.repeats,
                "seed": self.seed,
                "causes": list(self.causes),
                "named": list(self.named),
                "matrix": self.matrix,
                "right": _share_object(self.right),
                "false_alarms": _share_object(self.false_alarms),
                "by_cause": {
                    name: _share_object(share) for name, share in self.right_by_cause().items()
                },
                "by_injection": {
                    name: _share_object(share) for name, share in self.right_by_injection().items()
                },
                "estimates_off": {
                    name: {
                        "mean_absolute": sum(map(abs, misses)) / len(misses),
                        "largest": max(map(abs, misses)),
                    }
                    for name, misses in self.misses_by_injection().items()
                },
                "failures": [
                    {
                        "injection": case.injection,
                        "strength": case.strength,
                        "cause": case.cause,
                        "said": list(case.said),
                        "confidence": case.confidence,
                        "seeds": list(case.seeds),
                    }
                    for case in self.failures
                ],
                "nothing_to_break": [
                    {"injection": name, "strength": strength} for name, strength in self.not_broken
                ],
            }
        )
        return known

    def figure(self) -> Figure:
        """The matrix as a heat map."""
        from deltad.analysis.figures.trial import trial_figure

        return trial_figure(self)


def trial(
    dump: Dump | str | Path,
    *,
    repeats: int = 1,
    seed: int = 0,
    injections: Iterable[str] | None = None,
    strengths: int | None = None,
    rows_per_case: int = ROWS_PER_CASE,
    examine: Doctor | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trial:
    """Put every fault at every strength into subsets of a clean dump and ask the doctor.

    Parameters
    ----------
    dump : Dump, str or Path
        A dump in order; its own health is not doubted.
    repeats : int
        Cases a fault and strength, each with other seeds of the dump and random numbers of its
        own.
    seed : int
        Of the random numbers: the same seed makes the same cases.
    injections : iterable of str, optional
        Names of `INJECTIONS` and `CONTROLS`, by default all.
    strengths : int, optional
        Strengths a fault, at most, from the middle of its list; by default all.
    rows_per_case : int
        A case takes seeds until it has so many rows.
    examine : callable, optional
        The doctor, by default `deltad.analysis.doctor.examine`.
    progress : callable, optional
        Told 1 after every case; `planned` says how many there are.

    Returns
    -------
    Trial
        Every case, and the faults that found nothing to break.

    Raises
    ------
    ValueError
        An injection that does not exist, or `repeats` or `strengths` below 1.
    DumpError, FileNotFoundError
        The dump cannot be read.

    Notes
    -----
    Cases go through files, as a user's dump does. All arms but `zero-step` are broken alike.
    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {repeats}")
    if strengths is not None and strengths < 1:
        raise ValueError(f"`strengths` must be at least 1, got {strengths}")
    doctor = _the_doctor() if examine is None else examine
    opened = dump if isinstance(dump, Dump) else Dump.open(dump)
    rows = Rows(opened)
    arms = [arm for arm in opened.arms if arm != ZERO_STEP] or list(opened.arms)
    cases: list[Case] = []
    not_broken: list[tuple[str, float]] = []
    for number, (injection, strength) in enumerate(_planned(injections, repeats, strengths)):
        rng = np.random.default_rng([seed, number])
        seeds = _some_seeds(opened, arms[0], rows_per_case, rng)
        with tempfile.TemporaryDirectory(prefix="deltad-trial-") as folder:
            try:
                broken = rows.write(
                    Path(folder) / "run", injection, strength, int(rng.integers(2**31)),
                    arms=arms, seeds=seeds,
                )  # fmt: skip
            except NothingToBreakError:
                not_broken.append((injection.name, strength))
            else:
                cases.append(_case(injection, strength, seeds, doctor(Dump.open(broken))))
        if progress is not None:
            progress(1)
    return Trial(str(opened.path), tuple(cases), tuple(dict.fromkeys(not_broken)), repeats, seed)


def planned(
    injections: Iterable[str] | None = None, repeats: int = 1, strengths: int | None = None
) -> int:
    """Number of cases that a trial will try; parameters as `trial`."""
    return sum(1 for _ in _planned(injections, repeats, strengths))


def clopper_pearson(count: int, cases: int) -> Interval:
    """Exact 95 % interval of a binomial share.

    Parameters
    ----------
    count, cases : int
        Successes and trials.

    Returns
    -------
    tuple of float
        Both ends in [0, 1]; NaN where `cases` is 0.

    Notes
    -----
    Clopper and Pearson (1934): the shares p at which as many successes or more, or as few or
    fewer, have probability 2.5 %. It covers at 95 % or more, whatever the share.

    Examples
    --------
    None of ten: at p = 1 − 0.025^(1/10) ten failures have probability 2.5 %.

    >>> low, high = clopper_pearson(0, 10)
    >>> low, round(high, 4), round(1 - 0.025 ** 0.1, 4)
    (0.0, 0.3085, 0.3085)
    """
    if not cases:
        return math.nan, math.nan
    from scipy.special import betaincinv

    low = 0.0 if count == 0 else float(betaincinv(count, cases - count + 1, 0.025))
    high = 1.0 if count == cases else float(betaincinv(count + 1, cases - count, 0.975))
    return low, high


def _the_doctor() -> Doctor:
    """Deltad's own."""
    from .examination import examine

    return examine


def _planned(
    names: Iterable[str] | None, repeats: int, strengths: int | None
) -> Iterator[tuple[Injection, float]]:
    """Every injection and strength, as often as asked for."""
    every = [*INJECTIONS, *CONTROLS] if names is None else list(names)
    for injection in map(named_injection, every):
        known = injection.strengths
        many = min(len(known), strengths or len(known))
        # Evenly spread: the middle one, or the quarters of the list.
        for place in range(many):
            strength = known[(2 * place + 1) * len(known) // (2 * many)]
            for _ in range(repeats):
                yield injection, strength


def _some_seeds(dump: Dump, arm: str, rows: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Seeds at random until they hold so many rows."""
    chosen: list[int] = []
    held = 0
    for seed in rng.permutation(dump.seeds(arm)).tolist():
        if held >= rows:
            break
        chosen.append(int(seed))
        held += dump.rows(arm, int(seed))
    return tuple(sorted(chosen))


def _case(injection: Injection, strength: float, seeds: tuple[int, ...], answer: Answer) -> Case:
    """What was said of an injection."""
    first = answer.findings[0] if answer.findings else None
    return Case(
        injection=injection.name,
        strength=strength,
        cause=SOUND if injection.cause is None else injection.cause,
        accepted=injection.accepted or frozenset([NOTHING]),
        said=tuple(finding.cause for finding in answer.findings),
        confidence=math.nan if first is None else first.confidence,
        estimate=math.nan if first is None or first.estimate is None else first.estimate,
        truth=strength if injection.estimate else math.nan,
        seeds=seeds,
    )


def _share(cases: Iterable[Case]) -> Share:
    """How many of the cases are right."""
    every = list(cases)
    return Share(sum(case.right for case in every), len(every))


def _share_object(share: Share) -> dict[str, Any]:
    """A share as plain objects."""
    return {
        "count": share.count,
        "cases": share.cases,
        "share": share.share,
        "ci95": list(share.ci95),
    }
