"""Prompts lie beside the rows, and no dataset reader sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.dumps import Dump, DumpError, Prompt, check_dump, read_prompts, write_prompts

from .factory import make_dump

ROWS: list[dict[str, Any]] = [
    {"group": 100, "prompt": "1 + 2 =", "prompt_ids": [5, 6, 7], "answer": "3"},
    {"group": 101, "prompt": "ΔD?\n", "prompt_ids": [], "answer": None},
]


def test_prompts_are_read_back(tmp_path: Path) -> None:
    path = write_prompts(tmp_path, seed=-2, rows=ROWS)
    assert path == tmp_path / "_prompts" / "seed=-2" / "part-0-0.parquet"
    write_prompts(tmp_path, seed=-2, rows=ROWS[:1], rank=1)
    expected = [Prompt(**row) for row in [*ROWS, ROWS[0]]]
    assert read_prompts(tmp_path, seed=-2) == expected
    assert read_prompts(tmp_path, seed=0) == []
    assert os.listdir(tmp_path) == ["_prompts"]


def test_no_prompts_are_prompts(tmp_path: Path) -> None:
    write_prompts(tmp_path, seed=0, rows=[])
    assert read_prompts(tmp_path, seed=0) == []


def test_writing_again_replaces(tmp_path: Path) -> None:
    write_prompts(tmp_path, seed=0, rows=ROWS)
    write_prompts(tmp_path, seed=0, rows=ROWS[1:])
    assert read_prompts(tmp_path, seed=0) == [Prompt(**ROWS[1])]


def test_prompts_do_not_show_among_the_rows(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0])
    before = len(pd.read_parquet(run))
    write_prompts(run, seed=0, rows=ROWS)
    assert len(pd.read_parquet(run)) == before
    assert Dump.open(run).arms == ("none",)
    assert check_dump(run) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"group": None}, "column `group`: must not be None"),
        ({"prompt": None}, "column `prompt`: must not be None"),
        ({"prompt": 3}, "prompts cannot be written"),
        ({"group": 2**31}, "prompts cannot be written"),
        ({"prompt_ids": "abc"}, "prompts cannot be written"),
    ],
)
def test_wrong_prompts_are_refused_and_leave_nothing(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DumpError, match=f"part-0-0.parquet.*{expected}"):
        write_prompts(tmp_path, seed=0, rows=[ROWS[0] | change])
    with pytest.raises(DumpError, match="a row of prompts lacks 'answer'"):
        write_prompts(tmp_path, seed=0, rows=[{n: v for n, v in ROWS[0].items() if n != "answer"}])
    assert os.listdir(tmp_path) == []


def test_damaged_prompts_are_found_by_the_check(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0])
    folder = run / "_prompts"
    good = write_prompts(run, seed=0, rows=ROWS)
    (folder / "seed=0" / "part-1-0.parquet").write_bytes(good.read_bytes()[:200])
    (folder / "seed=0" / "notes").write_text("")
    (folder / "seed=01").mkdir()
    pq.write_table(
        pa.table({"group": pa.array([1], pa.int32())}), folder / "seed=0/part-2-0.parquet"
    )
    table = pq.read_table(good, partitioning=None)
    wide = table.set_column(0, "group", table["group"].cast(pa.int64()))
    pq.write_table(wide, folder / "seed=0/part-3-0.parquet")
    hollow = table.set_column(1, "prompt", pa.array(["a", None]))
    pq.write_table(hollow, folder / "seed=0/part-4-0.parquet")
    found = [str(problem).replace(f"{folder}/", "") for problem in check_dump(run, strict=False)]
    assert [line.split(" (")[0] for line in found] == [
        "seed=0/notes: only files `part-<rank>-<n>.parquet` may lie here",
        "seed=0/part-1-0.parquet: cannot be read as Parquet",
        "seed=0/part-2-0.parquet, column `prompt`: is missing",
        "seed=0/part-3-0.parquet, column `group`: must be int32, found int64",
        "seed=0/part-4-0.parquet, row 1, column `prompt`: must not be NULL",
        "seed=01: only folders `seed=<int32>` may lie here",
    ]
    with pytest.raises(DumpError, match="cannot be read"):
        read_prompts(run, seed=0)
