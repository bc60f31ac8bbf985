"""`deltad table --share` and `deltad merge`: the table of one machine, in every form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dumps.factory import make_dump
from tests.test_cli import assert_refused, deltad


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose pairs disagree, with rows without vectors."""
    made = tmp_path_factory.mktemp("merge") / "run"
    return make_dump(made, rows=120, drift=1.5, null_vectors=0.1, arms=("none", "ratio"))


def shares(run: Path, folder: Path, *options: object) -> list[Path]:
    """Three shares, the middle one last."""
    paths = []
    for number in (1, 3, 2):
        paths.append(folder / f"share-{number}")
        done = deltad("table", run, "--share", f"{number}/3", "-o", paths[-1], *options)
        assert done.exit_code == 0, done.output
        assert done.stdout == ""
        assert f"note: share {number}/3 of" in done.stderr
    return paths


@pytest.mark.parametrize(
    "asked",
    [
        ("--format", "json"),
        ("--format", "csv"),
        ("--format", "text", "--by-seed"),
        ("--bootstrap-seed", 5),
    ],
)
def test_merge_prints_the_very_table(run: Path, tmp_path: Path, asked: tuple[object, ...]) -> None:
    merged, whole = deltad("merge", *shares(run, tmp_path), *asked), deltad("table", run, *asked)
    assert (merged.exit_code, merged.stdout) == (0, whole.stdout)
    assert merged.stderr == whole.stderr  # the note about rows without vectors
    assert "without top-K vectors" in whole.stderr


def test_options_of_the_question_go_with_the_shares(run: Path, tmp_path: Path) -> None:
    asked = ("--threshold", 0.05, "--divergence", "tv", "--protocol", "all")
    paths = shares(run, tmp_path, *asked)
    written = tmp_path / "table.json"
    assert deltad("merge", *paths, "-o", written, "--quiet").exit_code == 0
    assert written.read_text("utf-8") == deltad("table", run, *asked, "--format", "json").stdout


def test_refusals(run: Path, tmp_path: Path) -> None:
    paths = shares(run, tmp_path)
    out = tmp_path / "out"
    assert_refused(deltad("merge", *paths[:2]), 2, "missing are the shares 2/3")
    assert_refused(deltad("merge", *paths, paths[0]), 2, "both share 1/3")
    assert_refused(deltad("merge", tmp_path / "nothing"), 2, "nothing does not exist")
    out.write_text("x")
    assert_refused(deltad("merge", out), 1, "out: cannot be read as Parquet")
    share = ("table", run, "--share")
    assert_refused(deltad(*share, "1/3"), 2, "give `-o FILE`")
    assert_refused(deltad(*share, "4/3", "-o", out), 2, "1 ≤ I ≤ N")
    assert_refused(deltad(*share, "1/3", "-o", out, "--format", "json"), 2, "deltad merge")
    assert_refused(deltad("table", run, "--engine", "spark"), 2, "local, ray")
    assert_refused(deltad("table", run, "--address", "auto"), 2, "`--engine ray`")
    assert out.read_text() == "x"


def test_a_partial_is_not_written_over(run: Path, tmp_path: Path) -> None:
    paths = shares(run, tmp_path)
    before = paths[0].read_bytes()
    refused = deltad("merge", *paths, "-o", paths[0])
    assert_refused(refused, 2, f"{paths[0]} is one of the partials: name another file")
    assert paths[0].read_bytes() == before
