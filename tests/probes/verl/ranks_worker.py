"""What each of two ranks does under torchrun: train with and without the plugin, and report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

# A distribution among verl's requirements installs a package `tests`, which hides this folder.
sys.modules["tests"] = tests = ModuleType("tests")
tests.__path__ = [str(Path(__file__).parents[2])]

from examples import verl_cpu
from tests.probes.verl.engine_case import expected_rows, recorded, same, train


def main(folder: Path) -> None:
    """Each rank has a rollout of its own; the weights are one model's."""
    verl_cpu.use_cpu()
    dist.init_process_group("gloo")
    rank, model, run = dist.get_rank(), str(folder / "model"), folder / "run"
    if rank == 0:
        verl_cpu.tiny_model(model)
    dist.barrier()
    batch = verl_cpu.rollout(model, seed=rank)
    report: dict[str, object] = {"rank": rank}
    for precision in ("fp32", "bf16"):
        options = {"batch": batch, "loss_mode": "predictive_tv", "lr": 1e-2, "precision": precision}
        bare = train(model, **options)
        recording = train(model, run.with_name(f"run-{precision}"), **options)
        report[f"same in {precision}"] = same(bare, recording)
        if precision == "fp32":
            probed = recording
    dist.barrier()
    rows = recorded(run.with_name("run-fp32"))
    mine = (rows["sequence"] % 2 == rank) & (rows["step"] == 1)
    expected = {
        when: expected_rows(model, probed.weights[at], batch, slice(8, None), 1.0)
        for when, at in (("pre", 1), ("post", 2))
    }
    report["errors"] = {
        when: [
            float(np.abs(rows[f"{when}_logprob"][mine] - found["logprob"]).max()),
            float(np.abs(rows[f"topk_{when}_logprobs"][mine] - found["topk"]).max()),
        ]
        for when, found in expected.items()
    }
    report["tokens"] = bool(np.array_equal(rows["token_id"][mine], expected["pre"]["token_id"]))
    report["moved"] = float(np.abs(rows["post_logprob"] - rows["pre_logprob"])[mine].max())
    report["sequences"] = sorted({int(each) for each in rows["sequence"]})
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
