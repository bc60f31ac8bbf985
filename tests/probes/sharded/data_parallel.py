"""DistributedDataParallel over two ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import distributed, nn

from deltad.dumps import Dump, Metadata, check_dump
from deltad.probes import Recorder
from tests.probes.tiny import TOP_K, VOCAB

from .small import small
from .training import Trained, batches_of, compare, sgd, train


def wrapped(model: Any, **options: Any) -> Trained:
    outer: Any = nn.parallel.DistributedDataParallel(model, **options)
    return Trained(outer, sgd(outer), lambda last: nullcontext() if last else outer.no_sync())


def accumulation(out: Path) -> None:
    compare(wrapped, micro=2)


def static_graph(out: Path) -> None:
    compare(lambda model: wrapped(model, static_graph=True))


def no_tokens_on_one_rank(out: Path) -> None:
    compare(wrapped, empty=1, proved=distributed.get_rank() == 0)


def a_part_each(out: Path) -> None:
    rank = distributed.get_rank()
    model = small()
    mine = batches_of(model, rank, empty=1)
    with Recorder(out / "RUN", seed=0, metadata_for=described) as recorder:
        train(wrapped(model), mine, recorder)
    distributed.barrier()
    if rank:
        return
    run = out / "RUN"
    dump = Dump.open(run)
    assert [(part.rank, part.metadata.ranks) for part in dump.parts] == [(0, 2), (1, 2)]
    assert [part.rows > 0 for part in dump.parts] == [True, False]
    assert check_dump(run) == []
    dump.parts[1].path.unlink()
    problems = {each.message: each.path for each in check_dump(run, strict=False)}
    (message,) = [each for each in problems if "2 ranks write" in each]
    assert "there is none of rank 1" in message
    assert problems[message].endswith("part-1-0.parquet")


def described(arm: str) -> Metadata:
    return Metadata(top_k=TOP_K, vocab_size=VOCAB)
