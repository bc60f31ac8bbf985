"""Dumps behind URLs: read by ranges, written whole, and errors in one sentence."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest

from deltad.analysis import rate_table
from deltad.dumps import (
    Dump,
    DumpError,
    DumpWriter,
    Metadata,
    check_dump,
    part_batches,
    part_numbers,
    read_prompts,
    write_prompts,
)
from deltad.dumps.ranges import GAP, RangeFile, joined, row_group_ranges
from deltad.dumps.remote import RemotePath
from deltad.dumps.storage import StorageError, copy_tree, is_remote, must_be_local, place

from .factory import VECTORS, make_dump, part_files
from .object_store import ObjectStore, copy_into, point_to

METADATA = Metadata(top_k=4, vocab_size=24, temperature=0.7, model="m")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of two arms, two files a seed, with prompts."""
    made = make_dump(
        tmp_path_factory.mktemp("made") / "run", arms=["none", "ratio"], seeds=[0], ranks=1, rows=40
    )
    prompt = {"group": 0, "prompt": "2 + 2 =", "prompt_ids": [1, 2], "answer": "4"}
    write_prompts(made, seed=0, rows=[prompt])
    return made


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    """Where files may lie: in a real object store, and where an upload is renamed."""
    request.getfixturevalue(request.param)
    return {"s3": "s3://bucket/some/run", "memory": "memory://dumps/some/run"}[request.param]


def columns_of(run: Any, arm: str = "none", seed: int = 0) -> dict[str, Any]:
    batches = list(Dump.open(run).batches(arm, seed))
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0].columns}


def rows_of(run: Path) -> dict[str, Any]:
    """Rows to write: the stored ones without what the writer derives."""
    return columns_of(run)


def remote(url: str) -> RemotePath:
    found: Any = place(url)
    assert isinstance(found, RemotePath)
    return found


def names_in(url: str) -> list[str]:
    """Every file that readers look at under a URL, asked for past the code that is tested."""
    found = remote(url)
    found.fs.invalidate_cache()
    names = sorted(name.partition("some/run/")[2] for name in found.fs.find(found.path))
    return [name for name in names if not name.startswith("_")]


def asides() -> set[str]:
    return {each.name for each in Path(tempfile.gettempdir()).glob("_writing.*")}


def test_a_path_stays_a_path(run: Path) -> None:
    assert place(str(run)) == run
    assert place(run) is run
    assert place(f"file://{run}") == run


def test_a_url_is_taken_as_text_or_with_its_options(memory: str) -> None:
    found = remote(f"{memory}/run/")
    assert is_remote(found)
    assert str(found) == f"{memory}/run"
    assert place(found) is cast(Any, found)
    assert pickle.loads(pickle.dumps(found)) == found
    inner = found / "arm=a" / "seed=0"
    assert (inner.name, inner.parent.name, str(inner.relative_to(found))) == (
        "seed=0", "arm=a", "arm=a/seed=0",
    )  # fmt: skip
    with pytest.raises(ValueError, match="does not lie in"):
        found.relative_to(inner)
    from upath import UPath

    assert place(cast(Any, UPath("memory://dumps/run", anon=True))).exists() is False
    with pytest.raises(StorageError, match=r"'s3:/bucket/run' has one slash .* as text"):
        place(Path("s3://bucket/run"))
    with pytest.raises(StorageError, match="a log needs a folder"):
        must_be_local(place(found), "a log")
    must_be_local(Path("x"), "a log")


def test_a_dump_behind_a_url_is_the_dump(run: Path, url: str) -> None:
    copy_tree(run, place(url))
    here, there = Dump.open(run), Dump.open(url)
    assert (there.arms, there.seeds("none"), there.rows_seen("none", 0)) == (
        here.arms, here.seeds("none"), here.rows_seen("none", 0),
    )  # fmt: skip
    assert check_dump(url) == []
    found = columns_of(url)
    for name, values in columns_of(run).items():
        np.testing.assert_array_equal(found[name], values)
    assert read_prompts(url, seed=0) == read_prompts(run, seed=0)
    assert rate_table(there).to_json_object() == rate_table(here).to_json_object()


