"""Shares of a table give the very table; anything that does not make up one is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltad.analysis import Question, QuestionError, protocol_table, rate_table
from deltad.analysis import engine as engine_module
from deltad.analysis.partial_files import METADATA_KEY, PARTIAL_SCHEMA, Share, read_partial
from deltad.analysis.partials import merge_partials, write_partial
from deltad.dumps import Dump, DumpError
from tests.dumps.factory import make_dump, part_files


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump whose pairs disagree, of several files a seed, with rows without vectors."""
    made = make_dump(
        tmp_path_factory.mktemp("shares") / "run", rows=150, drift=1.5, seeds=(-3, 0, 12),
        null_vectors=0.1,
    )  # fmt: skip
    return Dump.open(made)


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several spans a file, as of large files."""
    defaults = {"least_rows": 16}
    monkeypatch.setattr(engine_module.spans_of, "__kwdefaults__", defaults)


def write(
    dump: Dump, folder: Path, total: int, question: Question | None = None, **options: Any
) -> list[Path]:
    """All shares of a dump."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number}.parquet" for number in range(1, total + 1)]
    for number, path in enumerate(paths, start=1):
        with path.open("wb") as file:
            write_partial(dump, question or Question(), Share(number, total), file, **options)
    return paths


def same(one: Any, other: Any) -> bool:
    """Whether two tables are equal to the bit, the tokens' ΔD too."""
    ours, theirs = getattr(one, "tables", (one,)), getattr(other, "tables", (other,))
    return one.to_json_object() == other.to_json_object() and all(
        np.array_equal(a.delta_d(side), b.delta_d(side))
        for a, b in zip(ours, theirs, strict=True)
        for side in ("criterion", "baseline")
    )


@pytest.mark.parametrize("total", [1, 2, 7, 50])
def test_all_shares_in_any_order_give_the_very_table(
    dump: Dump, tmp_path: Path, total: int
) -> None:
    paths = write(dump, tmp_path, total)
    whole = rate_table(dump, bootstrap_seed=3)
    assert whole.criterion.kept
    assert same(merge_partials(paths[::-1], bootstrap_seed=3), whole)


@pytest.mark.parametrize("question", [Question(protocol="own"), Question(0.02, "tv")])
def test_every_question_goes_along(dump: Dump, tmp_path: Path, question: Question) -> None:
    assert same(merge_partials(write(dump, tmp_path, 3, question)), rate_table(dump, question))


def test_all_protocols_go_along_with_those_refused(dump: Dump, tmp_path: Path) -> None:
    merged = merge_partials(write(dump, tmp_path, 3, every=True))
    assert same(merged, protocol_table(dump))


def test_a_partial_says_what_it_is_of(dump: Dump, tmp_path: Path) -> None:
    path = write(dump, tmp_path, 2)[1]
    table = pq.read_table(path)
    assert table.schema.equals(PARTIAL_SCHEMA)
    described = json.loads(table.schema.metadata[METADATA_KEY])
    assert (described["format"], described["share"]) == (1, [2, 2])
    assert described["questions"][0]["threshold"] == 0.15
    files = {(part.arm, part.seed, part.rank, part.part): part for part in dump.files("none")}
    for row in table.to_pylist():
        part = files[row["arm"], row["seed"], row["rank"], row["part"]]
        assert row["bytes"] == part.path.stat().st_size
    found = read_partial(path)
    assert (found.share, len(found.spans)) == (Share(2, 2), table.num_rows)


def test_progress_counts_the_rows_of_the_share(dump: Dump, tmp_path: Path) -> None:
    rows: list[int] = []
    write(dump, tmp_path, 3, progress=rows.append)
    assert sum(rows) == sum(part.rows for part in dump.files("none"))


def test_missing_shares_are_named(dump: Dump, tmp_path: Path) -> None:
    paths = write(dump, tmp_path, 4)
    with pytest.raises(QuestionError, match="missing are the shares 2/4, 4/4: count"):
        merge_partials([paths[0], paths[2]])
    with pytest.raises(QuestionError, match="at least one"):
        merge_partials([])
    with pytest.raises(QuestionError, match=r"shares 2/30, .*, 9/30 and 21 more"):
        merge_partials(write(dump, tmp_path / "many", 30)[:1])


def test_a_share_given_twice_is_named(dump: Dump, tmp_path: Path) -> None:
    paths = write(dump, tmp_path, 2)
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(paths[0].read_bytes())
    with pytest.raises(QuestionError, match=r"1.parquet and .*copy.parquet are both share 1/2"):
        merge_partials([*paths, copy])


