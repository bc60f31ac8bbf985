"""The plugin on two ranks of verl's FSDP2 engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.dumps import Dump, check_dump
from tests.probes.verl.verl_here import imported

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]


def test_two_ranks_train_the_same_and_write_a_part_each(tmp_path: Path) -> None:
    imported("verl")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(Path(__file__).with_name("ranks_worker.py")), str(tmp_path)),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"report-{rank}.json").read_text())
        assert report["same in fp32"] is report["same in bf16"] is True
        assert report["tokens"] is True
        assert report["moved"] > 0.05
        for when in ("pre", "post"):
            assert max(report["errors"][when]) < 3e-5
        # Eight responses a rank and mini-batch, numbered without an overlap.
        assert report["sequences"] == list(range(16))
    for precision, hidden in (("fp32", "logits"), ("bf16", "hidden states")):
        run = tmp_path / f"run-{precision}"
        check_dump(run)
        metadata = Dump.open(run).metadata("actual")
        assert metadata.ranks == 2
        assert metadata.readout["from"] == hidden
        assert {part.path.name for part in Dump.open(run).files("actual")} == {
            f"part-{rank}-{number}.parquet" for rank in range(2) for number in range(2)
        }
