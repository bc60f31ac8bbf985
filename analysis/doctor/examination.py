"""The examination: a sample, its evidence, what every cause finds in it, what explains what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from deltad.dumps import Dump

from .causes import detected
from .evidence import Evidence
from .findings import Diagnosis, Looked
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
    findings = tuple(detected(Evidence(sample)))
    looked = Looked(sample.run, sample.arm, len(sample), sample.stored, sample.seen, 0, 0)
    return Diagnosis(findings, looked)
