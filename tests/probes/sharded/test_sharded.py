"""The cases of this folder, each on every rank of a torchrun; many share one launch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ALWAYS = ("data_parallel.accumulation",)
QUICK = (
    "data_parallel.a_part_each",
    "fsdp2.tied_head",
    "fsdp2.accumulation",
    "fsdp2.no_tokens_on_one_rank",
    "fsdp2.arms_from_one_state",
    "fsdp2.nothing_stays_gathered",
    "fsdp2.forwards_stay_whole",
    "tensor_parallel.readout_of_shards",
    "tensor_parallel.uneven",
    "tensor_parallel.megatron",
    "tensor_parallel.one_part_for_all",
    "context_parallel.slices",
    "context_parallel.places_are_needed",
    "mesh.tensor_parallel_within_fsdp",
    "mesh.hybrid_sharding",
    "traps.a_forward_within_the_step",
    "traps.gradients_do_not_leak",
    "traps.the_next_forward_has_the_new_weights",
    "traps.fsdp1_is_refused",
    "traps.the_ladder_is_refused",
)
SLOW = (
    "tensor_parallel.every_layout",
    "fsdp2.mixed_precision",
    "fsdp2.gathered_through_backward",
    "fsdp2.by_layers",
    "data_parallel.static_graph",
    "data_parallel.no_tokens_on_one_rank",
    "fsdp2.resharded_everywhere",
    "fsdp2.of_transformers",
    "fsdp2.checkpointing_and_dropout",
    "tensor_parallel.body_alone",
    "tensor_parallel.of_transformers",
)
FOUR = ("mesh.tensor_parallel_within_fsdp", "mesh.hybrid_sharding")


def launch(folder: Path, ranks: int, names: tuple[str, ...]) -> Path:
    """Run cases on so many ranks, once for all tests and processes of this run of pytest."""
    out, done = folder / str(ranks), folder / f"{ranks}.{names[0]}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{ranks}.{names[0]}").mkdir()
    except FileExistsError:  # another process is at it
        for _ in range(6000):
            if done.exists():
                break
            time.sleep(0.1)
        return out
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", "-m", "tests.probes.sharded.worker", out, *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    done.write_text(result.stdout + result.stderr, encoding="utf-8")
    return out


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the processes of one run of pytest."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "sharded"


def check(folder: Path, ranks: int, names: tuple[str, ...], name: str) -> None:
    out = launch(folder, ranks, names)
    for rank in range(ranks):
        said = out / f"{name}.{rank}.txt"
        assert said.exists(), f"{name} was not reached on rank {rank}"
        assert said.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(
    ("names", "name"),
    [
        *((ALWAYS, name) for name in ALWAYS),
        *(pytest.param(QUICK, name, marks=pytest.mark.process) for name in QUICK),
    ],
)
def test_two_ranks(folder: Path, names: tuple[str, ...], name: str) -> None:
    check(folder, 2, names, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_ranks_slow(folder: Path, name: str) -> None:
    check(folder, 2, SLOW, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(folder: Path, name: str) -> None:
    check(folder, 4, FOUR, name)
