"""What the programs have in common: the question, its formulas in SQL, and their output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

THRESHOLD: Final = 0.15
FLOOR: Final = 1e-12
COUNTS: Final = (
    "outside",
    "increase",
    "disagreement",
    "predictive_kept",
    "predictive_unsafe",
    "predictive_contracting",
    "ratio_kept",
    "ratio_unsafe",
    "ratio_contracting",
)
"""Of a seed: tokens outside, those of them with ΔD > 0, those that one of the two masks, and of
what each keeps of the latter all, those with ΔD > 0 and those with ΔD < 0."""


def show(rows: Iterable[Sequence[Any]]) -> None:
    """Print a seed and its counts a row."""
    print(json.dumps({str(row[0]): [int(value) for value in row[1:]] for row in rows}))


def folder() -> str:
    """The folder that was named."""
    return sys.argv[1]


def clamped(name: str) -> str:
    """A log-prob in float64, at most 0."""
    return f"least({name}::DOUBLE, 0)"


def counts_sql(source: str) -> str:
    """Count by seed from `d0`, `d1`, Â times each direction."""
    return f"""
        SELECT seed, count(*), sum((d1 > d0)::INT), sum((out_p <> out_r)::INT),
          sum((NOT out_p AND out_r)::INT), sum((NOT out_p AND out_r AND d1 > d0)::INT),
          sum((NOT out_p AND out_r AND d1 < d0)::INT),
          sum((NOT out_r AND out_p)::INT), sum((NOT out_r AND out_p AND d1 > d0)::INT),
          sum((NOT out_r AND out_p AND d1 < d0)::INT)
        FROM ({source}) GROUP BY seed ORDER BY seed"""


def judged_sql(source: str) -> str:
    """D before and after and both directions, from sums over the list.

    `source` has the scalars b, p and q (clamped log-probs of the sampled token), `alone` (1 where
    it is not listed), Σ μ, Σ π and Σ π' of the list (sm, sp, sq), Σ μ (log μ − log π) before and
    after (k0, k1), and Σ π (μ − π) (g).
    """
    return f"""
        SELECT seed, k0 + {_tail("mt", "pt")} AS d0, k1 + {_tail("mt", "qt")} AS d1,
          advantage * (exp(p) - exp(b) + g + pt * (mt - pt)) > 0 AS out_p,
          advantage * (p - b) > 0 AS out_r
        FROM (
          SELECT seed, advantage, b, p,
            greatest(1 - sm - alone * exp(b), 0) AS mt,
            greatest(1 - sp - alone * exp(p), 0) AS pt,
            greatest(1 - sq - alone * exp(q), 0) AS qt,
            k0 + alone * exp(b) * (b - p) AS k0, k1 + alone * exp(b) * (b - q) AS k1,
            g + alone * exp(p) * (exp(b) - exp(p)) AS g
          FROM ({source}))
        WHERE d0 > {THRESHOLD}"""


def _tail(mu: str, pi: str) -> str:
    """The tail's term of the divergence."""
    return f"CASE WHEN {mu} > 0 THEN {mu} * ln({mu} / greatest({pi}, {FLOOR})) ELSE 0 END"
