"""All shards of a dump give the very table; anything that does not make up one is refused."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.analysis import (
    Question,
    QuestionError,
    Shards,
    ShardWriter,
    ShardWritten,
    Share,
    backends,
    compare,
    condition_table,
    protocol_table,
    rate_table,
    shards,
    sweep,
)
from deltad.analysis.shards import METADATA_KEY, SCHEMA
from deltad.dumps import Dump, DumpError
from tests.analysis.random_dumps import FAR, write
from tests.dumps.factory import part_files

OPTIONS: dict[str, Any] = {"rows": 100, "drift": 1.5, "seeds": (-3, 0, 12), "null_vectors": 0.1}
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump whose pairs disagree, of several files a seed."""
    return write(tmp_path_factory.mktemp("shards") / "run", **OPTIONS)


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several spans a file, as of large files."""
    monkeypatch.setattr(backends.spans_of, "__kwdefaults__", {"least_rows": 16})


def written(dump: Dump, folder: Path, total: int, make: Make = rate_table) -> list[Path]:
    """All shards of a table."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number}.parquet" for number in range(1, total + 1)]
    for number, path in enumerate(paths, 1):
        with path.open("wb") as file, pytest.raises(ShardWritten):
            make(dump, backend=ShardWriter(Share(number, total), file, dump))
    return paths


TABLES: dict[str, Make] = {
    "rates": rate_table,
    "own": lambda dump, **how: rate_table(dump, Question(protocol="own"), **how),
    "tv": lambda dump, **how: rate_table(dump, Question(0.02, "tv"), bootstrap_seed=3, **how),
    "protocols": protocol_table,
    "comparison": lambda dump, **how: compare(dump, criteria=[FAR, "sequence_mask"], **how),
    "thresholds": sweep,
    "top-k": lambda dump, **how: sweep(dump, over="top-k", **how),
    "conditions": condition_table,
}


@pytest.mark.parametrize("name", TABLES)
def test_all_shards_give_the_very_table_without_the_dump(tmp_path: Path, name: str) -> None:
    dump = write(tmp_path / "run", post=name != "comparison", **OPTIONS)
    whole = TABLES[name](dump).to_json_object()
    paths = written(dump, tmp_path / "shards", 3, TABLES[name])
    shutil.rmtree(tmp_path / "run")
    merged = Shards(paths)
    assert TABLES[name](merged.dump, backend=merged).to_json_object() == whole


@pytest.mark.parametrize("total", [1, 2, 7, 50])
def test_any_number_of_shards_in_any_order_does(dump: Dump, tmp_path: Path, total: int) -> None:
    rows: list[int] = []
    whole = rate_table(dump, progress=rows.append)
    merged = Shards(written(dump, tmp_path, total)[::-1])
    found = rate_table(merged.dump, backend=merged)
    assert whole.criterion.kept
    assert found.to_json_object() == whole.to_json_object()
    for side in ("criterion", "baseline"):
        assert np.array_equal(found.delta_d[side], whole.delta_d[side])


def test_progress_counts_the_rows_of_the_shard(dump: Dump, tmp_path: Path) -> None:
    rows: list[int] = []
    asked = Question(criterion="mis", protocol="shared:none")
    written(dump, tmp_path, 3, lambda d, **h: rate_table(d, asked, progress=rows.append, **h))
    assert sum(rows) == sum(part.rows for part in dump.files("none"))


def test_another_question_than_that_of_the_shards_is_refused(dump: Dump, tmp_path: Path) -> None:
    merged = Shards(written(dump, tmp_path, 2))
    for asked, words in (
        (Question(0.2), r"`threshold` was 0\.15, not 0\.2"),
        (Question(criterion="mis"), "`criteria` was .*predictive-kl-aggregated.*, not .*mis"),
    ):
        with pytest.raises(QuestionError, match=f"read for another question: .*{words}"):
            rate_table(merged.dump, asked, backend=merged)
    with pytest.raises(QuestionError, match="read for another question"):
        compare(merged.dump, backend=merged)


def test_missing_shards_and_those_given_twice_are_named(dump: Dump, tmp_path: Path) -> None:
    paths = written(dump, tmp_path, 4)
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(paths[0].read_bytes())
    for given, words in (
        ([], "name at least one shard"),
        ([paths[0], paths[2]], "missing are the shards 2/4, 4/4: read each with"),
        ([*paths, copy], r"1.parquet and .*copy.parquet are both shard 1/4"),
        (written(dump, tmp_path / "many", 30)[:1], r"shards 2/30, .*, 9/30 and 21 more"),
    ):
        with pytest.raises(QuestionError, match=words):
            Shards(given)