def test_only_the_wanted_columns_are_fetched(s3: ObjectStore, tmp_path: Path) -> None:
    """No byte of another column crosses the line, but for the little that a gap may hold."""
    made = make_dump(
        tmp_path / "run", arms=["none"], seeds=[0], rows=12_000, top_k=20, vocab_size=64,
        ranks=1, parts=1, row_group_size=6_000, optional=[],
    )  # fmt: skip
    (file,) = part_files(made)
    copy_into(made, "s3://bucket/run")
    dump = Dump.open("s3://bucket/run")
    s3.requests.clear()
    wanted = ["step", "topk_behavior_logprobs"]
    rows = sum(len(batch) for batch in dump.batches("none", 0, columns=wanted))
    assert rows == 12_000
    footer = pq.read_metadata(file)
    needed = {"step", "topk_behavior_logprobs", "topk_ids"}  # the ids tell the padding
    groups = row_group_ranges(footer, needed)
    unwanted = [
        (start, stop)
        for name in set(VECTORS) - needed
        for group in row_group_ranges(footer, {name})
        for start, stop in group
    ]
    end = max(stop for group in row_group_ranges(footer, set(VECTORS)) for _, stop in group)
    asked = [
        tuple(map(int, each[2].removeprefix("bytes=").split("-")))
        for each in s3.requests
        if each[2]
    ]
    data = [(first, last + 1) for first, last in asked if first < end and last < end]
    assert sorted(data) == sorted(each for group in groups for each in group)
    for first, last in data:
        for start, stop in unwanted:
            assert min(last, stop) - max(first, start) <= GAP
    most = sum(stop - start for group in groups for start, stop in group)
    assert s3.sent(".parquet") <= most + 2 * 65_536  # and the footer
    assert s3.sent(".parquet") < 0.7 * file.stat().st_size
    assert len(asked) == len(data) + 1


def test_some_row_groups_are_read_alone(s3: ObjectStore, tmp_path: Path) -> None:
    made = make_dump(
        tmp_path / "run", arms=["none"], seeds=[0], rows=9_000, top_k=8, ranks=1, parts=1,
        row_group_size=3_000, optional=[],
    )  # fmt: skip
    copy_into(made, "s3://bucket/run")
    (part,) = Dump.open("s3://bucket/run").parts
    s3.requests.clear()
    batches = list(part_batches(part, groups=range(1, 2)))
    assert [batches[0].first_row, sum(map(len, batches))] == [3_000, 3_000]
    assert s3.sent(".parquet") < 0.6 * part_files(made)[0].stat().st_size + 65_536


def test_ranges_are_read_wherever_they_lie(memory: str) -> None:
    content = np.arange(1_000, dtype=np.uint8).tobytes()
    path = remote(f"{memory}/file")
    path.write_bytes(content)
    with RangeFile(path) as file:
        file.plan([[(0, 100), (300, 400)], [(500, 600)]])
        for start, size in ((0, 100), (310, 20), (350, 100), (550, 50), (900, 500), (5, 3)):
            file.seek(start)
            assert file.read(size) == content[start : start + size]
            assert file.tell() == min(start + size, 1_000)
        assert file.seek(-10, os.SEEK_END) == 990
        assert file.read() == content[990:]
        assert file.read() == b""
    with path.open() as whole:
        assert whole.read() == content
    with pytest.raises(ValueError, match="'rb'"):
        path.open("w")
    assert joined([(10, 20), (0, 5), (22, 30)], gap=2) == [(0, 5), (10, 30)]


