"""What is written is what is read, whole or not at all, by us and by others."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltad.dumps import (
    COLUMNS,
    DERIVED,
    OPTIONAL,
    REQUIRED,
    VECTORS,
    Dump,
    DumpError,
    DumpWriter,
    Metadata,
    check_dump,
    part_numbers,
)

from .factory import make_dump, part_files, read_metadata

METADATA = Metadata(
    top_k=4,
    vocab_size=24,
    temperature=0.7,
    model="m",
    update={"mask": "none", "threshold": 0.15, "divergence": "kl"},
)
Rows = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows of one seed, of distinct values in every column, some of all special cases."""
    dump = Dump.open(make_dump(tmp_path_factory.mktemp("made"), arms=["none"], seeds=[0]))
    batches = list(dump.batches("none", 0))
    names = [name for name in COLUMNS if name not in DERIVED]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def take(rows: Rows, which: Any) -> Rows:
    return {name: values[which] for name, values in rows.items()}


def read(run: Path, arm: str = "none", seed: int = 0) -> Rows:
    """What was given to the writer; `test_derived` looks at what it added."""
    batches = list(Dump.open(run).batches(arm, seed))
    names = [name for name in batches[0].columns if name not in DERIVED]
    return {name: np.concatenate([b[name] for b in batches]) for name in names}


def assert_same(found: Rows, expected: Rows) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def write(run: Path, rows: Rows, **options: Any) -> None:
    with DumpWriter(run, **{"arm": "none", "seed": 0, "metadata": METADATA, **options}) as writer:
        writer.append(rows)


def leftovers(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if not name.startswith("arm="))


