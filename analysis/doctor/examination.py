"""The examination: a sample, its evidence, what every cause finds in it, what explains what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from deltad.dumps import READINGS, Dump

from .causes import CAUSES
from .evidence import FEWEST, Evidence
from .findings import Diagnosis, Finding, Looked
from .sample import LIMIT, Sample, read_sample

MUCH_SURER: Final = 0.15
"""Confidence by which a later cause must exceed an earlier one to explain it away."""


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
    sample = (
        run
        if isinstance(run, Sample)
        else read_sample(run, arm=arm, seeds=seeds, limit=limit, progress=progress)
    )
    evidence = Evidence(sample)
    with np.errstate(all="ignore"):  # the values may be anything
        findings = [found for cause in CAUSES.values() if (found := cause.detect(evidence))]
    return Diagnosis(explained_away(findings), _looked(evidence))


def explained_away(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Drop what another cause explains, and put the likeliest first.

    Parameters
    ----------
    findings : iterable of Finding
        In the order of `CAUSES`.

    Returns
    -------
    tuple of Finding
        With the causes' advice.
    """
    found = [dataclasses.replace(each, advice=CAUSES[each.cause].advice) for each in findings]
    kept = [each for each in found if not any(_outweighs(other, each) for other in found)]
    return tuple(sorted(kept or found[:1], key=lambda each: -each.confidence))


def _outweighs(one: Finding, other: Finding) -> bool:
    """Whether a finding explains another away.

    Where each could explain the other, the order of `CAUSES` settles it, unless the later one is
    much surer.
    """
    if one is other or other.cause not in CAUSES[one.cause].explains:
        return False
    order = list(CAUSES)
    if order.index(one.cause) < order.index(other.cause):
        mutual = one.cause in CAUSES[other.cause].explains
        return not mutual or other.confidence <= one.confidence + MUCH_SURER
    return one.confidence > other.confidence + MUCH_SURER


def _looked(evidence: Evidence) -> Looked:
    """What was looked at, and what these rows cannot show."""
    sample = evidence.sample
    return Looked(
        sample.run,
        sample.arm,
        len(sample),
        sample.stored,
        sample.seen,
        len(np.unique(sample["seed"])),
        len(np.unique(sample["step"])),
        tuple(_not_judged(evidence)),
    )


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
    if sample.thinned:
        divergence, threshold = sample.metadata.stored_above or ("", 0.0)
        yield (
            f"tokens with {divergence.upper()} ≤ {threshold:g}, which are not stored; what is "
            "stored was chosen for its distance, so that small noise does not show"
        )
    pairs = sum(len(evidence.neighbours(d)[0]) for d in (1, 2))
    if pairs < 20:
        yield f"shift: {pairs} pairs of neighboring tokens are stored"
    if sample.metadata.stored_above is None and len(evidence.twins) < 5:
        yield "precision by twins: fewer than 5 prefixes were sampled twice"
    if not sample.metadata.behavior.get("precision"):
        yield "precision against what was declared: the metadata has no `behavior.precision`"
