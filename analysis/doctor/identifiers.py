"""The same ids mean other tokens on the two sides."""

from __future__ import annotations

import numpy as np

from .evidence import FEWEST, Evidence
from .findings import Finding
from .matching import PAIRS, looked_up, sides
from .values import ids_out_of_range


def wrong_ids(evidence: Evidence) -> Finding | None:
    """Some ids are always wrong, the others never: ids mean other tokens on one side."""
    moved = _moved_ids(evidence)
    if moved is not None:
        return moved
    usable = evidence.usable & (evidence.mu > np.log(0.02))
    if usable.sum() < FEWEST:
        return None
    rows, slots = np.nonzero(usable)
    ids = evidence.ids[rows, slots]
    gap = evidence.pi[rows, slots] - evidence.mu[rows, slots]
    broken = np.abs(gap) > 2.5
    # Once a prompt and id, so that siblings do not vote together.
    votes = np.unique(np.stack([ids, evidence.cluster[rows], broken], axis=1), axis=0)
    distinct, place = np.unique(votes[:, 0], return_inverse=True)
    count = np.bincount(place.reshape(-1))
    bad = np.bincount(place.reshape(-1), weights=votes[:, 2])
    several = count >= 3
    if several.sum() < 4:
        return None
    share = bad[several] / count[several]
    always, never = share > 0.8, share < 0.2
    overall = float(votes[:, 2].mean())
    split = float((always | never).mean())
    correlation = float(np.median(evidence.correlation)) if len(evidence.rows) else 1.0
    lost = float(np.median(evidence.mass_mu - evidence.mass_pi))
    if always.sum() < 2 or overall < 0.03:
        return None
    everything = always.mean() > 0.9 and lost > 0.4
    if not everything and (split < 0.75 or never.sum() < 1):
        return None
    return Finding(
        "vocabulary",
        0.9 if everything or split > 0.85 else 0.75,
        int(np.isin(evidence.ids, distinct[several][always]).any(axis=1).sum()),
        float(always.mean()),
        {
            "pattern": "ids mean other tokens on one side",
            "ids_judged": int(several.sum()),
            "ids_always_wrong": int(always.sum()),
            "ids_never_wrong": int(never.sum()),
            "examples": [int(each) for each in distinct[several][always][:5]],
            "median_correlation": correlation,
        },
    )


def _moved_ids(evidence: Evidence) -> Finding | None:
    """π at id j is μ at id j − o: one side's ids are o further."""
    rows = evidence.rows
    if len(rows) > PAIRS:
        rows = rows[np.linspace(0, len(rows) - 1, PAIRS).astype(np.int64)]
    best: tuple[float, int, int] | None = None
    for offset in (1, -1, 2, -2):
        theirs = looked_up(evidence, rows, evidence.ids[rows] - offset)
        taken, _ = sides(evidence, rows, theirs)
        # A fault moves the ids of every row; drift mostly those of few, a tenth and less.
        enough = len(taken) >= 10 and taken.sum() >= 0.15 * len(rows)
        if enough and (best is None or taken.mean() > best[0]):
            best = (float(taken.mean()), offset, len(taken))
    # On ids that are numbers, drift itself goes by an id or two.
    if best is None or best[0] < (0.8 if abs(best[1]) == 1 else 0.92):
        return None
    share, offset, judged = best
    return Finding(
        "vocabulary", 0.9, judged, float(offset),
        {"pattern": "ids are moved by a constant on one side", "offset": offset,
         "rows_nearer_to_moved_ids": share, "rows_judged": judged},
    )  # fmt: skip


def vocabulary(evidence: Evidence) -> Finding | None:
    """Ids out of range, ids that mean other tokens, or mass beyond the vocabulary."""
    return ids_out_of_range(evidence) or wrong_ids(evidence)