def test_every_column_is_read_back(tmp_path: Path, rows: Rows) -> None:
    write(tmp_path, rows)
    assert_same(read(tmp_path), rows)
    assert check_dump(tmp_path) == []
    distinct = {name: values.tobytes() for name, values in rows.items() if values.dtype != object}
    assert len(set(distinct.values())) == len(distinct)  # no column can stand in for another


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(st.integers(0, 25), max_size=8),
    rows_per_group=st.integers(1, 30),
    rows_per_part=st.integers(1, 40),
    optional=st.sets(st.sampled_from([name for name in OPTIONAL if name not in DERIVED])),
    null_every=st.one_of(st.none(), st.integers(1, 5)),
    batch_rows=st.integers(1, 40),
)
def test_any_chunks_give_the_same_rows(
    rows: Rows,
    tmp_path_factory: pytest.TempPathFactory,
    chunks: list[int],
    rows_per_group: int,
    rows_per_part: int,
    optional: set[str],
    null_every: int | None,
    batch_rows: int,
) -> None:
    run = tmp_path_factory.mktemp("run")
    wanted = {name: rows[name] for name in COLUMNS if name in REQUIRED or name in optional}
    wanted = take(wanted, slice(0, sum(chunks[:2])))
    count = len(wanted["step"])
    stored = np.ones(count, bool) if null_every is None else np.arange(count) % null_every != 0
    with DumpWriter(
        run,
        arm="none",
        seed=-3,
        metadata=METADATA,
        rows_per_group=rows_per_group,
        rows_per_part=rows_per_part,
    ) as writer:
        start = 0
        for size in (*chunks[:2], count):
            part = slice(start, start + size)
            writer.append(
                take(wanted, part), vectors_stored=None if null_every is None else stored[part]
            )
            start += size
    dump = Dump.open(run)
    assert dump.rows("none", -3) == dump.rows_seen("none", -3) == count
    assert all(part.rows <= rows_per_part for part in dump.parts)
    assert len(dump.parts) == max(1, -(-count // rows_per_part))
    batches = list(dump.batches("none", -3, batch_rows=batch_rows))
    if count:
        found = {name: np.concatenate([b[name] for b in batches]) for name in wanted}
        np.testing.assert_array_equal(np.concatenate([b.vectors for b in batches]), stored)
        expected = dict(wanted)
        for name in VECTORS:
            nothing = -1 if name == "topk_ids" else np.nan
            expected[name] = np.where(stored[:, None], wanted[name], nothing).astype(
                wanted[name].dtype
            )
        assert_same(found, expected)
    for file in dump.parts:
        groups = pq.read_metadata(file.path)
        sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        assert max(sizes, default=0) <= rows_per_group


def test_files_are_laid_out_as_measured(tmp_path: Path, rows: Rows) -> None:
    write(tmp_path, rows)
    path = tmp_path / "arm=none" / "seed=0" / "part-0-0.parquet"
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    assert {chunk.compression for chunk in chunks} == {"ZSTD"}
    for chunk in chunks:
        name = chunk.path_in_schema.split(".")[0]
        encoded = "BYTE_STREAM_SPLIT" in chunk.encodings
        assert encoded is (COLUMNS[name].dtype.kind in "if"), name
        assert ("RLE_DICTIONARY" in chunk.encodings) is (name == "token")
    schema = pq.read_schema(path)
    assert [field.name for field in schema if field.nullable] == [
        name for name, column in COLUMNS.items() if column.nullable
    ]
    for name in ("linear_delta_own", "linear_delta_sequence"):
        written = pq.read_table(path)[name].to_numpy()
        np.testing.assert_array_equal(written, rows[name])
        assert pq.read_table(path)[name].null_count == np.isnan(rows[name]).sum() > 0
    assert schema.names == list(COLUMNS)


def test_pandas_duckdb_and_arrow_read_it_as_it_is(tmp_path: Path, rows: Rows) -> None:
    for arm in ("none", "zero-step"):
        for seed in (0, 5):
            write(tmp_path, rows, arm=arm, seed=seed, rows_per_part=30)
    DumpWriter(tmp_path, arm="none", seed=9, metadata=METADATA)  # in the middle of its work
    frame = pd.read_parquet(tmp_path)
    assert len(frame) == 4 * len(rows["step"])
    assert set(frame["arm"]) == {"none", "zero-step"}
    assert set(frame["seed"].astype(int)) == {0, 5}
    mine = frame[(frame["arm"] == "none") & (frame["seed"].astype(int) == 5)]
    np.testing.assert_array_equal(mine["pre_logprob"], rows["pre_logprob"])
    np.testing.assert_array_equal(np.stack(mine["topk_ids"].tolist()), rows["topk_ids"])
    relation = duckdb.sql(
        "select arm, seed, count(*), sum(token_id), max(len(topk_pre_logprobs)), min(token) "
        f"from read_parquet('{tmp_path}/*/*/*.parquet', hive_partitioning = true) "
        "group by arm, seed order by arm, seed"
    )
    assert relation is not None
    total, first = int(rows["token_id"].sum()), min(rows["token"])
    assert relation.fetchall() == [
        (arm, seed, 60, total, 4, first) for arm in ("none", "zero-step") for seed in (0, 5)
    ]


def test_a_seed_with_nothing_stored_has_a_file_of_no_rows(tmp_path: Path) -> None:
    with DumpWriter(tmp_path, arm="none", seed=3, metadata=METADATA) as writer:
        pass
    assert [path.name for path in writer.paths] == ["part-0-0.parquet"]
    dump = Dump.open(tmp_path)
    assert (dump.seeds("none"), dump.rows("none", 3), dump.rows_seen("none", 3)) == ((3,), 0, 0)
    assert list(dump.batches("none", 3)) == []
    assert check_dump(tmp_path) == []


def test_metadata_is_kept_and_completed(tmp_path: Path, rows: Rows) -> None:
    write(tmp_path, rows, metadata=dataclasses.replace(METADATA, extra={"colour": "blue"}))
    found = read_metadata(part_files(tmp_path)[0])
    assert found["rows_seen"] == 60
    assert found["colour"] == "blue"
    assert found["update"] == {"mask": "none", "threshold": 0.15, "divergence": "kl"}
    assert found["created"].startswith("20")
    assert found["created"].endswith("+00:00")
    assert list(found)[:2] == ["format", "deltad"]


def above(rows: Rows, threshold: float) -> NDArray[np.bool_]:
    """An oracle of D by a plain loop: rows with D > threshold."""
    kept = []
    for i in range(len(rows["step"])):
        pairs = [
            (m, p)
            for j, m, p in zip(
                rows["topk_ids"][i],
                rows["topk_behavior_logprobs"][i].astype(float),
                rows["topk_pre_logprobs"][i].astype(float),
                strict=True,
            )
            if j >= 0
        ]
        if rows["token_id"][i] not in rows["topk_ids"][i]:
            pairs.append((float(rows["behavior_logprob"][i]), float(rows["pre_logprob"][i])))
        divergence = sum(np.exp(m) * (m - p) for m, p in pairs if np.isfinite(m))
        mu_t = max(0.0, 1 - sum(np.exp(m) for m, _ in pairs))
        pi_t = max(0.0, 1 - sum(np.exp(p) for _, p in pairs))
        if mu_t > 0:
            divergence += mu_t * np.log(mu_t / max(pi_t, 1e-12))
        kept.append(divergence > threshold)
    return np.asarray(kept)


def test_rows_above_the_threshold_are_stored_and_all_are_counted(
    tmp_path: Path, rows: Rows
) -> None:
    stored = {"rule": "above", "divergence": "kl", "threshold": 0.05}
    kept = above(rows, 0.05)
    assert 5 < kept.sum() < 55
    metadata = dataclasses.replace(METADATA, stored=stored)
    with DumpWriter(
        tmp_path, arm="none", seed=0, metadata=metadata, rows_per_group=3, rows_per_part=7
    ) as writer:
        for start in range(0, 60, 7):
            writer.append(take(rows, slice(start, start + 7)))
        writer.skip(1000)
    assert_same(read(tmp_path), take(rows, kept))
    dump = Dump.open(tmp_path)
    assert dump.rows_seen("none", 0) == writer.rows_seen == 1060
    assert dump.rows("none", 0) == writer.rows_stored == kept.sum()
    assert check_dump(tmp_path) == []


def test_counted_rows_have_a_file_even_where_the_last_is_full(tmp_path: Path, rows: Rows) -> None:
    stored = {"rule": "above", "divergence": "kl", "threshold": 0.0}
    metadata = dataclasses.replace(METADATA, stored=stored)
    some = take(rows, np.flatnonzero(above(rows, 0.0))[:10])
    with DumpWriter(
        tmp_path, arm="none", seed=0, metadata=metadata, rows_per_group=5, rows_per_part=5
    ) as writer:
        writer.append(some)
        writer.skip(4)
    dump = Dump.open(tmp_path)
    assert [(part.rows, part.metadata.rows_seen) for part in dump.parts] == [(5, 5), (5, 5), (0, 4)]


def test_rows_are_skipped_only_below_a_rule(tmp_path: Path) -> None:
    with (
        DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA) as writer,
        pytest.raises(ValueError, match="rule 'above'"),
    ):
        writer.skip(1)


def test_skipped_rows_are_counted_whatever_integer_they_come_as(tmp_path: Path) -> None:
    stored = {"rule": "above", "divergence": "kl", "threshold": 0.05}
    metadata = dataclasses.replace(METADATA, stored=stored)
    with DumpWriter(tmp_path, arm="none", seed=0, metadata=metadata) as writer:
        writer.skip(np.ones(3, dtype=np.bool_).sum())
        for no_count in (1.5, True, -1):
            with pytest.raises(ValueError, match="skipped"):
                writer.skip(no_count)  # type: ignore[arg-type]
    assert Dump.open(tmp_path).rows_seen("none", 0) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [("rank", 1.5), ("rank", True), ("rows_per_part", 2.0), ("seed", 1.5), ("existing", "bogus")],
)
def test_writer_refuses_options_that_no_file_can_have(
    tmp_path: Path, option: str, value: Any
) -> None:
    options: dict[str, Any] = {"arm": "none", "seed": 0, option: value}
    with pytest.raises(ValueError, match=option):
        DumpWriter(tmp_path / "run", metadata=METADATA, **options)
    assert not (tmp_path / "run").exists()


