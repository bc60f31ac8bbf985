"""Run cases on every rank: `torchrun … -m tests.probes.sharded.worker OUT CASE …`."""

from __future__ import annotations

import datetime
import importlib
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import distributed


def main(out: Path, names: list[str]) -> None:
    warnings.simplefilter("error")
    # A head with a bias gives one, and nothing here works in place.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = distributed.get_rank()
    for name in names:
        module, _, case = name.partition(".")
        target = out / f"{name}.{rank}.txt"
        try:
            found = importlib.import_module(f"tests.probes.sharded.{module}")
            getattr(found, case)(out / name)
        except BaseException:
            target.write_text(traceback.format_exc(), encoding="utf-8")
            raise
        target.write_text("", encoding="utf-8")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
