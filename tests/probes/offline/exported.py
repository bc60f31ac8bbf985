"""Files of scores made of a dump, apart from the code that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.dumps.factory import DERIVED, part_files

BEHAVIOR = (
    "position", "token_id", "advantage", "in_loss", "behavior_logprob", "topk_ids",
    "topk_behavior_logprobs", "token", "linear_delta",
)  # fmt: skip
SCORES = {
    "logprob": "{}_logprob",
    "topk_logprobs": "topk_{}_logprobs",
    "collision": "{}_collision",
    "entropy": "{}_entropy",
}
KEYS = ("step", "group", "sequence")


def rows_of(run: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    """All rows of one arm and seed as Python objects, sorted."""
    rows: list[dict[str, Any]] = _sorted(_table(run, arm, seed)).to_pylist()
    return rows


def responses(run: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    """A record a response with every column of the dump."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows_of(run, arm, seed):
        record = found.setdefault(
            (row["step"], row["sequence"]), {name: row[name] for name in KEYS}
        )
        for name, value in row.items():
            if name not in KEYS:
                record.setdefault(name, []).append(value)
    return list(found.values())


def behavior(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the behavior policy said."""
    return [
        {name: record[name] for name in (*KEYS, *BEHAVIOR) if name in record} for record in records
    ]


def scores(records: Iterable[dict[str, Any]], time: str) -> list[dict[str, Any]]:
    """How the policy before ("pre") or after ("post") the step scores."""
    return [
        {name: record[name] for name in ("step", "sequence")}
        | {
            name: record[column.format(time)]
            for name, column in SCORES.items()
            if column.format(time) in record
        }
        for record in records
    ]


def tokens(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same as records of single tokens; `position` must be there."""
    for record in records:
        lists = [name for name in record if isinstance(record[name], list)]
        for at in range(len(record[lists[0]])):
            yield {name: value[at] if name in lists else value for name, value in record.items()}


def write_json(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """JSON lines, −∞ as a text and NaN as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_plain(record), allow_nan=False) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(
    path: Path, records: Iterable[dict[str, Any]], *, rows: int = 7, **types: pa.DataType
) -> Path:
    """Parquet, in the types that Arrow infers unless told others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(records))
    for name, kind in types.items():
        table = table.set_column(
            table.schema.get_field_index(name), name, table.column(name).cast(kind)
        )
    pq.write_table(table, path, row_group_size=rows)
    return path


def same_dump(ours: Path, theirs: Path, arm: str, seed: int) -> None:
    """Assert that one arm and seed hold the same rows, bit for bit."""
    one, other = (_sorted(_table(run, arm, seed)) for run in (ours, theirs))
    assert sorted(one.column_names) == sorted(other.column_names)
    assert one.num_rows == other.num_rows > 0
    for name in one.column_names:
        for mine, yours in zip(_bits(one.column(name)), _bits(other.column(name)), strict=True):
            np.testing.assert_array_equal(mine, yours, err_msg=name)


def _table(run: Path, arm: str, seed: int) -> pa.Table:
    """One arm and seed, without what a writer derives."""
    found = pa.concat_tables(
        [
            pq.ParquetFile(file).read()
            for file in part_files(run)
            if file.parent.name == f"seed={seed}" and file.parent.parent.name == f"arm={arm}"
        ],
        promote_options="default",
    ).replace_schema_metadata(None)
    return found.drop_columns([name for name in found.column_names if name in DERIVED])


def _sorted(table: pa.Table) -> pa.Table:
    """Rows by response and position."""
    keys = [(name, "ascending") for name in ("step", "sequence", "position")]
    return table.take(pc.sort_indices(table, sort_keys=keys))


def _bits(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Which rows are NULL, and the values of the others by their bits."""
    there = column.is_valid().to_numpy()
    array = column.combine_chunks().drop_null()
    if pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    if not pa.types.is_floating(array.type):
        return there, array.to_pylist()
    values = array.to_numpy(zero_copy_only=False)
    size = values.dtype.itemsize
    return there, np.where(np.isnan(values), -1, values.view(f"i{size}"))


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and np.isnan(value):
        return None
    if isinstance(value, float) and np.isinf(value):
        return "-inf" if value < 0 else "inf"
    return value