def test_storing_above_needs_vectors(tmp_path: Path, rows: Rows) -> None:
    stored = {"rule": "above", "divergence": "tv", "threshold": 0.05}
    metadata = dataclasses.replace(METADATA, stored=stored)
    with DumpWriter(tmp_path, arm="none", seed=0, metadata=metadata) as writer:
        without = np.arange(60) != 7
        with pytest.raises(DumpError, match=r"row 7, column `topk_ids`: .* needs every row's"):
            writer.append(rows, vectors_stored=without)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_floats_of_64_bits_are_rounded_to_what_is_stored(
    tmp_path: Path, rows: Rows, dtype: type
) -> None:
    wide = {
        name: values.astype(dtype) if values.dtype.kind == "f" else values
        for name, values in rows.items()
    }
    wide |= {name: rows[name].astype(np.int64) for name in ("step", "token_id", "topk_ids")}
    write(tmp_path, wide)
    expected = dict(rows)
    for name in rows:
        if COLUMNS[name].dtype == np.float64:
            expected[name] = rows[name].astype(dtype).astype(np.float64)
    assert_same(read(tmp_path), expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("pre_logprob", np.float16, "must be float32 or float64, got float16"),
        ("topk_pre_logprobs", np.float16, "must be float32 or float64, got float16"),
        ("pre_logprob", np.int32, "must be float32 or float64, got int32"),
        ("step", np.float32, "must be integers, got float32"),
        ("step", bool, "must be integers, got bool"),
        ("in_loss", np.int8, "must be bool, got int8"),
        ("token", np.int32, "must hold strings, got int32"),
    ],
)
def test_other_types_are_refused(
    tmp_path: Path, rows: Rows, name: str, value: type, expected: str
) -> None:
    odd = {**rows, name: np.zeros_like(rows[name], dtype=value)}
    with (
        DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA) as writer,
        pytest.raises(DumpError, match=rf"part-0-0.parquet .*column `{name}`: {expected}"),
    ):
        writer.append(odd)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows | {"colour": rows["step"]}, "column `colour`: is not a column"),
        (lambda rows: rows | {"arm": rows["step"]}, "column `arm`: is not a column"),
        (
            lambda rows: {n: v for n, v in rows.items() if n != "advantage"},
            "column `advantage`: is missing",
        ),
        (lambda rows: rows | {"group": rows["group"][:5]}, r"must be of shape \(60,\), got \(5,\)"),
        (
            lambda rows: rows | {"topk_ids": rows["topk_ids"][:, :3]},
            r"must be of shape \(60, 4\), got \(60, 3\)",
        ),
        (lambda rows: rows | {"step": rows["step"].astype(np.int64) + 2**31}, "must fit int32"),
        (lambda rows: rows | {"token": np.asarray([None] * 60, object)}, "must hold strings"),
        (lambda rows: rows | {"token": np.asarray(["\udcff"] * 60, object)}, "must be UTF-8"),
        (lambda rows: rows | {"pre_logprob": rows["pre_logprob"] + 9}, "at most 0"),
        (lambda rows: rows | {"advantage": np.full(60, 1e300)}, "must be finite, found inf"),
        (lambda rows: rows | {"step": [object()] * 60}, "must be integers, got object"),
    ],
)
def test_a_refused_append_names_its_column_and_takes_no_row(
    tmp_path: Path, rows: Rows, change: Any, expected: str
) -> None:
    with DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA) as writer:
        writer.append(take(rows, slice(0, 10)))
        with pytest.raises(DumpError, match=expected):
            writer.append(change(dict(rows)))
        writer.append(take(rows, slice(10, 60)))
    assert_same(read(tmp_path), rows)


