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

from . import alignment, distance, findings, precision, sampling, training, values
from .evidence import FEWEST, Evidence
from .findings import Cause, Finding
from .sample import LIMIT, Sample, read_sample

FAMILIES: Final = (values, distance, alignment, sampling, precision, training)
"""The modules that enter their causes into the registry."""

CAUSES: Final[Mapping[str, Cause]] = dict(
    sorted(findings.CAUSES.items(), key=lambda item: item[1].order)
)
"""Every cause by name, in the order in which they explain each other away."""

MUCH_SURER: Final = 0.15
"""Confidence by which a later cause must exceed an earlier one to explain it away."""


@dataclass(frozen=True)
class Looked:
    """What was looked at: rows of one arm, the causes that these can show, and what they cannot."""

    run: str
    arm: str
    tokens: int
    stored: int
    seen: int
    seeds: int
    steps: int
    judged: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis(Result):
    """The doctor's answer about one dump.

    Attributes
    ----------
    findings : tuple of Finding
        Likeliest first; empty for a dump in which nothing wrong was found.
    looked : Looked
        What the answer rests on.
    """

    findings: tuple[Finding, ...]
    looked: Looked = field(repr=False)

    @property
    def healthy(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

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
        looked = self.looked
        if self.healthy:
            yield "nothing wrong found"
            yield f"looked for: {', '.join(looked.judged)}"
        else:
            likeliest = ", likeliest first" if len(self.findings) > 1 else ""
            yield f"{counted(len(self.findings), 'finding')}{likeliest}"
        for found in self.findings:
            yield ""
            yield from _told(found, looked.tokens)
        thinned = f", thinned from {looked.seen}" if looked.seen > looked.stored else ""
        yield ""
        yield (
            f"looked at {looked.tokens} of {looked.stored} stored tokens{thinned} of arm "
            f"{looked.arm}: {counted(looked.seeds, 'seed')}, {counted(looked.steps, 'step')}"
        )
        yield from (f"not judged: {each}" for each in looked.without)

    def objects(self) -> dict[str, Any]:
        """`healthy` and `findings`: the contract."""
        findings = [each.to_json_object() for each in self.findings]
        return {"healthy": self.healthy, "findings": findings}


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
            found = [each for cause in CAUSES.values() if (each := cause.detect(evidence))]
            needs = {
                need: _has(evidence, need) for need in ("", "arms", "tokens", "lists", "neighbors")
            }
    except MemoryError as error:
        size = f"{len(run)} rows of K = {run.metadata.top_k}"
        raise DumpError(
            run.run, f"{size} cannot be examined: there is not enough memory"
        ) from error
    named = {each.cause for each in found}
    judged = (each for each in CAUSES if each in named or needs[CAUSES[each].needs])
    looked = Looked(
        run.run, run.arm, len(run), run.stored, run.seen,
        len(np.unique(run["seed"])), len(np.unique(run["step"])),
        tuple(judged), tuple(_not_judged(evidence)),
    )  # fmt: skip
    return Diagnosis(explained_away(found), looked)


def explained_away(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Drop what another cause explains, add the advice, and put the likeliest first."""
    every = [dataclasses.replace(each, advice=CAUSES[each.cause].advice) for each in found]
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


def _has(evidence: Evidence, need: str) -> bool:
    """Whether the sample holds enough of what a cause needs."""
    if need == "arms":
        return evidence.sample.unlike is not None
    if need == "neighbors" and evidence.pairs < 20:
        return False
    if need in ("lists", "neighbors"):
        return len(evidence.rows) >= FEWEST
    return not need or int(evidence.usable_token.sum()) >= FEWEST


def _not_judged(evidence: Evidence) -> Iterator[str]:
    """Questions that these rows leave open, a sentence each."""
    sample = evidence.sample
    if len(sample) < FEWEST:
        yield (
            f"too few tokens to tell: {len(sample)}, and what concerns distributions needs "
            f"{FEWEST}; single values were looked at"
        )
        return
    for reading, names in READINGS.items():
        if sample.unread.issuperset(names):
            when = {"pre": "before", "post": "after"}[reading]
            yield f"whatever needs the policy {when} the update: this arm has no {reading} columns"
    lists = int(evidence.has_list.sum())
    if lists < len(sample):
        yield f"{len(sample) - lists} tokens without lists: of these the scalars alone were seen"
    if len(evidence.rows) < FEWEST:
        yield (
            f"temperature, other-model and stale: {len(evidence.rows)} lists have 5 ids or more "
            f"with log-probs of both policies, {FEWEST} are needed"
        )
    if sample.metadata.stored_above is not None:
        divergence, threshold = sample.metadata.stored_above
        yield (
            f"tokens with {divergence.upper()} ≤ {threshold:g}, which are not stored; what is "
            "stored was chosen for its distance, so that small noise does not show"
        )
    if evidence.pairs < 20:
        yield f"shift: {evidence.pairs} pairs of neighboring tokens are stored"
    if sample.metadata.stored_above is None and len(evidence.twins) < 5:
        yield "precision by twins: fewer than 5 prefixes were sampled twice"
    if not sample.metadata.behavior.get("precision"):
        yield "precision against what was declared: the metadata has no `behavior.precision`"


def _told(found: Finding, tokens: int) -> Iterator[str]:
    """One finding: its head, its evidence line by line, its remedy."""
    cause = CAUSES[found.cause]
    size = "" if found.estimate is None else f" · {cause.size} {_value(found.estimate)}"
    share = f"{found.tokens} of {tokens} tokens"
    yield f"{found.cause} · confidence {found.confidence:.2f} · {share}{size}"
    yield cause.meaning
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
