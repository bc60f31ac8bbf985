"""Cases of this folder's modules, on two ranks under torchrun; several share one launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

QUICK = (
    "data_parallel.accumulation",
    "data_parallel.a_part_each",
    "fsdp2.by_layers",
    "fsdp2.nothing_stays_gathered",
    "fsdp2.no_tokens_on_one_rank",
)
MORE = (
    "data_parallel.static_graph",
    "data_parallel.no_tokens_on_one_rank",
    "fsdp2.tied_head",
    "fsdp2.accumulation",
    "fsdp2.gathered_through_backward",
    "fsdp2.resharded_everywhere",
    "fsdp2.checkpointing_and_dropout",
    "fsdp2.of_transformers",
    "fsdp2.mixed_precision",
)


def launch(out: Path, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run cases on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "-m", "tests.probes.sharded.worker", str(out), *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
