"""pandas on the dump as it is: lists exploded into rows and summed by token, seed by seed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .common import FLOOR, THRESHOLD, folder, show


def count(path: Path) -> list[int]:
    """Count one seed."""
    lists = ["topk_ids", *(f"topk_{name}_logprobs" for name in ("behavior", "pre", "post"))]
    scalars = ["token_id", "advantage", "behavior_logprob", "pre_logprob", "post_logprob"]
    frame = pd.read_parquet(path, columns=[*scalars, *lists])
    b, p, q = (
        np.minimum(frame[f"{name}_logprob"].astype("float64"), 0)
        for name in ("behavior", "pre", "post")
    )
    long = frame[["token_id", *lists]].explode(lists)
    m, o, a = (np.minimum(long[name].astype("float64"), 0) for name in lists[1:])
    mu, pi = np.exp(m), np.exp(o)
    terms = pd.DataFrame(
        {
            "hit": long["topk_ids"] == long["token_id"], "sm": mu, "sp": pi, "sq": np.exp(a),
            "k0": mu * (m - o), "k1": mu * (m - a), "g": pi * (mu - pi),
        }
    )  # fmt: skip
    sums = terms.groupby(level=0).sum()
    alone = 1.0 - sums["hit"]
    mt, pt, qt = (
        (1 - sums[name] - alone * np.exp(logprob)).clip(lower=0)
        for name, logprob in (("sm", b), ("sp", p), ("sq", q))
    )

    def divergence(name: str, other: Any, tail: Any) -> Any:
        part = np.log(mt.where(mt > 0, 1.0)) - np.log(tail.clip(lower=FLOOR))
        return sums[name] + alone * np.exp(b) * (b - other) + (mt * part).where(mt > 0, 0.0)

    d0, d1 = divergence("k0", p, pt), divergence("k1", q, qt)
    outside = d0 > THRESHOLD
    d_dot = np.exp(p) - np.exp(b) + sums["g"] + pt * (mt - pt)
    d_dot += alone * np.exp(p) * (np.exp(b) - np.exp(p))
    out_p = (frame["advantage"] * d_dot > 0)[outside]
    out_r = (frame["advantage"] * (p - b) > 0)[outside]
    up, down = (d1 > d0)[outside], (d1 < d0)[outside]
    found = [int(outside.sum()), int(up.sum()), int((out_p != out_r).sum())]
    for kept in (~out_p & out_r, ~out_r & out_p):
        found += [int(kept.sum()), int((kept & up).sum()), int((kept & down).sum())]
    return found


def main() -> None:
    """Count the seeds named."""
    show(
        [seed, *count(Path(folder()) / "arm=none" / f"seed={seed}" / "part-0-0.parquet")]
        for seed in sys.argv[2:]
    )


if __name__ == "__main__":
    main()
