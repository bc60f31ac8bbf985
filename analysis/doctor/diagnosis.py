"""The examination: what every cause finds in a sample, what explains what, and the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltad._checks import printable
from deltad.analysis.result import Column, Result, counted
from deltad.dumps import READINGS, Dump, DumpError

from . import alignment, distance, findings, sampling, values
from .evidence import FEWEST, LEAST_SLOTS, Evidence
from .findings import Cause, Finding
from .sample import LIMIT, Sample, read_sample

FAMILIES: Final = (values, distance, alignment, sampling)
"""The modules that enter their causes into the registry."""

CAUSES: Final[Mapping[str, Cause]] = dict(
    sorted(findings.CAUSES.items(), key=lambda item: item[1].order)
)
"""Every cause by name, in the order in which they explain each other away."""

DECISIVE: Final = ("temperature", "truncation", "shift", "stale", "other-model")
"""Causes that must have been judged before a dump is called healthy."""

MUCH_SURER: Final = 0.15  # by so much must a later cause exceed an earlier to explain it away
FEWEST_PAIRS: Final = 20  # of neighboring tokens, below which a shift is not judged


@dataclass(frozen=True)
class Diagnosis(Result):
    """The doctor's answer about one dump.

    Attributes
    ----------
    findings : tuple of Finding
        Likeliest first; empty for a dump in which nothing wrong was found.
    tokens : int
        Tokens of the sample.
    looked : str
        What was looked at, in a sentence.
    not_judged : mapping of str to str
        Causes for which the sample does not hold enough, each with what is missing.
    open : tuple of str
        What else the sample leaves open.
    """

    findings: tuple[Finding, ...]
    tokens: int
    looked: str
    not_judged: Mapping[str, str] = field(default_factory=dict)
    open: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool | None:
        """False with findings; None without, where one of `DECISIVE` could not be judged."""
        if self.findings:
            return False
        return None if self.not_judged.keys() & DECISIVE else True

    @property
    def top(self) -> str | None:
        """The likeliest cause, None where nothing wrong was found."""
        return self.findings[0].cause if self.findings else None

    COLUMNS = (
        Column("cause", "its name", lambda found: found.cause, key=True),
        Column("confidence", "0 to 1", lambda found: found.confidence),
        Column("tokens", "tokens of the sample that show it", lambda found: found.tokens),
        Column("estimate", "its size in the cause's own unit", lambda found: found.estimate),
        Column("advice", "the remedy", lambda found: found.advice),
    )

    @property
    def rows(self) -> tuple[Finding, ...]:
        """The findings; their evidence is in the JSON."""
        return self.findings

    def parts(self) -> Iterator[str]:
        """Findings, evidence, remedies, and what was judged."""
        if self.findings:
            likeliest = ", likeliest first" if len(self.findings) > 1 else ""
            yield f"{counted(len(self.findings), 'finding')}{likeliest}"
        else:
            yield "nothing wrong found" + ("" if self.healthy else ", but not enough to tell")
            judged = (name for name in CAUSES if name not in self.not_judged)
            yield f"looked for: {', '.join(judged)}"
        for found in self.findings:
            yield ""
            yield from _told(found, self.tokens)
        yield ""
        yield self.looked
        for why in dict.fromkeys(self.not_judged.values()):
            names = (name for name, each in self.not_judged.items() if each == why)
            yield f"not judged: {', '.join(names)}: {why}"
        yield from (f"not judged: {each}" for each in self.open)

    def objects(self) -> dict[str, Any]:
        """`healthy`, `findings`, `not_judged`: the contract."""
        return {
            "healthy": self.healthy,
            "findings": [each.to_json_object() for each in self.findings],
            "not_judged": [{"cause": name, "why": why} for name, why in self.not_judged.items()],
        }


def examine(
    run: Dump | Sample | str | Path,
    *,
    arm: str | None = None,
    seeds: Iterable[int] | None = None,
    limit: int = LIMIT,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Look for what is wrong with a dump.

    Parameters
    ----------
    run : Dump, Sample, str or Path
        The dump, or rows of one that were read by `read_sample` and perhaps changed; the
        other parameters are for reading.
    arm, seeds, limit, progress
        As `read_sample`.

    Returns
    -------
    Diagnosis
        Findings, likeliest first.

    Raises
    ------
    FileNotFoundError, DumpError
        As `read_sample`.
    """
    if not isinstance(run, Sample):
        run = read_sample(run, arm=arm, seeds=seeds, limit=limit, progress=progress)
    try:
        with np.errstate(all="ignore"):  # the values may be anything
            evidence = Evidence(run)
            found = [
                dataclasses.replace(each, cause=name, advice=cause.advice)
                for name, cause in CAUSES.items()
                if (each := cause.detect(evidence))
            ]
            lacking, left_open = _lacking(evidence), tuple(_left_open(evidence))
    except MemoryError as error:
        size = f"{len(run)} rows of K = {run.metadata.top_k}"
        raise DumpError(
            run.run, f"{size} cannot be examined: there is not enough memory"
        ) from error
    named = {each.cause for each in found}
    not_judged = {
        name: lacking[cause.needs]
        for name, cause in CAUSES.items()
        if name not in named and cause.needs in lacking
    }
    thinned = f", thinned from {run.seen}" if run.seen > run.stored else ""
    spread = ", ".join(counted(len(np.unique(run[name])), name) for name in ("seed", "step"))
    looked = (
        f"looked at {len(run)} of {run.stored} stored tokens{thinned} of arm {run.arm}: {spread}"
    )
    return Diagnosis(explained_away(found), len(run), looked, not_judged, left_open)