@pytest.mark.parametrize("what", ["questions", "dumps", "numbers of shards", "versions of deltad"])
def test_shards_of_something_else_are_named(
    dump: Dump, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = written(dump, tmp_path / "a", 2)
    asked, other = Question(0.1 if what == "questions" else 0.15), dump
    if what == "dumps":  # one more row in one file
        other = write(tmp_path / "run", **{**OPTIONS, "rows": 101})
    elif what == "versions of deltad":
        monkeypatch.setattr(shards, "__version__", "0.0.0")
    total = 3 if what == "numbers of shards" else 2
    theirs = written(other, tmp_path / "b", total, lambda d, **how: rate_table(d, asked, **how))
    with pytest.raises(QuestionError, match=rf"a/1.parquet and .*b/2.parquet are of .*{what}"):
        Shards([ours[0], theirs[1]])


def metadata(change: Callable[[dict[str, Any]], Any]) -> Callable[[pa.Table], pa.Table]:
    """A table whose metadata are changed."""

    def edit(table: pa.Table) -> pa.Table:
        said = json.loads(table.schema.metadata[METADATA_KEY])
        return table.replace_schema_metadata({METADATA_KEY: json.dumps(change(said))})

    return edit


def arrays(change: Callable[[dict[str, Any]], Any]) -> Callable[[pa.Table], pa.Table]:
    """A table in which the arrays of every span and point are changed."""

    def edit(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        for row in rows:
            found = dict(np.load(io.BytesIO(row["arrays"])))
            np.savez(file := io.BytesIO(), **(change(found) or found))
            row["arrays"] = file.getvalue()
        return pa.Table.from_pylist(rows, SCHEMA.with_metadata(table.schema.metadata))

    return edit


def first(name: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    """A table in which every array of a name begins with a value."""
    return arrays(lambda found: found[name].__setitem__(slice(1), value))


def without(name: str) -> Callable[[pa.Table], pa.Table]:
    """A table without an array."""
    return arrays(lambda found: {key: each for key, each in found.items() if key != name})


DAMAGES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "another file": (lambda table: table.replace_schema_metadata({}), "is no shard"),
    "another format": (metadata(lambda said: {**said, "format": 2}), "of format 3, found 2"),
    "no object": (metadata(lambda said: []), r"found \[\]"),
    "no share": (metadata(lambda said: {**said, "share": [1]}), "is malformed"),
    "objects": (
        arrays(lambda found: {**found, "keep": found["keep"].astype(object)}),
        "malformed .*Object arrays cannot be loaded",
    ),
    "no arrays": (
        lambda table: pa.Table.from_pylist(
            [{**row, "arrays": b"PK"} for row in table.to_pylist()], table.schema
        ),
        "is malformed",
    ),
    "a span twice": (lambda table: pa.concat_tables([table, table.slice(0, 1)]), "there twice"),
    "a span too few": (
        lambda table: table.filter(pa.array([row != 0 for row in table["span"].to_pylist()])),
        "does not hold its share of the spans",
    ),
    "no decisions": (without("keep"), "malformed .*keep"),
    "no ΔD": (without("column delta_d"), "malformed .*delta_d"),
    "ΔD that is infinite": (first("column delta_d", np.inf), "impossible ΔD or weight"),
    "a weight below 1": (first("column weight", 0.5), "impossible ΔD or weight"),
    "fewer than no tokens": (first("counts", -5), "impossible counts"),
    "fewer outside than there are": (first("totals", -1), "impossible counts"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(dump: Dump, tmp_path: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    (path,) = written(dump, tmp_path, 1)
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(DumpError, match=words) as raised:
        Shards([path])
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(dump: Dump, tmp_path: Path) -> None:
    (path,) = written(dump, tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DumpError, match="cannot be read as Parquet"):
        Shards([path])
    with pytest.raises(DumpError, match="is no shard"):
        Shards(part_files(Path(str(dump.path)))[:1])
    with pytest.raises(FileNotFoundError, match=r"nothing.parquet does not exist"):
        Shards([tmp_path / "nothing.parquet"])


@pytest.mark.parametrize(
    "text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "a/b", "1.0/3", "\u0661/\u0662"]
)
def test_a_share_must_be_one_of_several(text: str) -> None:
    with pytest.raises(QuestionError, match="1 ≤ I ≤ N"):
        Share.parse(text)


def test_a_share_is_written_as_it_is_read() -> None:
    for number, total in itertools.combinations_with_replacement(range(1, 5), 2):
        assert Share.parse(str(Share(number, total))) == (number, total)
