"""Two ranks of one training, without and with the probe; run by `test_distributed`.

Under torchrun each process is a rank. Alone it imports TRL once and forks both, which is half the
work.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import trl  # noqa: F401 - before the fork

from tests.probes.trl import laws, trainers


def rank(folder: Path) -> None:
    """Train twice, and write down what this rank saw."""
    found = laws.pair(folder, num_iterations=2, max_steps=2)
    number = found.probed.accelerator.process_index
    first, second = trainers.weights(found.plain), trainers.weights(found.probed)
    whole: dict[str, Any] = {
        "ranks": found.probed.accelerator.num_processes,
        "wrapper": type(found.probed.model_wrapped).__name__,
        "same_logs": trainers.logs(found.plain) == trainers.logs(found.probed),
        "logs": found.probed.state.log_history,
        "same_weights": all(torch.equal(first[name], second[name]) for name in first),
        "completions": {
            step: [int(each["completion_mask"].sum()) for each in batches]
            for step, batches in found.witness.batches.items()
        },
    }
    (folder / f"rank-{number}.json").write_text(json.dumps(whole))
    torch.distributed.destroy_process_group()


def fork(folder: Path) -> int:
    """Be both ranks of torchrun; the exit status is the worse of theirs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            rank(folder)
            return 0
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if "RANK" in os.environ:
        rank(where)
    else:
        sys.exit(fork(where))
