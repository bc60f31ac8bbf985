from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltad.dumps import Dump
from tests.probes.trl import laws, trainers

ROOT = Path(__file__).parents[3]


def holds_on_two_ranks(folder: Path, *launcher: str) -> None:
    """Train under DDP in two processes, and hold what they wrote against the laws."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [*launcher, str(Path(__file__).with_name("two_ranks.py")), str(folder)]
    done = subprocess.run(
        [sys.executable, *script], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(2)]
    for each in ranks:
        assert each["ranks"] == 2
        assert each["wrapper"] == "DistributedDataParallel"
        assert each["same_logs"]
        assert each["same_weights"]

    laws.the_dump_is_in_order(folder / "run")
    assert Dump.open(folder / "run").metadata("actual").ranks == 2
    rows = trainers.rows(folder / "run")
    taken = rows[rows.step == 0]
    tokens = [sum(each["completions"]["0"]) for each in ranks]
    assert len(taken) == sum(tokens)
    assert min(tokens) > 0
    assert (taken.pre_logprob == taken.behavior_logprob).all()
    stale = rows[rows.step == 1].set_index(laws.KEY).sort_index()
    first = taken.set_index(laws.KEY).sort_index()
    assert first.index.is_unique
    assert first.index.equals(stale.index)
    assert (first.post_logprob == stale.pre_logprob).all()
    assert (stale.pre_logprob != stale.behavior_logprob).any()
    sizes = rows.groupby("group").sequence.nunique()
    assert (sizes == 4).all()

    # What is logged is over both ranks, on each.
    for entry, other in zip(*(each["logs"] for each in ranks), strict=True):
        assert entry.get("deltad/d_post_mean") == other.get("deltad/d_post_mean")
    logged = [entry["deltad/outside_rate"] for entry in ranks[0]["logs"] if "loss" in entry]
    shares = [(laws.divergence(rows[rows.step == step]) > 0.15).mean() for step in range(2)]
    np.testing.assert_allclose(logged, shares)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    holds_on_two_ranks(tmp_path)


@pytest.mark.slow
def test_two_ranks_by_torchrun(tmp_path: Path) -> None:
    holds_on_two_ranks(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2")