def test_optional_columns_are_those_of_the_first_append(tmp_path: Path, rows: Rows) -> None:
    fewer = {name: values for name, values in rows.items() if name != "token"}
    with DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA) as writer:
        writer.append(fewer)
        with pytest.raises(DumpError, match="every append must give the same optional columns"):
            writer.append(rows)


def test_rows_without_vectors_are_announced_in_the_first_append(tmp_path: Path, rows: Rows) -> None:
    some = np.arange(60) % 2 == 0
    with DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA) as writer:
        writer.append(rows, vectors_stored=np.ones(60, bool))
        writer.append(rows, vectors_stored=some)
    with DumpWriter(tmp_path, arm="none", seed=1, metadata=METADATA) as writer:
        writer.append(rows)
        with pytest.raises(DumpError, match="from the first append on"):
            writer.append(rows, vectors_stored=some)
        with pytest.raises(DumpError, match="must be bool of shape"):
            writer.append(rows, vectors_stored=some[:3])


def test_padding_is_written_as_nan_whatever_was_given(tmp_path: Path, rows: Rows) -> None:
    given_ = dict(rows)
    for name in VECTORS[1:]:
        given_[name] = np.where(rows["topk_ids"] < 0, np.float32(77), rows[name])
    assert not np.array_equal(given_[VECTORS[1]], rows[VECTORS[1]], equal_nan=True)
    write(tmp_path, given_)
    assert_same(read(tmp_path), rows)


def test_nothing_is_seen_before_the_file_is_complete(tmp_path: Path, rows: Rows) -> None:
    writer = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=5)
    writer.append(rows)
    assert [name for name in os.listdir(tmp_path) if not name.startswith("_")] == []
    writer.close()
    writer.close()
    assert os.listdir(tmp_path) == ["arm=none"]
    assert sorted(os.listdir(tmp_path / "arm=none" / "seed=0")) == [
        "_ended-0-1",
        "part-0-0.parquet",
    ]
    with pytest.raises(ValueError, match="is closed"):
        writer.append(rows)


