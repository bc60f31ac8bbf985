"""A vocabulary split over two processes against the whole of it in one."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deltad.losses import policy_logprobs, vocab_parallel_logprobs
from tests.losses.vocab_parallel_worker import CASES, compare

ROOT = Path(__file__).parents[2]


def check(reports: list[dict[str, object]]) -> None:
    assert sorted(str(report["rank"]) for report in reports) == ["0", "1"]
    for report in reports:
        assert report["cases"] == len(CASES)
        assert report["moved"] > 1e-3  # type: ignore[operator]
        assert report["worst"] < 1e-12  # type: ignore[operator]
        assert report["float32"] < 2e-6  # type: ignore[operator]
        assert "`vocab_size` is 77, but the shards hold 23" in str(report["refused"])


def forked(rank: int, store: Path) -> None:
    """One process of two: report into a file beside the store."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    store.with_suffix(f".{rank}").write_text(json.dumps(compare()))
    dist.destroy_process_group()


def test_shards_give_the_values_and_gradients_of_the_whole(tmp_path: Path) -> None:
    """Two processes over gloo, forked: even, uneven, padded and empty shards."""
    context = multiprocessing.get_context("fork")
    store = tmp_path / "store"
    ranks = [context.Process(target=forked, args=(rank, store), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0, 0]
    check([json.loads(store.with_suffix(f".{rank}").read_text()) for rank in range(2)])


@pytest.mark.slow
def test_so_they_do_under_torchrun() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "tests.losses.vocab_parallel_worker"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_is_the_unsharded_reading(alone: dist.ProcessGroup) -> None:
    logits = torch.randn(3, 11, dtype=torch.float64)
    ids = torch.tensor([0, 5, 10])
    found = vocab_parallel_logprobs(logits, ids, group=alone)
    assert torch.equal(found.logprob, policy_logprobs(logits, ids).logprob)
    with pytest.raises(ValueError, match="`start` needs `vocab_size`"):
        vocab_parallel_logprobs(logits, ids, group=alone, start=0)
