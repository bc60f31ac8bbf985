"""Shards of a table: together they give what one run gives, and nothing else is taken for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.commands.app import COUNTING, assert_refused, counted, deltad
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose criteria disagree, with rows without top-K log-probs."""
    return make_dump(
        tmp_path_factory.mktemp("shards") / "run", rows=120, drift=1.5, null_vectors=0.1,
        arms=("none", "ratio"),
    )  # fmt: skip


def shards(run: Path, folder: Path, name: str = "table", *options: object) -> list[Path]:
    """Three shards, the middle one last."""
    paths = []
    for number in (1, 3, 2):
        paths.append(folder / f"{name}-{number}.parquet")
        done = counted(name, run, *options, "--shard", f"{number}/3", "-o", paths[-1])
        assert (done.exit_code, done.stdout) == (0, ""), done.output
    return paths


@pytest.mark.parametrize("name", COUNTING)
def test_shards_give_what_one_run_gives(run: Path, tmp_path: Path, name: str) -> None:
    paths = shards(run, tmp_path, name)
    _, *options = COUNTING[name]
    for form in ("json", "text", "csv"):
        together = deltad(COUNTING[name][0], *paths, *options, "--format", form)
        alone = counted(name, run, "--format", form)
        assert (together.exit_code, together.stdout) == (0, alone.stdout), together.output
        assert together.stderr == alone.stderr


def test_figures_and_other_intervals_are_made_of_the_same_shards(run: Path, tmp_path: Path) -> None:
    paths = shards(run, tmp_path)
    figure = tmp_path / "figure.png"
    assert deltad("figure4", *paths, "-o", figure).exit_code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    ours, theirs = (
        deltad("table", *given, "--bootstrap-seed", 5, "--power", "--points", 30).stdout
        for given in (paths, [run])
    )
    assert ours == theirs


def test_options_of_the_question_are_given_again(run: Path, tmp_path: Path) -> None:
    asked = ("--threshold", 0.05, "--divergence", "tv", "--protocol", "shared:ratio")
    paths = shards(run, tmp_path, "table", *asked)
    whole = deltad("table", run, *asked, "--format", "json").stdout
    assert deltad("table", *paths, *asked, "--format", "json").stdout == whole
    assert_refused(deltad("table", *paths, *asked[:4]), 2, "other spans")
    assert_refused(deltad("table", *paths, *asked[2:]), 2, "`threshold` was 0.05, not 0.15")
    assert_refused(deltad("compare", *paths, *asked), 2, "another question")
    wider = (*asked, "--criterion", "ratio")
    assert_refused(deltad("table", *paths, *wider), 2, "`criteria` was")


def test_what_is_not_a_whole_set_is_refused(run: Path, tmp_path: Path) -> None:
    paths = shards(run, tmp_path)
    one, three, _ = paths
    assert_refused(deltad("table", one, three), 2, "missing are the shards 2/3")
    assert_refused(deltad("table", *paths, one), 2, "both shard 1/3")
    assert_refused(deltad("table", *paths, "-o", one), 2, "is what is read")
    assert_refused(deltad("table", one, tmp_path / "nothing.parquet"), 2, "does not exist")
    halves = tmp_path / "half.parquet"
    assert deltad("table", run, "--shard", "1/2", "-o", halves).exit_code == 0
    assert_refused(deltad("table", one, halves), 2, "different numbers of shards")
    other = make_dump(tmp_path / "other", rows=90, arms=("none",))
    foreign = tmp_path / "foreign.parquet"
    assert deltad("table", other, "--shard", "2/3", "-o", foreign).exit_code == 0
    assert_refused(deltad("table", one, foreign, three), 2, "different dumps")
    wide = tmp_path / "wide.parquet"
    asked = ("table", run, "--shard", "2/3", "--threshold", 0.3, "-o", wide)
    assert deltad(*asked).exit_code == 0
    assert_refused(deltad("table", one, wide, three), 2, "different questions")
    part = next(run.rglob("*.parquet"))
    assert_refused(deltad("table", part), 1, "is no shard")
    for text in ("0/3", "4/3", "1", "a/b"):
        assert_refused(deltad("table", run, "--shard", text, "-o", wide), 2, "1 ≤ I ≤ N")
    assert_refused(deltad("table", run, "--shard", "1/3"), 2, "-o FILE.parquet")
    assert_refused(deltad("table", run, "--shard", "1/3", "-o", tmp_path / "x.csv"), 2, ".parquet")
    assert_refused(deltad("figure4", run, "--shard", "1/3", "-o", tmp_path / "x.png"), 2, "table")


def test_no_damaged_byte_changes_a_table_in_silence(run: Path, tmp_path: Path) -> None:
    one, three, two = shards(run, tmp_path)
    whole = deltad("table", one, two, three, "--format", "json").stdout
    data = two.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 60)):
        two.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        done = deltad("table", one, two, three, "--format", "json")
        if done.exit_code:
            assert done.exit_code in (1, 2), (at, done.exception)
            assert done.stdout == ""
            assert len(done.stderr.splitlines()) == 1
        else:
            assert done.stdout == whole, at
    two.write_bytes(data[: len(data) // 2])
    assert_refused(deltad("table", one, two, three), 1, str(two))


def test_impossible_arrays_are_refused(run: Path, tmp_path: Path) -> None:
    one, three, two = shards(run, tmp_path)
    table = pq.read_table(two)
    changes: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
        lambda row: {**row, "arrays": b""},
        lambda row: {**row, "arrays": row["arrays"][:-3]},
        lambda row: {**row, "span": 10**6},
        lambda row: {**row, "point": 1},
    )
    for change in changes:
        rows = [change(row) if at == 0 else row for at, row in enumerate(table.to_pylist())]
        pq.write_table(table.from_pylist(rows, table.schema), two)
        assert_refused(deltad("table", one, two, three), 1, "is malformed", str(two))


@pytest.mark.ray
def test_ray_counts_as_this_machine_does(run: Path) -> None:
    for name in ("table", "compare", "ladder"):
        there = counted(name, run, "--on", "ray", "--format", "json", "--quiet")
        assert there.exit_code == 0, there.output
        assert json.loads(there.stdout) == json.loads(counted(name, run, "--format", "json").stdout)