@pytest.mark.parametrize("what", ["questions", "dumps", "numbers of shares", "versions of deltad"])
def test_foreign_partials_are_named(
    dump: Dump, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = write(dump, tmp_path / "a", 2)
    question, total, other = Question(), 2, dump
    if what == "questions":
        question = Question(0.1)
    elif what == "numbers of shares":
        total = 3
    elif what == "dumps":  # one more row in one file
        made = make_dump(
            tmp_path / "run", rows=151, drift=1.5, seeds=(-3, 0, 12), null_vectors=0.1
        )  # fmt: skip
        other = Dump.open(made)
    else:
        monkeypatch.setattr("deltad.analysis.partial_files.__version__", "0.0.0")
    theirs = write(other, tmp_path / "b", total, question)
    with pytest.raises(
        QuestionError, match=rf"a/1.parquet and .*b/2.parquet are of different {what}"
    ):
        merge_partials([ours[0], theirs[1]])


def _edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a partial's metadata."""
    table = pq.read_table(path)
    described = json.loads(table.schema.metadata[METADATA_KEY])
    change(described)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(described)}), path)


def test_files_that_are_no_partials_are_named(dump: Dump, tmp_path: Path) -> None:
    (path,) = write(dump, tmp_path, 1)
    good = path.read_bytes()
    with pytest.raises(DumpError, match="is no partial"):
        read_partial(part_files(Path(dump.path))[0])
    path.write_bytes(good[:-20])
    with pytest.raises(DumpError, match="cannot be read as Parquet"):
        read_partial(path)
    for change, words in (
        (lambda found: found.update(format=2), "format 1, found 2"),
        (lambda found: found.pop("share"), "malformed .*share"),
        (lambda found: found["questions"][0].update(divergence="x"), "malformed .*divergence"),
    ):
        path.write_bytes(good)
        _edited(path, change)
        with pytest.raises(DumpError, match=words):
            read_partial(path)
    path.write_bytes(good)
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), path)
    with pytest.raises(DumpError, match="span twice"):
        read_partial(path)
    pq.write_table(table.slice(1), path)
    with pytest.raises(QuestionError, match="count all shares anew"):
        merge_partials([path])
    with pytest.raises(FileNotFoundError, match=r"nothing.parquet does not exist"):
        read_partial(tmp_path / "nothing.parquet")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tokens", -5, "`tokens` must be at least 0, found -5 in none, seed"),
        ("outside_increase", 10**9, "`outside_increase` must lie in"),
        ("outside_weights", [None, None], "`outside_weights` must hold no NULL"),
        ("delta_d", np.nan, "`delta_d` must be finite"),
        ("keep", None, "`keep` must hold no NULL"),
        ("weight", 0.5, "`weight` must be finite and at least 1"),
    ],
)
def test_counts_that_no_span_gives_are_refused(
    dump: Dump, tmp_path: Path, column: str, value: Any, words: str
) -> None:
    (path,) = write(dump, tmp_path, 1)
    table = pq.read_table(path)
    rows = table.to_pylist()
    row = next(row for row in rows if row["delta_d"])
    row[column] = [value, *row[column][1:]] if column in ("delta_d", "keep", "weight") else value
    changed = pa.Table.from_pylist(rows, PARTIAL_SCHEMA)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(DumpError, match=f"malformed .*{words}"):
        read_partial(path)


def test_metadata_that_is_no_object_is_named(dump: Dump, tmp_path: Path) -> None:
    (path,) = write(dump, tmp_path, 1)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: "[]"}), path)
    with pytest.raises(DumpError, match=r"must have an object as metadata, found \[\]"):
        read_partial(path)


@pytest.mark.parametrize(
    "text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "a/b", "1.0/3", "\u0661/\u0662"]
)
def test_a_share_must_be_one_of_several(text: str) -> None:
    with pytest.raises(QuestionError, match="1 ≤ I ≤ N"):
        Share.parse(text)


def test_a_share_is_written_as_it_is_read() -> None:
    for number, total in itertools.combinations_with_replacement(range(1, 5), 2):
        assert Share.parse(str(Share(number, total))) == (number, total)


def test_the_counts_of_a_share_keep_every_field(dump: Dump, tmp_path: Path) -> None:
    """What counting gives and a partial does not hold would be lost without a word."""
    from deltad.analysis.counting import ArmCounts, Judged, Tally

    (path,) = write(dump, tmp_path, 1)
    row = next(iter(read_partial(path).spans.values()))
    assert [field.name for field in dataclasses.fields(row)] == [
        "tokens", "without_vectors", "outside", "disagreement",
    ]  # fmt: skip
    kinds: tuple[Any, ...] = (ArmCounts, Tally, Judged)
    fields = sum(len(dataclasses.fields(kind)) for kind in kinds) - 2  # the two that are nested
    key = ("arm", "seed", "rank", "part", "first", "end", "bytes")
    assert len(PARTIAL_SCHEMA) - len(key) == fields