def test_a_full_file_is_seen_while_the_next_is_written(tmp_path: Path, rows: Rows) -> None:
    writer = DumpWriter(
        tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=5, rows_per_part=25
    )
    writer.append(rows)
    assert [part.rows for part in Dump.open(tmp_path).parts] == [25, 25]
    writer.close()
    assert [part.rows for part in Dump.open(tmp_path).parts] == [25, 25, 10]


def test_an_exception_keeps_what_was_appended(tmp_path: Path, rows: Rows) -> None:
    def interrupted() -> None:
        with DumpWriter(
            tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=7
        ) as writer:
            writer.append(take(rows, slice(0, 20)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_same(read(tmp_path), take(rows, slice(0, 20)))
    assert leftovers(tmp_path) == []


def test_an_exception_discards_the_open_file_where_asked(tmp_path: Path, rows: Rows) -> None:
    def interrupted() -> None:
        with DumpWriter(
            tmp_path,
            arm="none",
            seed=0,
            metadata=METADATA,
            rows_per_group=7,
            rows_per_part=14,
            discard_on_error=True,
        ) as writer:
            writer.append(take(rows, slice(0, 20)))
            raise RuntimeError("outside")

    with pytest.raises(RuntimeError, match="outside"):
        interrupted()
    assert_same(read(tmp_path), take(rows, slice(0, 14)))
    assert leftovers(tmp_path) == ["_unfinished.arm=none.seed=0.rank=0"]


def test_an_exception_before_the_first_row_says_nothing_of_the_seed(tmp_path: Path) -> None:
    def interrupted() -> None:
        with DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA):
            raise RuntimeError("outside")

    with pytest.raises(RuntimeError, match="outside"):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_abort_leaves_nothing(tmp_path: Path, rows: Rows) -> None:
    writer = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=7)
    writer.append(rows)
    writer.abort()
    writer.abort()
    assert os.listdir(tmp_path) == []
    writer.close()
    assert os.listdir(tmp_path) == []


def no_space(*args: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_row_group_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pq.ParquetWriter, "write_table", no_space)
    writer = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=7)
    with pytest.raises(OSError, match="No space left"):
        writer.append(rows)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="failed before, so it cannot go on"):
        writer.append(rows)  # some of the rows before may be in the file
    with pytest.raises(DumpError, match=r"part-0-0.parquet: was not completed"):
        writer.close()
    assert os.listdir(tmp_path) == ["_unfinished.arm=none.seed=0.rank=0"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_file_that_cannot_be_completed_leaves_no_file(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    writer = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=7)
    writer.append(rows)
    monkeypatch.setattr(os, failing, no_space)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert os.listdir(tmp_path) == ["_unfinished.arm=none.seed=0.rank=0"]


def test_a_failing_disk_inside_the_block_raises_its_own_error(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pq.ParquetWriter, "write_table", no_space)
    with (
        pytest.raises(OSError, match="No space left"),
        DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=7) as writer,
    ):
        writer.append(rows)
    assert os.listdir(tmp_path) == ["_unfinished.arm=none.seed=0.rank=0"]


def test_leftovers_of_a_crash_are_harmless_and_cleaned_by_the_next_writer(
    tmp_path: Path, rows: Rows
) -> None:
    write(tmp_path, rows, seed=1)
    crashed = [
        DumpWriter(tmp_path, arm="none", seed=0, rank=rank, metadata=METADATA, rows_per_group=7)
        for rank in (0, 10)
    ]
    for writer in crashed:
        writer.append(rows)
    assert len(leftovers(tmp_path)) == 4
    assert Dump.open(tmp_path).seeds("none") == (1,)
    found = check_dump(tmp_path, strict=False)
    assert [problem.kind for problem in found] == ["unfinished"] * 2
    write(tmp_path, rows, seed=0)
    note, left = sorted(leftovers(tmp_path))
    assert note == "_unfinished.arm=none.seed=0.rank=10"
    assert "part-10-" in left
    assert_same(read(tmp_path), rows)
    # The crashed one, were it still alive, cannot do harm either.
    with pytest.raises(DumpError, match="exists already"):
        crashed[0].close()
    assert_same(read(tmp_path), rows)
    crashed[1].abort()


