"""Rows to record in tests, made from a seed alone, and a loop that records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltad.dumps import BackgroundWriter, DumpWriter, Metadata, is_recorded

ARMS: Final = ("none", "other")
BATCHES: Final = 9
ROWS: Final = 60
CREATED: Final = "2026-01-01T00:00:00+00:00"
"""A fixed time of creation, so that files can be compared byte for byte."""

OPTIONS: Final[dict[str, Any]] = {"rows_per_group": 120, "rows_per_part": 240}
"""Three files an arm, the last of 60 rows."""


def metadata(arm: str) -> Metadata:
    """Metadata of an arm."""
    return Metadata(
        top_k=4, vocab_size=24, update={"mask": "none" if arm == "none" else ""}, created=CREATED
    )


def batches(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Micro-batches of valid rows; the policy is the behavior, moved a little."""
    rng = np.random.default_rng(seed)
    for step in range(BATCHES):
        logits = rng.normal(size=(3, ROWS, 24))
        logits = logits[:1] + 0.3 * logits
        log = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        ids = np.argsort(-log[0], axis=-1)[:, :4].astype(np.int32)
        token = np.array([rng.integers(24) for _ in range(ROWS)], dtype=np.int32)
        at = np.arange(ROWS)
        advantage = np.repeat(rng.normal(size=ROWS // 20), 20)
        rows = {
            "step": np.full(ROWS, step, dtype=np.int32),
            "sequence": (at // 20 + step * 5).astype(np.int32),
            "position": (at % 20).astype(np.int32),
            "group": (step * 5 + at // 20).astype(np.int32),
            "token_id": token,
            "advantage": advantage.astype(np.float32),
            "in_loss": np.ones(ROWS, dtype=np.bool_),
            "topk_ids": ids,
        }
        for name, each in zip(("behavior", "pre", "post"), log, strict=True):
            rows[f"{name}_logprob"] = each[at, token].astype(np.float32)
            rows[f"topk_{name}_logprobs"] = np.take_along_axis(each, ids, 1).astype(np.float32)
        yield rows


def record(
    run: Path,
    seed: int,
    *,
    background: bool = True,
    tell: Callable[[str], None] = lambda event: None,
    **options: Any,
) -> None:
    """Record all arms of a seed; `tell` hears what is done next."""
    kind = BackgroundWriter if background else DumpWriter
    given = {"existing": "replace", **OPTIONS, **options}
    for arm in ARMS:
        tell(f"opens {arm}")
        writer = kind(run, arm=arm, seed=seed, metadata=metadata(arm), **given)
        tell(f"opened {arm}")
        for rows in batches(seed):
            writer.append(rows)
        tell(f"closes {arm}")
        writer.close()
        tell(f"closed {arm}")


def resume(run: Path, seeds: int) -> None:
    """Record the seeds of which an arm is not there or not finished, from their beginning."""
    for seed in range(seeds):
        for arm in ARMS:
            if not is_recorded(run, arm=arm, seed=seed):
                record(run, seed)
                break


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a dump, byte for byte, by its path in RUN."""
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.glob("arm=*/**/*.parquet")
    }
