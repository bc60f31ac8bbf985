"""A recording that has not ended, and a file that was lost after its end, are noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deltad.dumps import Dump, DumpError, DumpWriter, check_dump, is_recorded, unfinished
from deltad.dumps.unfinished import drop_parts, leave_end_note

from .recording import ARMS, OPTIONS, batches, contents, metadata, record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record(tmp_path / "RUN", 0)
    return tmp_path / "RUN"


def writer(run: Path, existing: str) -> DumpWriter:
    options = {**OPTIONS, "existing": existing}
    return DumpWriter(run, arm="none", seed=0, metadata=metadata("none"), **options)


def notes(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "arm=none/seed=0").glob("_*"))


def test_a_recording_that_has_ended_says_how_many_files_it_wrote(run: Path) -> None:
    assert notes(run) == ["_ended-0-3"]
    assert all(is_recorded(run, arm=arm, seed=0) for arm in ARMS)
    assert (Dump.open(run).unfinished, Dump.open(run).unfinished_text) == ((), "")


@pytest.mark.parametrize("lost", [(2,), (1, 2), (0, 1, 2)])
def test_files_lost_at_the_end_are_named(run: Path, lost: tuple[int, ...]) -> None:
    for number in lost:
        (run / f"arm=none/seed=0/part-0-{number}.parquet").unlink()
    first = run / f"arm=none/seed=0/part-0-{lost[0]}.parquet"
    with pytest.raises(DumpError, match="rank 0 wrote 3 files") as caught:
        Dump.open(run)
    assert caught.value.problem.path == str(first)
    assert [problem.path for problem in check_dump(run, strict=False)] == [str(first)]
    assert not is_recorded(run, arm="none", seed=0)
    with pytest.raises(DumpError, match="none can follow"):
        writer(run, "append")
    assert not unfinished(run)
    record(run, 0)
    assert check_dump(run) == []


def test_a_rank_whose_files_are_all_lost_is_named(run: Path) -> None:
    (run / "arm=none/seed=0/_ended-1-1").touch()
    with pytest.raises(DumpError, match="rank 1 wrote 1 files") as caught:
        Dump.open(run)
    assert caught.value.problem.path.endswith("part-1-0.parquet")


def test_seeds_and_arms_may_be_copied_or_removed(run: Path, tmp_path: Path) -> None:
    record(run, 1)
    shutil.copytree(run / "arm=none/seed=1", tmp_path / "some/arm=none/seed=1")
    shutil.rmtree(run / "arm=none/seed=0")
    for folder in (run, tmp_path / "some"):
        assert Dump.open(folder).unfinished == ()


def test_appending_counts_on_and_replacing_counts_anew(run: Path) -> None:
    with writer(run, "append") as appended:
        assert notes(run) == ["_ended-0-3"]
        for rows in list(batches(1))[:5]:
            appended.append({**rows, "step": rows["step"] + 100})
    assert notes(run) == ["_ended-0-5"]
    with writer(run, "replace") as replaced:
        assert notes(run) == []
        replaced.append(next(batches()))
    assert notes(run) == ["_ended-0-1"]


def test_parts_that_are_dropped_were_never_written(run: Path) -> None:
    folder = run / "arm=none/seed=0"
    drop_parts(folder, 0, 3)
    assert notes(run) == ["_ended-0-3"]
    drop_parts(folder, 0, 1)
    assert notes(run) == ["_ended-0-1"]
    assert len(Dump.open(run).files("none")) == 1
    assert Dump.open(run).unfinished == ()
    drop_parts(folder, 0)
    assert not list(folder.iterdir())


def test_what_was_killed_is_said_in_one_sentence(run: Path) -> None:
    whole = contents(run)
    appended = writer(run, "append")
    for rows in batches(1):
        appended.append({**rows, "step": rows["step"] + 100})
    appended._closed = True  # as a kill leaves it
    assert len(contents(run)) == len(whole) + 2
    assert Dump.open(run).unfinished == (("none", 0),)
    assert Dump.open(run).unfinished_text == "recording has not ended in arm none, seed 0"
    (note,) = unfinished(run)
    note.take()  # and where only the seed's folder was copied
    assert Dump.open(run).unfinished == (("none", 0),)


def test_files_without_the_end_note_of_their_writer_are_unfinished(run: Path) -> None:
    for seed in range(1, 8):
        shutil.copytree(run / "arm=none/seed=0", run / f"arm=none/seed={seed}")
        leave_end_note(run / f"arm=none/seed={seed}", 0, 0)
    leave_end_note(run / "arm=other/seed=0", 0, 0)
    dump = Dump.open(run)
    assert dump.unfinished_text == (
        "recording has not ended in arm none, seeds 1, 2, 3, 4, 5 and 2 more; arm other, seed 0"
    )
    problems = check_dump(run, strict=False)
    assert {problem.kind for problem in problems} == {"unfinished"}
    assert [problem.path for problem in problems[-1:]] == [str(run / "arm=other/seed=0")]
    assert len(problems) == 8


def test_dumps_of_writers_without_end_notes_stay_readable() -> None:
    dump = Dump.open(Path(__file__).parents[2] / "data_dumps" / "tiny")
    assert dump.unfinished == ()
