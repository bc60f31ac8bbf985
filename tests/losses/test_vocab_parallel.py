"""A vocabulary split over two processes against the whole of it in one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deltad.losses import policy_logprobs, vocab_parallel_logprobs

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def test_shards_give_the_values_and_gradients_of_the_whole() -> None:
    """Two processes over gloo: even, uneven and padded shards; the worker below compares."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--master-addr=localhost", f"--master-port={free_port()}"),
            str(Path(__file__).parent / "vocab_parallel_worker.py"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    for report in reports:
        assert report["cases"] == 5
        assert report["worst"] < 1e-12
        assert report["float32"] < 2e-6
        assert "77" in report["refused"]


@pytest.fixture
def alone() -> object:
    """A process group of this process."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{free_port()}", rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_is_the_unsharded_reading(alone: dist.ProcessGroup) -> None:
    logits = torch.randn(3, 11, dtype=torch.float64)
    ids = torch.tensor([0, 5, 10])
    found = vocab_parallel_logprobs(logits, ids, group=alone)
    assert torch.equal(found.logprob, policy_logprobs(logits, ids).logprob)
    with pytest.raises(ValueError, match="`start` needs `vocab_size`"):
        vocab_parallel_logprobs(logits, ids, group=alone, start=0)
