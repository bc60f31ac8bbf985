"""Files of scores made of a dump, apart from the code that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.dumps.factory import part_files

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
    tables = [
        pq.ParquetFile(file).read()
        for file in part_files(run)
        if file.parent.name == f"seed={seed}" and file.parent.parent.name == f"arm={arm}"
    ]
    rows = [row for table in tables for row in table.to_pylist()]
    return sorted(rows, key=lambda row: (row["step"], row["sequence"], row["position"]))


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
    one, other = (rows_of(run, arm, seed) for run in (ours, theirs))
    assert len(one) == len(other) > 0
    for mine, yours in zip(one, other, strict=True):
        assert mine.keys() == yours.keys()
        for name, value in mine.items():
            np.testing.assert_array_equal(_bits(value), _bits(yours[name]), err_msg=name)


def _bits(value: Any) -> Any:
    """Floats by their bits, NULL as an empty list."""
    if value is None:
        return np.zeros(0)
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return np.where(np.isnan(array), 0x7FF8 << 48, array.view(np.uint64))
    return array


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
