"""The examination: a sample, its evidence, what every cause finds in it, what explains what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from deltad.dumps import Dump

from .causes import CAUSES
from .evidence import Evidence
from .findings import Diagnosis, Finding, Looked
from .sample import LIMIT, Sample, read_sample


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
    return Diagnosis(explained_away(findings), _looked(sample))


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
    kept: list[Finding] = []
    for found in findings:
        by = [each for each in kept if found.cause in CAUSES[each.cause].explains]
        if not by:
            kept.append(dataclasses.replace(found, advice=CAUSES[found.cause].advice))
    return tuple(sorted(kept, key=lambda each: -each.confidence))


def _looked(sample: Sample) -> Looked:
    """What was looked at."""
    return Looked(
        sample.run,
        sample.arm,
        len(sample),
        sample.stored,
        sample.seen,
        len(np.unique(sample["seed"])),
        len(np.unique(sample["step"])),
    )
