"""Reading: every column where it belongs, every damage one sentence that names the file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.dumps import (
    COLUMNS,
    DERIVED,
    VECTORS,
    Batch,
    Dump,
    DumpError,
    Metadata,
    check_batch,
)

from .factory import OPTIONAL as FACTORY_OPTIONAL
from .factory import (
    edit,
    edit_metadata,
    edit_value,
    make_dump,
    part_files,
    read_metadata,
    write_table,
)

FIRST = "arm=none/seed=0/part-0-0.parquet"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return make_dump(folder, arms=["none", "ratio"], rows=40, derived=True)


@pytest.fixture
def run(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "RUN"))


def read_all(run: Path, batch_rows: int = 65_536) -> list[Batch]:
    """Everything of the arm `none`, checked."""
    dump = Dump.open(run)
    found = []
    for seed in dump.seeds("none"):
        for batch in dump.batches("none", seed, batch_rows=batch_rows):
            check_batch(batch, dump.metadata("none"))
            found.append(batch)
    return found


def expected_rows(run: Path, arm: str, seed: int, name: str) -> list[Any]:
    files = sorted((run / f"arm={arm}" / f"seed={seed}").iterdir())
    return [row for file in files for row in pq.ParquetFile(file).read()[name].to_pylist()]


@pytest.mark.parametrize("options", [{}, {"null_vectors": 0.4}, {"top_k": 1}, {"top_k": 50}])
@pytest.mark.parametrize("batch_rows", [1, 65_536])
def test_every_column_is_read_as_pyarrow_reads_it(
    tmp_path: Path, options: dict[str, Any], batch_rows: int
) -> None:
    dump = Dump.open(make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], derived=True, **options))
    for seed in dump.seeds("none"):
        batches = list(dump.batches("none", seed, batch_rows=batch_rows))
        assert max(map(len, batches)) <= batch_rows
        for name, column in COLUMNS.items():
            found = np.concatenate([batch[name] for batch in batches])
            assert found.dtype == column.dtype
            expected = expected_rows(dump.path, "none", seed, name)
            if column.is_vector:
                nothing = [-1 if name == "topk_ids" else np.nan] * dump.top_k
                stored = np.concatenate([batch.vectors for batch in batches])
                assert [row is not None for row in expected] == stored.tolist()
                expected = [nothing if row is None else row for row in expected]
            np.testing.assert_array_equal(found, np.asarray(expected, column.dtype))


def test_rows_are_numbered_within_their_file(run: Path) -> None:
    first: dict[str, int] = {}
    for batch in Dump.open(run).batches("none", 0, columns=["step"], batch_rows=3):
        assert batch.first_row == first.get(batch.path, 0)
        first[batch.path] = batch.first_row + len(batch)
    assert list(first) == [str(p) for p in sorted((run / "arm=none" / "seed=0").iterdir())]


def test_a_dump_knows_its_parts(run: Path) -> None:
    dump = Dump.open(run)
    assert dump.arms == ("none", "ratio")
    assert dump.seeds("ratio") == (0, 1)
    assert (dump.top_k, dump.vocab_size, dump.temperature) == (4, 24, 0.7)
    assert [(p.rank, p.part) for p in dump.files("none", 1)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {p.arm for p in dump.files("none")} == {"none"}
    assert dump.rows("none", 1) == dump.rows_seen("none", 1) == 40
    assert dump.metadata("ratio").update["mask"] == "ratio"
    assert dump.metadata("ratio").extra == {"colour": "blue"}
    assert dump.optional_columns("none") == {*FACTORY_OPTIONAL, *DERIVED}


def test_seeds_are_ordered_as_numbers(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[10, 9, -1, 100], rows=4)
    assert Dump.open(run).seeds("none") == (-1, 9, 10, 100)


def test_ranks_and_parts_are_ordered_as_numbers(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], rows=40, ranks=11, parts=1)
    assert [part.rank for part in Dump.open(run).parts] == list(range(11))


def test_only_asked_columns_are_read(run: Path) -> None:
    batch = next(Dump.open(run).batches("none", 0, columns=["advantage", "step"]))
    assert list(batch.columns) == ["step", "advantage"]
    assert batch.vectors.all()
    batch = next(Dump.open(run).batches("none", 0, columns=["topk_post_logprobs"]))
    assert list(batch.columns) == ["topk_ids", "topk_post_logprobs"]


def test_an_unknown_column_is_the_callers_mistake(run: Path) -> None:
    with pytest.raises(ValueError, match="a dump has no column 'colour'"):
        next(Dump.open(run).batches("none", 0, columns=["colour"]))


def test_impossible_requests_are_the_callers_mistake(run: Path) -> None:
    with pytest.raises(ValueError, match="must name at least one column"):
        next(Dump.open(run).batches("none", 0, columns=[]))
    with pytest.raises(ValueError, match="`batch_rows` must be at least 1, got 0"):
        next(Dump.open(run).batches("none", 0, batch_rows=0))


def test_optional_columns_are_those_of_all_files_with_rows(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0, 1], empty_seeds=[1], rows=40)
    for file in part_files(run):
        if "seed=1" in str(file):
            edit(file, lambda table: table.drop_columns(list(FACTORY_OPTIONAL)))
    assert Dump.open(run).optional_columns("none") == set(FACTORY_OPTIONAL)
    edit(part_files(run)[0], lambda table: table.drop_columns(["token", "pre_entropy"]))
    dump = Dump.open(run)
    assert dump.optional_columns("none") == set(FACTORY_OPTIONAL) - {"token", "pre_entropy"}
    with pytest.raises(DumpError, match=r"part-0-0.parquet, column `pre_entropy`: is missing"):
        list(dump.batches("none", 0, columns=["pre_entropy"]))
    assert list(dump.batches("none", 1, columns=["pre_entropy"])) == []


def relax(table: pa.Table) -> pa.Table:
    """The same rows as other writers give them."""
    fields, arrays = [], []
    for field in table.schema:
        kind = field.type
        if pa.types.is_fixed_size_list(kind):
            kind = pa.list_(pa.field("anything", kind.value_type), kind.list_size)
        if pa.types.is_dictionary(kind):
            kind = pa.string()
        fields.append(pa.field(field.name, kind, nullable=True))
        arrays.append(pa.array(table[field.name].to_pylist(), kind))
    order = list(range(len(fields)))[::-1]
    return pa.Table.from_arrays(
        [arrays[i] for i in order], schema=pa.schema([fields[i] for i in order])
    ).append_column("colour", pa.array(["blue"] * len(table)))


def test_nullability_field_names_order_and_other_columns_are_free(run: Path) -> None:
    before = read_all(run)
    for file in part_files(run):
        edit(file, relax, use_compliant_nested_type=False)
    schema = pq.read_schema(part_files(run)[0])
    assert all(field.nullable for field in schema)
    assert schema.field("topk_ids").type.value_field.name == "anything"
    after = read_all(run)
    for name in COLUMNS:
        np.testing.assert_array_equal(
            np.concatenate([batch[name] for batch in before]),
            np.concatenate([batch[name] for batch in after]),
        )


WIDE: dict[str, Callable[[pa.DataType], pa.DataType]] = {
    "list": lambda kind: pa.list_(pa.field("item", kind)),
    "large list": pa.large_list,
    "fixed": lambda kind: pa.list_(kind, 4),
}


def widened(table: pa.Table, of: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    """The same rows in the widest types that other writers make of them."""
    wider = {"int16": pa.int64(), "int32": pa.int64(), "float": pa.float64()}
    for place, field in enumerate(table.schema):
        if field.name in VECTORS:
            kind = of(wider[str(field.type.value_type)])
            column = pa.array(table[field.name].to_pylist(), kind)
        elif COLUMNS[field.name].is_text:
            column = table[field.name].cast(pa.large_string())
        else:
            column = table[field.name].cast(wider.get(str(field.type), field.type))
        table = table.set_column(place, field.name, column)
    return table


@pytest.mark.parametrize("of", WIDE)
def test_wider_types_and_lists_of_any_kind_are_read_as_declared(tmp_path: Path, of: str) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], derived=True, null_vectors=0.3)
    before = read_all(run, batch_rows=1)
    for file in part_files(run):
        edit(file, lambda table: widened(table, WIDE[of]))
    after = read_all(run, batch_rows=1)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.vectors, other.vectors)
        for name, column in COLUMNS.items():
            assert other[name].dtype == column.dtype
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(("row", "values"), [(0, [1, 2, 3]), (5, [1, 2, 3, 4, 5]), (9, [])])
def test_lists_of_another_length_are_refused_with_their_row(
    tmp_path: Path, row: int, values: list[int]
) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1)

    def change(table: pa.Table) -> pa.Table:
        lists = table["topk_ids"].to_pylist()
        lists[row] = values
        place = table.schema.get_field_index("topk_ids")
        return table.set_column(place, "topk_ids", pa.array(lists, pa.list_(pa.int32())))

    edit(run / FIRST, change)
    with pytest.raises(DumpError, match=f"must hold 4 values, found {len(values)}") as caught:
        read_all(run, batch_rows=4)
    assert (caught.value.problem.row, caught.value.problem.column) == (row, "topk_ids")


@pytest.mark.parametrize("value", [2**40, 1.5])
@pytest.mark.parametrize("name", ["token_id", "topk_ids", "sampled_rank"])
def test_integers_that_do_not_fit_are_refused_with_their_row(
    tmp_path: Path, name: str, value: float
) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1, derived=True)

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[6] = [0, 1, value, 3] if name in VECTORS else value
        each = pa.int64() if isinstance(value, int) else pa.float64()
        kind = pa.list_(each) if name in VECTORS else each
        return table.set_column(table.schema.get_field_index(name), name, pa.array(values, kind))

    edit(run / FIRST, change)
    with pytest.raises(DumpError, match=r"must be int(16|32)") as caught:
        read_all(run, batch_rows=4)
    assert (caught.value.problem.row, caught.value.problem.column) == (6, name)


def test_names_that_dataset_readers_skip_are_skipped(run: Path) -> None:
    for place in (run, run / "arm=none", run / "arm=none" / "seed=0"):
        (place / "_notes").mkdir()
        (place / "_notes" / "part-0-7.parquet").write_text("not a file of ours")
        (place / ".DS_Store").write_text("not ours either")
        (place / "_part-0-9.parquet").write_text("half a fi")
    assert len(Dump.open(run).parts) == 16


def test_an_arm_is_named_as_dataset_readers_decode_it(run: Path) -> None:
    (run / "arm=none").rename(run / "arm=a%20b")
    assert Dump.open(run).arms == ("a b", "ratio")
    assert Dump.open(run).rows("a b", 0) == 40


def problem_of(run: Path) -> DumpError:
    with pytest.raises(DumpError) as caught:
        Dump.open(run)
    assert "\n" not in str(caught.value)
    return caught.value


def first(run: Path) -> Path:
    return run / FIRST


def cast(name: str, kind: pa.DataType) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        def change(table: pa.Table) -> pa.Table:
            place = table.schema.get_field_index(name)
            return table.set_column(place, name, table[name].cast(kind))

        edit(first(run), change)

    return damage


def with_text(text: str | bytes | None) -> Callable[[Path], None]:
    return lambda run: write_table(first(run), pq.ParquetFile(first(run)).read(), text)


def cut(keep: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = first(run).read_bytes()
        first(run).write_bytes(content[: int(len(content) * keep)])

    return damage


def removed(pattern: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        found = list(run.glob(pattern))
        assert found
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    return damage


def folder(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).mkdir()


def copied(name: str) -> Callable[[Path], object]:
    return lambda run: shutil.copy(first(run), first(run).parent / name)


def part_is_a_folder(run: Path) -> None:
    first(run).unlink()
    first(run).mkdir()


def narrow(run: Path) -> None:
    """Lists of 3 where the metadata says 4."""

    def change(table: pa.Table) -> pa.Table:
        for name in VECTORS:
            place = table.schema.get_field_index(name)
            kind = table.schema.field(name).type.value_type
            rows = [row[:3] for row in table[name].to_pylist()]
            table = table.set_column(place, name, pa.array(rows, pa.list_(kind, 3)))
        return table

    edit(first(run), change)


def twice(run: Path) -> None:
    table = pq.ParquetFile(first(run)).read()
    fields = [*table.schema, pa.field("step", pa.int32())]
    doubled = pa.Table.from_arrays([*table.columns, table["step"]], schema=pa.schema(fields))
    write_table(first(run), doubled, read_metadata(first(run)))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut(0.6), rf"{FIRST}: cannot be read as Parquet \(.+\)"),
    "empty file": (cut(0), rf"{FIRST}: cannot be read as Parquet \(.+\)"),
    "text": (
        lambda run: first(run).write_text("step,group\n1,2\n"),
        rf"{FIRST}: cannot be read as Parquet \(.+\)",
    ),
    "bad footer": (
        lambda run: first(run).write_bytes(b"PAR1" + b"\xff" * 64 + b"\x40\0\0\0PAR1"),
        rf"{FIRST}: cannot be read as Parquet \(.+\)",
    ),
    "folder as a part": (
        part_is_a_folder,
        rf"{FIRST}: only files `part-<rank>-<n>.parquet` may lie here",
    ),
    "missing column": (
        lambda run: edit(first(run), lambda table: table.drop_columns(["advantage"])),
        rf"{FIRST}, column `advantage`: is missing",
    ),
    "column twice": (twice, rf"{FIRST}, column `step`: must be there once, found 2 times"),
    "half": (
        cast("pre_logprob", pa.float16()),
        rf"{FIRST}, column `pre_logprob`: must be float32, found halffloat",
    ),
    "text column": (
        cast("token_id", pa.string()),
        rf"{FIRST}, column `token_id`: must be int32, found string",
    ),
    "narrow lists": (
        narrow,
        rf"{FIRST}, column `topk_ids`: must be list<int32>\[4\], found .*\[3\]",
    ),
    "optional of a wrong type": (
        cast("pre_entropy", pa.float16()),
        rf"{FIRST}, column `pre_entropy`: must be float32, found halffloat",
    ),
    "no metadata": (with_text(None), rf"{FIRST}: has no metadata under the key `deltad`"),
    "no json": (with_text("{'a'"), rf"{FIRST}: .* is not JSON"),
    "no utf-8": (with_text(b"\xff\xfe"), rf"{FIRST}: .* is not JSON"),
    "a list": (with_text("[1]"), rf"{FIRST}: .* must be a JSON object, found list"),
    "format 2": (
        lambda run: edit_metadata(first(run), format=2),
        rf"{FIRST}: in the metadata, `format` must be 1, .* found 2",
    ),
    "no format": (
        lambda run: edit_metadata(first(run), drop=["format"]),
        rf"{FIRST}: in the metadata, `format` must be 1, .* found None",
    ),
    "no top_k": (
        lambda run: edit_metadata(first(run), drop=["top_k"]),
        rf"{FIRST}: in the metadata, `top_k` is missing",
    ),
    "top_k of another file": (
        lambda run: edit_metadata(first(run), top_k=5),
        rf"{FIRST}, column `topk_ids`: must be list<int32>\[5\], found .*\[4\]",
    ),
    "mixed vocab_size": (
        lambda run: edit_metadata(run / "arm=ratio/seed=1/part-1-1.parquet", vocab_size=25),
        r"arm=ratio/seed=1/part-1-1.parquet: `vocab_size` must be the same in all files, "
        rf"found 25, but 24 in .*{FIRST}",
    ),
    "mixed temperature": (
        lambda run: edit_metadata(run / "arm=ratio/seed=1/part-1-1.parquet", temperature=1),
        r"arm=ratio/seed=1/part-1-1.parquet: `temperature` must be the same .*0\.7 in ",
    ),
    "rows_seen too small": (
        lambda run: edit_metadata(first(run), rows_seen=1),
        rf"{FIRST}: `rows_seen` must be the number of rows stored, \d+, found 1$",
    ),
    "rows_seen too large": (
        lambda run: edit_metadata(first(run), rows_seen=10**6),
        rf"{FIRST}: `rows_seen` must be the number of rows stored, \d+, found 1000000$",
    ),
    "rows_seen below what is stored": (
        lambda run: edit_metadata(
            first(run), rows_seen=0, stored={"rule": "above", "divergence": "kl", "threshold": 0}
        ),
        rf"{FIRST}: `rows_seen` must be at least \d+, found 0$",
    ),
    "missing rank": (
        lambda run: shutil.move(
            run / "arm=none/seed=0/part-1-0.parquet", run / "arm=none/seed=0/part-3-0.parquet"
        ),
        r"arm=none/seed=0/part-2-0.parquet: is missing: ranks are numbered from 0 without gaps",
    ),
    "missing first rank": (
        removed("arm=none/seed=0/part-0-*"),
        r"arm=none/seed=0/part-0-0.parquet: is missing: ranks are numbered",
    ),
    "missing last rank": (
        lambda run: edit_metadata(first(run), ranks=4),
        r"part-2-0.parquet: is missing: `ranks` of part-0-0.parquet says that 4 ranks write, and "
        r"there is none of the ranks 2 to 3",
    ),
    "more ranks than there can be": (
        lambda run: edit_metadata(first(run), ranks=2**31 - 1),
        r"part-2-0.parquet: is missing: .* none of the ranks 2 to 2147483646",
    ),
    "rank that there is not": (
        lambda run: edit_metadata(run / "arm=none/seed=0/part-1-0.parquet", ranks=1),
        r"part-1-0.parquet: is of rank 1, but its `ranks` says that 1 write",
    ),
    "missing part": (
        removed("arm=none/seed=0/part-1-0.parquet"),
        r"arm=none/seed=0/part-1-0.parquet: is missing: parts are numbered from 0 without gaps",
    ),
    "seed without a file": (
        removed("arm=none/seed=0/*"),
        r"arm=none/seed=0: holds no part-0-0.parquet",
    ),
    "arm without a seed": (
        removed("arm=none/*"),
        r"RUN/arm=none: holds no `seed=<int>` folder",
    ),
    "folder in RUN": (folder("logs"), "RUN/logs: only folders `arm=<name>`"),
    "file in RUN": (
        lambda run: (run / "notes.txt").write_text(""),
        "RUN/notes.txt: only folders `arm=<name>`",
    ),
    "file as an arm": (
        lambda run: (run / "arm=x").write_text(""),
        "RUN/arm=x: only folders `arm=<name>`",
    ),
    "arm without a name": (
        folder("arm="),
        "RUN/arm=: only folders `arm=<name>`",
    ),
    "arm of a line break": (
        folder("arm=a%0Ab"),
        "RUN/arm=a%0Ab: only folders `arm=<name>`",
    ),
    "arm twice": (
        lambda run: shutil.copytree(run / "arm=none", run / "arm=n%6Fne"),
        "RUN/arm=none: the arm 'none' lies in arm=n%6Fne already",
    ),
    **{
        f"seed {name}": (
            folder(f"arm=none/{name}"),
            rf"RUN/arm=none/{name.replace('+', '.')}: only folders `seed=<int32>`",
        )
        for name in ("seed=01", "seed=x", "seed=-0", "seed=+1", "seed=1.0", "seed=", "seed=１",
                     "seed=2147483648", "sead=1", "seed=0x1", "seed=1_0")
    },
    **{
        f"part {name}": (
            copied(name),
            rf"{name}: only files `part-<rank>-<n>.parquet` may lie here",
        )
        for name in ("part-00-0.parquet", "part-0.parquet", "data.parquet", "part-0-0.parquet.bak",
                     "part--1-0.parquet", "part-0-0.PARQUET", "part-0-1.parquet.tmp")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_sentence_that_names_the_file(run: Path, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(run)
    error = problem_of(run)
    assert error.problem.path.startswith(str(run))
    assert re.search(expected, str(error)), str(error)


def test_an_empty_folder_is_not_a_dump(tmp_path: Path) -> None:
    assert str(problem_of(tmp_path)) == (
        f"{tmp_path}: holds no `arm=<name>` folder, so it is not a dump"
    )


def test_a_file_is_not_a_dump(tmp_path: Path) -> None:
    (tmp_path / "RUN").write_text("")
    assert str(problem_of(tmp_path / "RUN")) == f"{tmp_path}/RUN: must be a folder, found a file"


def test_no_run_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="RUN does not exist"):
        Dump.open(tmp_path / "RUN")


def test_no_such_arm_or_seed_lists_what_is_there(run: Path) -> None:
    dump = Dump.open(run)
    with pytest.raises(DumpError, match=r"RUN: there is no arm 'x', the arms are none, ratio$"):
        dump.seeds("x")
    with pytest.raises(DumpError, match="RUN: there is no seed 7 in arm 'none'"):
        list(dump.batches("none", 7))


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 0.9])
def test_a_body_that_is_damaged_is_found_when_it_is_read(run: Path, keep: float) -> None:
    """The footer stays, so that opening succeeds, and bytes before it are overwritten."""
    content = bytearray(first(run).read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    start = int((len(content) - footer) * keep)
    content[start : start + 200] = b"\xee" * 200
    first(run).write_bytes(bytes(content))
    Dump.open(run)
    with pytest.raises(DumpError, match=rf"{FIRST}: cannot be read as Parquet") as caught:
        read_all(run)
    assert "\n" not in str(caught.value)


def test_a_file_that_went_away_is_named(run: Path) -> None:
    dump = Dump.open(run)
    first(run).unlink()
    with pytest.raises(DumpError, match=rf"{FIRST}: cannot be read"):
        list(dump.batches("none", 0))


@pytest.mark.parametrize(
    "name", [name for name, each in COLUMNS.items() if not (each.is_vector or each.nullable)]
)
def test_null_in_a_scalar_is_refused_with_its_row(run: Path, name: str) -> None:
    edit_value(first(run), name, 2, None)
    with pytest.raises(DumpError, match=rf"{FIRST}, row 2, column `{name}`: must not be NULL"):
        read_all(run, batch_rows=2)


@pytest.mark.parametrize("name", [name for name, each in COLUMNS.items() if each.nullable])
def test_null_where_a_column_may_have_it_is_nan(run: Path, name: str) -> None:
    edit_value(first(run), name, 2, None)
    edit_value(first(run), name, 3, 0.25)
    batch = next(Dump.open(run).batches("none", 0))
    assert np.isnan(batch[name][2])
    assert batch[name][3] == 0.25
    assert name not in batch.nulls


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("batch_rows", [2, 100])
def test_null_in_one_vector_is_null_in_all_or_refused(
    run: Path, name: str, batch_rows: int
) -> None:
    edit_value(first(run), name, 2, None)
    with pytest.raises(DumpError, match=rf"{FIRST}, row 2, column `{name}`: must be NULL in all"):
        read_all(run, batch_rows)
    for other in VECTORS:
        if other != name:
            edit_value(first(run), other, 2, None)
    batch = read_all(run)[0]
    assert np.flatnonzero(~batch.vectors).tolist() == [2]


@pytest.mark.parametrize("name", VECTORS)
def test_null_inside_a_vector_is_refused_but_at_padding(tmp_path: Path, name: str) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1)
    ids = np.stack(pq.ParquetFile(first(run)).read()["topk_ids"].to_pylist())
    padded, full = int((ids < 0).any(axis=1).argmax()), int((ids >= 0).all(axis=1).argmax())
    edit_value(first(run), name, full, None, slot=0)
    dump = Dump.open(run)
    with pytest.raises(DumpError, match=rf"row {full}, column `{name}`: .* hold no NULL"):
        check_batch(next(dump.batches("none", 0)), dump.metadata("none"))
    if name != "topk_ids":
        make_dump(run, arms=["none"], seeds=[0], ranks=1, parts=1)
        edit_value(first(run), name, padded, None, slot=3)
        check_batch(next(dump.batches("none", 0)), dump.metadata("none"))


def test_opening_reads_footers_only(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("a row was read")

    for name in ("read", "iter_batches", "read_row_group", "read_row_groups"):
        monkeypatch.setattr(pq.ParquetFile, name, refuse)
    assert len(Dump.open(run).parts) == 16


def test_reading_holds_a_row_group_and_not_the_file(run: Path) -> None:
    table = pq.ParquetFile(first(run)).read()
    rows = np.random.default_rng(0).integers(len(table), size=20_000)
    write_table(
        first(run),
        table.take(pa.array(rows)),
        {**read_metadata(first(run)), "rows_seen": 20_000},
        row_group_size=500,
        compression="none",
        use_dictionary=False,
    )
    size = first(run).stat().st_size
    dump = Dump.open(run)
    before = pa.total_allocated_bytes()
    held = [
        pa.total_allocated_bytes() - before
        for _ in dump.batches("none", 0, columns=["topk_pre_logprobs"], batch_rows=500)
    ]
    assert len(held) >= 40
    assert max(held) < size / 10


def test_metadata_of_other_versions_is_kept(run: Path) -> None:
    edit_metadata(first(run), shape=[1, 2])
    assert Dump.open(run).files("none", 0)[0].metadata.extra == {"colour": "blue", "shape": [1, 2]}
    assert json.loads(Metadata(top_k=1, vocab_size=2, extra={"shape": 3}).to_json())["shape"] == 3