def test_a_writer_whose_file_was_taken_away_says_so(tmp_path: Path, rows: Rows) -> None:
    first = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=7)
    first.append(rows)
    second = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA)
    with pytest.raises(DumpError, match="another writer of this part removed it"):
        first.close()
    second.abort()


def test_existing_files_are_refused_replaced_or_followed(tmp_path: Path, rows: Rows) -> None:
    write(tmp_path, rows, rows_per_group=20, rows_per_part=20)
    with pytest.raises(DumpError, match=r"part-0-0.parquet: exists already"):
        write(tmp_path, rows)
    write(tmp_path, rows, rank=1)
    assert part_numbers(tmp_path, arm="none", seed=0) == [0, 1, 2]
    assert part_numbers(tmp_path, arm="none", seed=0, rank=1) == [0]
    assert part_numbers(tmp_path, arm="none", seed=4) == []
    write(tmp_path, take(rows, slice(0, 3)), existing="append")
    assert [part.rows for part in Dump.open(tmp_path).parts] == [20, 20, 20, 3, 60]
    write(tmp_path, take(rows, slice(0, 3)), existing="replace")
    assert [part.rows for part in Dump.open(tmp_path).parts] == [3, 60]


@pytest.mark.parametrize("arm", ["", "a/b", "a b", "..", "-x", "a=b", "a\n", "ä", "shared:x"])
def test_an_arms_name_that_folders_cannot_carry_is_refused(tmp_path: Path, arm: str) -> None:
    with pytest.raises(ValueError, match="an arm's name must be"):
        DumpWriter(tmp_path / "run", arm=arm, seed=0, metadata=METADATA)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("seed", 2**31), ("rank", -1), ("rows_per_group", 0), ("rows_per_part", 0)],
)
def test_impossible_options_are_refused(tmp_path: Path, option: str, value: int) -> None:
    options: dict[str, Any] = {"arm": "none", "seed": 0, "metadata": METADATA, option: value}
    with pytest.raises(ValueError, match=str(value)):
        DumpWriter(tmp_path, **options)


def test_metadata_without_json_fails_at_once(tmp_path: Path) -> None:
    metadata = dataclasses.replace(METADATA, update={"lr": object()})
    with pytest.raises(ValueError, match="metadata must be JSON"):
        DumpWriter(tmp_path, arm="none", seed=0, metadata=metadata)


def test_a_damaged_page_is_noticed(tmp_path: Path, rows: Rows) -> None:
    write(tmp_path, rows)
    (path,) = part_files(tmp_path)
    group = pq.read_metadata(path).row_group(0)
    names = [group.column(i).path_in_schema for i in range(group.num_columns)]
    chunk = group.column(names.index("pre_logprob"))
    content = bytearray(path.read_bytes())
    place = chunk.data_page_offset + chunk.total_compressed_size - 3
    content[place] ^= 1
    path.write_bytes(bytes(content))
    dump = Dump.open(tmp_path)
    with pytest.raises(DumpError, match=r"part-0-0.parquet: cannot be read as Parquet"):
        list(dump.batches("none", 0))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, rows: Rows) -> None:
    many = take(rows, np.arange(60).repeat(20))
    writer = DumpWriter(tmp_path, arm="none", seed=0, metadata=METADATA, rows_per_group=1000)
    peak = 0
    for _ in range(10):
        writer.append(many)
        peak = max(peak, sum(len(columns["step"]) for columns, _ in writer._pending))
    writer.abort()
    assert peak < 1000


def test_metadata_is_found_where_other_tools_look(tmp_path: Path, rows: Rows) -> None:
    write(tmp_path, rows)
    (path,) = part_files(tmp_path)
    footer = pq.read_metadata(path).metadata[b"deltad"]
    assert json.loads(footer)["rows_seen"] == 60
    assert pq.read_schema(path).metadata == {b"deltad": footer}
    assert pq.read_table(path, partitioning=None).schema.metadata == {b"deltad": footer}


def test_a_rank_beyond_those_that_write_is_refused(tmp_path: Path) -> None:
    metadata = dataclasses.replace(METADATA, ranks=2)
    DumpWriter(tmp_path, arm="none", seed=0, rank=1, metadata=metadata)
    with pytest.raises(ValueError, match="below the metadata's `ranks`, got 2 of 2"):
        DumpWriter(tmp_path, arm="none", seed=0, rank=2, metadata=metadata)