def test_a_file_appears_whole_or_not_at_all(run: Path, url: str) -> None:
    rows, before = rows_of(run), asides()
    with DumpWriter(url, arm="a", seed=0, metadata=METADATA, rows_per_part=30) as writer:
        writer.append({name: values[:20] for name, values in rows.items()})
        assert names_in(url) == []
        writer.append({name: values[20:] for name, values in rows.items()})
    parts = ["arm=a/seed=0/part-0-0.parquet", "arm=a/seed=0/part-0-1.parquet"]
    assert names_in(url) == ["arm=a/seed=0/_ended-0-2", *parts]
    assert [str(path) for path in writer.paths] == [f"{url}/{name}" for name in parts]
    for name, values in columns_of(url, "a").items():
        if name in rows:
            np.testing.assert_array_equal(values, rows[name])
    assert check_dump(url) == []
    assert asides() == before


def test_what_is_there_is_refused_replaced_or_followed(run: Path, memory: str) -> None:
    url = f"{memory}/some/run"

    def write(count: int, **options: Any) -> None:
        with DumpWriter(url, arm="a", seed=0, metadata=METADATA, **options) as writer:
            writer.append({name: values[:count] for name, values in rows.items()})

    rows = rows_of(run)
    write(10)
    with pytest.raises(DumpError, match=r"run/arm=a/seed=0/part-0-0.parquet: exists already"):
        write(10)
    write(5, existing="append")
    assert part_numbers(url, arm="a", seed=0) == [0, 1]
    write(7, existing="replace")
    assert part_numbers(url, arm="a", seed=0) == [0]
    assert Dump.open(url).rows("a", 0) == 7


def test_of_two_writers_of_a_file_the_second_is_refused(run: Path, url: str) -> None:
    """Also where neither saw the other's file when it began."""
    rows = rows_of(run)
    writers = [DumpWriter(url, arm="a", seed=0, metadata=METADATA) for _ in range(2)]
    for writer in writers:
        writer.append(rows)
    writers[0].close()
    with pytest.raises(DumpError, match="another writer has put it there"):
        writers[1].close()
    assert names_in(url) == ["arm=a/seed=0/_ended-0-1", "arm=a/seed=0/part-0-0.parquet"]