def explained_away(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Drop what another cause explains, and put the likeliest first."""
    every = list(found)
    kept = [each for each in every if not any(_outweighs(other, each) for other in every)]
    return tuple(sorted(kept or every[:1], key=lambda each: -each.confidence))


def _outweighs(one: Finding, other: Finding) -> bool:
    """Whether a finding explains another away.

    Where each could explain the other, the causes' order settles it, unless the later one is
    much surer.
    """
    mine, theirs = CAUSES[one.cause], CAUSES[other.cause]
    if one is other or other.cause not in mine.explains:
        return False
    if mine.order < theirs.order:
        mutual = one.cause in theirs.explains
        return not mutual or other.confidence <= one.confidence + MUCH_SURER
    return one.confidence > other.confidence + MUCH_SURER


def _lacking(evidence: Evidence) -> dict[str, str]:
    """What causes may need and the sample does not have, each with the reason."""
    sample, both = evidence.sample, "with log-probs of both policies"
    pairs = sum(len(evidence.neighbours(d)[0]) for d in (1, 2))
    lacking = {
        need: f"{least} {what} are needed, there are {count}"
        for need, count, least, what in (
            ("rows", len(sample), FEWEST, "tokens"),
            ("tokens", evidence.usable_token.sum(), FEWEST, f"tokens {both}"),
            ("lists", len(evidence.rows), FEWEST, f"lists of {LEAST_SLOTS} ids or more {both}"),
            ("neighbors", pairs, FEWEST_PAIRS, "pairs of neighboring tokens"),
        )
        if count < least
    }
    if "lists" in lacking:
        lacking["neighbors"] = lacking["lists"]
    if sample.unread.issuperset(READINGS["pre"]):
        unread = "the policy before the update was not read"
        lacking |= dict.fromkeys(("tokens", "lists", "neighbors"), unread)
    if sample.unlike is None:
        lacking["arms"] = "there are no two finished arms to compare"
    return lacking


def _left_open(evidence: Evidence) -> Iterator[str]:
    """What else these rows leave open, a sentence each."""
    sample = evidence.sample
    if sample.unread.issuperset(READINGS["post"]):
        yield "whatever needs the policy after the update: it was not read"
    lists = int(evidence.has_list.sum())
    if lists < len(sample):
        yield f"{len(sample) - lists} tokens without lists: of these the scalars alone were seen"
    if sample.metadata.stored_above is not None:
        divergence, threshold = sample.metadata.stored_above
        yield (
            f"tokens with {divergence.upper()} ≤ {threshold:g}, which are not stored; what is "
            "stored was chosen for its distance, so that small noise does not show"
        )
    elif len(evidence.twins) < 5:
        yield "precision by twins: fewer than 5 prefixes were sampled twice"
    if not sample.metadata.behavior.get("precision"):
        yield "precision against what was declared: the metadata has no `behavior.precision`"


def _told(found: Finding, tokens: int) -> Iterator[str]:
    """One finding: its head, its evidence line by line, its remedy."""
    cause = CAUSES[found.cause]
    size = "" if found.estimate is None else f" · {cause.size} {_value(found.estimate)}"
    share = f"{found.tokens} of {tokens} tokens"
    yield f"{found.cause} · confidence {found.confidence:.2f} · {share}{size}"
    yield (cause.detect.__doc__ or "").partition("\n")[0]
    evidence = [(name.replace("_", " "), value) for name, value in _flat(found.evidence)]
    room = max((len(name) for name, _ in evidence), default=0)
    yield from (f"  {name:{room}}  {value}" for name, value in evidence)
    yield f"remedy: {found.advice}"


def _flat(evidence: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Evidence as names and words, inner mappings on lines of their own."""
    for name, value in evidence.items():
        if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
            yield from _flat(value, f"{prefix}{name}: ")
        else:
            yield prefix + name, _value(value)


def _value(value: Any) -> str:
    """A number to three digits, or a text whose control characters are escaped."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}".replace("-", "−")
    return printable(str(value))
