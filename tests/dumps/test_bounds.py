"""What is read and opened has bounds, whatever a file says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.dumps import Dump, DumpError, DumpWriter, Metadata, check_dump, derive
from deltad.dumps.reader import BATCH_BYTES

from .factory import edit, edit_metadata, make_dump, read_metadata, write_table

SINGLE: dict[str, Any] = {"arms": ["none"], "seeds": [0], "ranks": 1, "parts": 1}
FIRST = "arm=none/seed=0/part-0-0.parquet"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_dump(tmp_path / "RUN", **SINGLE)


def wide(run: Path, rows: int, top_k: int) -> Path:
    """A valid dump of few rows and long lists."""
    ids = np.tile(np.arange(top_k, dtype=np.int32), (rows, 1))
    flat = np.full(ids.shape, -np.log(top_k + 1), dtype=np.float32)
    columns: dict[str, Any] = {
        "step": np.zeros(rows, dtype=np.int32),
        "group": np.zeros(rows, dtype=np.int32),
        "sequence": np.zeros(rows, dtype=np.int32),
        "position": np.arange(rows, dtype=np.int32),
        "token_id": np.zeros(rows, dtype=np.int32),
        "advantage": np.ones(rows, dtype=np.float32),
        "in_loss": np.ones(rows, dtype=np.bool_),
        "topk_ids": ids,
    }
    for time in ("behavior", "pre", "post"):
        columns[f"{time}_logprob"] = flat[:, 0]
        columns[f"topk_{time}_logprobs"] = flat
    metadata = Metadata(top_k=top_k, vocab_size=top_k + 1, update={"mask": "none"})
    with DumpWriter(run, arm="none", seed=0, metadata=metadata) as writer:
        writer.append(columns)
    return run


def test_long_lists_are_read_checked_and_derived_in_small_pieces(tmp_path: Path) -> None:
    dump = Dump.open(wide(tmp_path / "RUN", 120, 100_000))
    batches = list(dump.batches("none", 0))
    sizes = [sum(values.nbytes for values in batch.columns.values()) for batch in batches]
    assert len(batches) > 1
    assert max(sizes) <= BATCH_BYTES
    assert np.isfinite(derive(batches[0], dump.metadata("none"))["d_pre"]).all()
    assert check_dump(dump.path) == []


def test_a_row_larger_than_a_batch_is_read_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltad.dumps.reader.BATCH_BYTES", 1)
    assert {len(batch) for batch in Dump.open(run).batches("none", 0)} == {1}


def test_rows_that_a_footer_promises_must_be_there(tmp_path: Path) -> None:
    run = wide(tmp_path / "RUN", 70_001, 2)
    metadata = {**read_metadata(run / FIRST), "rows_seen": 2**40}
    rows = pq.ParquetFile(run / FIRST).read()
    write_table(run / FIRST, rows, metadata, row_group_size=len(rows))
    content = (run / FIRST).read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8].replace(varint(70_001), varint(2**40))
    tail = footer + len(footer).to_bytes(4, "little") + b"PAR1"
    (run / FIRST).write_bytes(content[: -8 - length] + tail)
    assert pq.read_metadata(run / FIRST).num_rows == 2**40
    with pytest.raises(DumpError, match=r"part-0-0\.parquet: .*(promises|cannot be read)"):
        list(Dump.open(run).batches("none", 0))
    assert check_dump(run, strict=False)


def varint(number: int) -> bytes:
    """A number as a footer holds it."""
    number, parts = 2 * number, []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def test_constant_rows_beyond_all_bounds_are_refused_without_being_held(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltad.dumps.agreement.BYTES_AT_ONCE", 10 * 128)
    edit(run / FIRST, lambda table: pa.concat_tables([table.slice(0, 1)] * 500))
    edit_metadata(run / FIRST, rows_seen=500)
    problems = check_dump(run, strict=False, batch_rows=10, limit=3)
    assert {problem.kind for problem in problems} == {"unique"}
    assert sum(problem.count for problem in problems) < 100  # the first that came


def test_a_response_that_fills_a_piece_alone_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltad.dumps.agreement.BYTES_AT_ONCE", 1)
    found = [problem.message for problem in check_dump(run, strict=False, batch_rows=10)]
    assert found == ["holds a response too long to be checked"]


def test_what_memory_does_not_hold_is_named_by_its_row_group(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltad.dumps.batch import from_arrow

    def short(*of: Any) -> Any:
        if of[3] >= 25:
            raise MemoryError
        return from_arrow(*of)

    monkeypatch.setattr("deltad.dumps.reader.from_arrow", short)
    with pytest.raises(DumpError, match=r"part-0-0\.parquet: row group 2 needs more memory"):
        list(Dump.open(run).batches("none", 0, batch_rows=5))


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize(
    "name",
    [
        FIRST,
        "arm=none/seed=0/part-0-1.parquet",
        "arm=none/seed=1",
        "arm=x",
        "_prompts",
        "_prompts/seed=0",
        "_prompts/seed=0/part-0-0.parquet",
        "_unfinished.arm=none.seed=0.rank=0",
        "_lock",
        "",
    ],
)
def test_a_pipe_is_never_waited_for(run: Path, name: str) -> None:
    pipe = run / name if name else run.with_name("PIPE")
    pipe.parent.mkdir(parents=True, exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    script = "import sys; from deltad.dumps import check_dump; check_dump(sys.argv[1])"
    command = [sys.executable, "-c", script, str(run if name else pipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if name not in ("_prompts", "_lock"):  # of which there is nothing to check
        assert "DumpError: " in done.stderr
