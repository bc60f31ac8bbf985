"""Dumps that other tools have written anew answer as before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from deltad.cli import app
from deltad.dumps import METADATA_KEY, VECTORS, check_dump

DUMPS = Path(__file__).parents[2] / "data_dumps"


def with_duckdb(source: Path, target: Path, metadata: str) -> None:
    import duckdb

    text = metadata.replace("'", "''")
    duckdb.sql(
        f"COPY (SELECT * FROM read_parquet('{source}')) "
        f"TO '{target}' (FORMAT parquet, KV_METADATA {{deltad: '{text}'}})"
    )


def with_polars(source: Path, target: Path, metadata: str) -> None:
    polars = pytest.importorskip("polars")
    polars.read_parquet(source).write_parquet(target, metadata={METADATA_KEY.decode(): metadata})


def with_pandas(source: Path, target: Path, metadata: str) -> None:
    table = pa.Table.from_pandas(pd.read_parquet(source))
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: metadata}), target)


def with_widened_pandas(source: Path, target: Path, metadata: str) -> None:
    """As someone's loop makes it: lists of Python's numbers, all 64 bits wide."""
    frame: dict[str, Any] = {}
    for name, column in pd.read_parquet(source).items():
        frame[str(name)] = column.astype("float64") if column.dtype.kind == "f" else column
        if name in VECTORS:
            number: Callable[[Any], float] = int if name == "topk_ids" else float
            frame[str(name)] = [
                None if each is None else list(map(number, each)) for each in column
            ]
        elif column.dtype.kind == "i":
            frame[str(name)] = column.astype("int64")
    table = pa.Table.from_pandas(pd.DataFrame(frame))
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: metadata}), target)


@pytest.mark.parametrize("dump", ["tiny", "tiny-near", "smollm2"])
@pytest.mark.parametrize("write", [with_duckdb, with_polars, with_pandas, with_widened_pandas])
def test_a_dump_written_anew_gives_the_same_table(
    tmp_path: Path, write: Callable[[Path, Path, str], None], dump: str
) -> None:
    for source in sorted((DUMPS / dump).glob("arm=*/seed=[012]/*.parquet")):
        metadata = pq.read_metadata(source).metadata[METADATA_KEY].decode()
        for run, put in (("before", lambda *of: shutil.copy(*of[:2])), ("after", write)):
            target = tmp_path / run / source.relative_to(DUMPS / dump)
            target.parent.mkdir(parents=True)
            put(source, target, metadata)
    before, after = (
        CliRunner().invoke(app, ["table", str(tmp_path / run), "--format", "json", "--quiet"])
        for run in ("before", "after")
    )
    assert json.loads(after.stdout) == json.loads(before.stdout)
    assert json.loads(after.stdout)["seeds"][0]["outside"] > 0
    assert check_dump(tmp_path / "after") == []
