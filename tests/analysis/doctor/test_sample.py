"""What a file may hold bounds neither the doctor's time nor its memory."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from deltad.analysis.doctor import Diagnosis, Finding, Sample, examine, read_sample
from deltad.analysis.doctor import evidence as evidence_module
from deltad.analysis.doctor import sample as sample_module
from deltad.analysis.doctor.evidence import Evidence
from deltad.cli import app
from deltad.dumps import METADATA_KEY, Dump, DumpError, Metadata, schema
from tests.analysis.doctor.made import made_sample
from tests.dumps.factory import make_dump

DUMPS = Path(__file__).parents[3] / "data_dumps"


def constant_dump(run: Path, *, top_k: int, rows: int) -> Path:
    """A dump of equal rows, a few bytes for each."""
    path = run / "arm=none" / "seed=0" / "part-0-0.parquet"
    path.parent.mkdir(parents=True)
    layout = schema(top_k)
    arrays = []
    for field in layout:
        if pa.types.is_fixed_size_list(field.type):
            listed = field.name == "topk_ids"
            value = np.tile(np.arange(top_k), rows) if listed else np.full(rows * top_k, -9.0)
            items = pa.array(value.astype(np.int32 if listed else np.float32))
            arrays.append(pa.FixedSizeListArray.from_arrays(items, type=field.type))
        else:
            arrays.append(pa.array(np.zeros(rows)).cast(field.type))
    metadata = Metadata(top_k=top_k, vocab_size=2 * top_k, rows_seen=rows)
    table = pa.Table.from_arrays(arrays, schema=layout)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: metadata.to_json()}), path)
    return run


def test_a_footer_that_promises_too_many_rows_is_refused_at_once() -> None:
    dump = Dump.open(DUMPS / "tiny-whole")
    parts = tuple(dataclasses.replace(part, rows=2**44) for part in dump.parts)
    begun = time.monotonic()
    with pytest.raises(DumpError, match=f"the footer promises {2**44} rows"):
        read_sample(Dump(dump.path, parts))
    assert time.monotonic() - begun < 20


def test_as_many_rows_are_read_as_lists_leave_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = constant_dump(tmp_path / "run", top_k=1_000, rows=300)
    monkeypatch.setattr(sample_module, "ENTRIES", 50_000)
    sample = read_sample(run)
    assert 40 <= len(sample) <= 60
    assert len(np.unique(sample["topk_ids"])) == 1_000
    monkeypatch.setattr(sample_module, "ENTRIES", 999)
    with pytest.raises(DumpError, match=r"part-0-0.parquet, column `topk_ids`.* 999 ids"):
        read_sample(run)


def test_other_arms_are_matched_where_a_part_of_the_rows_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample_module, "ENTRIES", 20 * 1_000)
    sample = read_sample(DUMPS / "tiny-whole")
    assert len(sample) < 2_000
    assert {"none", "ratio"} <= set(sample.in_loss)


def test_long_lists_take_no_time_in_the_square_of_their_length(tmp_path: Path) -> None:
    run = constant_dump(tmp_path / "run", top_k=20_000, rows=40)
    begun = time.process_time()
    examine(run)
    assert time.process_time() - begun < 30


def test_long_responses_take_no_time_in_the_square_of_their_length() -> None:
    rows = 60_000
    zeros = np.zeros(rows, np.int32)
    columns: dict[str, Any] = dict.fromkeys(
        ("seed", "step", "group", "sequence", "token_id"), zeros
    )
    logs = np.full((rows, 1), -1.0, np.float32)
    columns |= {"position": np.arange(rows, dtype=np.int32), "topk_ids": zeros[:, None]}
    columns |= {f"topk_{side}_logprobs": logs for side in ("behavior", "pre", "post")}
    columns |= {f"{side}_logprob": logs[:, 0] for side in ("behavior", "pre", "post")}
    begun = time.process_time()
    assert Evidence(Sample(columns, Metadata(top_k=1, vocab_size=2))).twins == []
    assert time.process_time() - begun < 10


def test_the_text_of_tokens_is_not_read(tmp_path: Path) -> None:
    assert "token" not in read_sample(make_dump(tmp_path / "run")).columns


def test_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sample: Sample) -> None:
        raise MemoryError

    monkeypatch.setattr(evidence_module, "find_fills", fail)
    with pytest.raises(DumpError, match="600 rows of K = 12 cannot be examined: there is not"):
        examine(made_sample())


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipe_is_refused(tmp_path: Path, inside: bool) -> None:
    run = tmp_path / "run"
    pipe = run / "arm=none" / "seed=0" / "part-0-0.parquet" if inside else run
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    result = CliRunner().invoke(app, ["doctor", str(run)])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_metadata_of_any_kind_is_a_short_text_of_printable_characters() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    hostile = {"precision": "\x1b]0;x\x07" + "y" * 10**6, "top_p": deep, "support": deep}
    noisy = made_sample(
        update=1e-4, policy=lambda x: x + np.random.default_rng(0).normal(size=x.shape)
    )
    sample = noisy.with_metadata(behavior=hostile)
    answer = examine(sample)
    assert len(str(answer)) < 10_000
    found = Finding("precision", 0.9, 1, None, {"declared": "\x1b[2J\n\x9b"})
    text = str(Diagnosis((found,), 1, "looked at one token"))
    assert "\\x1b[2J \\x9b" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_arms_that_lost_rows_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(DUMPS / "tiny", run)
    assert examine(run).top != "lost-rows"
    (file,) = (run / "arm=ratio" / "seed=0").glob("part-*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.slice(0, len(table) // 2), file)
    assert examine(run).top == "lost-rows"