def test_the_store_itself_refuses_what_came_meanwhile(
    s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "file"
    local.write_bytes(b"second")
    target = remote("s3://bucket/run/arm=a/seed=0/part-0-0.parquet")
    target.write_bytes(b"first")
    monkeypatch.setattr(RemotePath, "exists", lambda self: False)  # as if it came just now
    with pytest.raises(FileExistsError, match="part-0-0"):
        target.upload(local, beside=target, replace=False)
    assert target.read_bytes() == b"first"
    target.upload(local, beside=target, replace=True)
    assert target.read_bytes() == b"second"


def test_what_was_begun_leaves_nothing(run: Path, memory: str) -> None:
    url = f"{memory}/some/run"
    before = asides()
    writer = DumpWriter(url, arm="a", seed=0, metadata=METADATA)
    writer.append(rows_of(run))
    writer.abort()
    left = DumpWriter(url, arm="a", seed=0, metadata=METADATA, rows_per_group=10)
    left.append(rows_of(run))
    assert len(asides() - before) == 1  # as after a crash
    DumpWriter(url, arm="a", seed=0, metadata=METADATA).abort()
    assert (names_in(url), asides()) == ([], before)


def test_a_failed_upload_leaves_the_place_empty(
    run: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    url = f"{memory}/some/run"
    writer = DumpWriter(url, arm="a", seed=0, metadata=METADATA)
    writer.append(rows_of(run))

    def fail(*arguments: Any, **options: Any) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "mv", fail)
    with pytest.raises(StorageError, match=r"part-0-0.parquet cannot be reached \(no answer\)"):
        writer.close()
    assert names_in(url) == []


def test_a_bucket_that_is_not_there_is_named(s3: ObjectStore) -> None:
    with pytest.raises(FileNotFoundError, match="s3://nobucket/run does not exist"):
        Dump.open("s3://nobucket/run")
    with pytest.raises(FileNotFoundError, match=r"s3://nobucket/run: .*bucket does not exist"):
        DumpWriter("s3://nobucket/run", arm="a", seed=0, metadata=METADATA)


def test_missing_permission_is_said_at_once(s3: ObjectStore, run: Path) -> None:
    copy_into(run, "s3://bucket/run")
    s3.denied = "PUT"
    with pytest.raises(StorageError, match=r"s3://bucket/new may not be .*credentials"):
        DumpWriter("s3://bucket/new", arm="a", seed=0, metadata=METADATA)
    dump = Dump.open("s3://bucket/run")
    s3.denied = "GET HEAD"
    with pytest.raises(StorageError, match=r"s3://bucket/run may not be .*credentials"):
        Dump.open("s3://bucket/run")
    with pytest.raises(StorageError, match=r"part-0-0.parquet may not be .*credentials"):
        list(dump.batches("none", 0))


def test_a_server_that_does_not_answer_is_no_fault_of_the_dump(
    s3: ObjectStore, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_into(run, "s3://bucket/run")
    dump = Dump.open("s3://bucket/run")
    point_to(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"s3://bucket/run cannot be reached \(Could not"):
        check_dump("s3://bucket/run", strict=False)
    here = pickle.loads(pickle.dumps(dump))  # as a worker gets it
    with pytest.raises(StorageError, match="cannot be reached"):
        list(here.batches("none", 0))


@pytest.mark.parametrize(
    ("url", "missing", "words"),
    [
        ("s3://bucket/run", "s3fs", r"pip install 'deltad\[remote\]'$"),
        ("gs://bucket/run", "gcsfs", r"pip install 'deltad\[remote\]' gcsfs$"),
        ("nonsense://bucket/run", "", "Protocol not known: nonsense"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, missing: str, words: str
) -> None:
    known = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(known._registry, url.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(StorageError, match=words):
        place(url)


@pytest.mark.parametrize("url", ["memory://", "s3://", "s3:///"])
def test_a_url_that_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match=rf"^{url} names no place: give a folder after"):
        place(url)


def test_whatever_a_stores_library_says_first_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **options: object) -> None:
        raise OSError("no library " + "to be found " * 99)

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(StorageError, match=r"^hdfs://x/y cannot be used \(no library") as caught:
        place("hdfs://x/y")
    assert len(str(caught.value)) < 250


def test_strays_and_gaps_are_seen_there_too(run: Path, memory: str) -> None:
    url = f"{memory}/some/run"
    copy_tree(run / "arm=none" / "seed=0", place(url) / "arm=none" / "seed=0")
    (place(url) / "arm=none" / "seed=0" / "part-0-0.parquet").unlink()
    (place(url) / "arm=none" / "notes.txt").write_bytes(b"x")
    (place(url) / "_notes").write_bytes(b"x")
    problems = [str(each) for each in check_dump(url, strict=False)]
    assert [each.removeprefix(f"{url}/").partition(": ")[0] for each in problems] == [
        "arm=none/notes.txt", "arm=none/seed=0/part-0-0.parquet",
    ]  # fmt: skip
    with pytest.raises(DumpError, match="must be a folder, found a file"):
        Dump.open(f"{url}/_notes")


def test_a_damaged_file_is_the_dumps_fault(run: Path, memory: str) -> None:
    url = f"{memory}/some/run"
    copy_tree(run / "arm=none" / "seed=0", place(url) / "arm=none" / "seed=0")
    broken = place(url) / "arm=none" / "seed=0" / "part-0-0.parquet"
    content = bytearray(broken.read_bytes())
    content[8:64] = b"\0" * 56
    broken.write_bytes(bytes(content))
    with pytest.raises(DumpError, match=r"part-0-0.parquet: cannot be read as Parquet"):
        list(Dump.open(url).batches("none", 0))
