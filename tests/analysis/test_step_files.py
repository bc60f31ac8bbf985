"""Steps are read as they appear: lines of a monitor, parts of a dump, half of either."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deltad.analysis.tables.steps import StepFiles
from deltad.dumps import Dump
from deltad.probes.sinks import JsonLines
from deltad.steps import StepQuestion, StepScalars, steps_path
from tests.dumps.factory import make_dump, part_files


def step(number: int, *, tokens: int = 4, rank: int = 0, **where: object) -> StepScalars:
    """Counts of a step."""
    place = {"arm": "actual", "seed": 0, **where}
    return StepScalars(step=number, ranks=(rank,), counts={"tokens": tokens}, **place)  # type: ignore[arg-type]


def tokens(files: StepFiles) -> dict[tuple[str, int, int], int]:
    """Tokens by arm, seed and step."""
    files.refresh()
    return {(s.arm, s.seed, s.step): s.counts["tokens"] for s in files.steps()}


def test_lines_are_read_once_and_ranks_add_up(tmp_path: Path) -> None:
    sink, files = JsonLines(tmp_path), StepFiles(tmp_path)
    assert not files.refresh()
    sink.log_step(step(0))
    assert files.refresh()
    assert not files.refresh()
    sink.log_step(step(0, tokens=3, rank=1))
    sink.log_step(step(1))
    sink.log_step(step(0, arm="none", seed=2))
    assert tokens(files) == {("actual", 0, 0): 7, ("actual", 0, 1): 4, ("none", 2, 0): 4}
    assert files.steps()[0].ranks == (0, 1)
    assert not files.problems


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    JsonLines(tmp_path).log_step(step(0))
    files = StepFiles(tmp_path)
    assert len(tokens(files)) == 1
    line = json.dumps(step(1).to_json_object()).encode() + b"\n"
    path = steps_path(tmp_path, "actual", 0, 0)
    for part in (line[:30], line[30:]):
        assert len(tokens(files)) == 1
        with path.open("ab") as file:
            file.write(part)
    assert len(tokens(files)) == 2
    assert not files.problems


def test_a_step_that_comes_again_counts_once_and_a_bad_line_is_named(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path)
    sink.log_step(step(0, tokens=4))
    path = steps_path(tmp_path, "actual", 0, 0)
    with path.open("ab") as file:
        file.write(b'{"format": 1, "arm": \n')
    sink.log_step(step(0, tokens=5))
    files = StepFiles(tmp_path)
    assert tokens(files) == {("actual", 0, 0): 5}
    assert list(files.problems) == [str(path)]


@pytest.mark.parametrize(
    "line",
    [
        b"[1]", b"7", b"null", b'"x"', b"[" * 100_000,
        b'{"format": 1, "arm": "actual", "seed": Infinity}',
    ],
)  # fmt: skip
def test_json_that_is_no_step_is_passed_over(tmp_path: Path, line: bytes) -> None:
    sink = JsonLines(tmp_path)
    sink.log_step(step(0, tokens=4))
    with steps_path(tmp_path, "actual", 0, 0).open("ab") as file:
        file.write(line + b"\n")
    files = StepFiles(tmp_path)
    assert tokens(files) == {("actual", 0, 0): 4}
    assert len(files.problems) == 1


@pytest.mark.parametrize(
    "change",
    [{"d_pre": {"999999": 3}}, {"logprobs": {"tokens": "many"}}, {"counts": {"tokens": 10**400}}],
)
def test_a_step_that_cannot_be_reckoned_with_is_passed_over(
    tmp_path: Path, change: dict[str, object]
) -> None:
    JsonLines(tmp_path).log_step(step(0, tokens=4))
    path = steps_path(tmp_path, "actual", 0, 0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    files = StepFiles(tmp_path)
    assert tokens(files) == {}
    assert len(files.problems) == 1


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    sink, files = JsonLines(tmp_path), StepFiles(tmp_path)
    for number in range(3):
        sink.log_step(step(number))
    assert len(tokens(files)) == 3
    steps_path(tmp_path, "actual", 0, 0).unlink()
    sink.log_step(step(7))
    assert [key[2] for key in tokens(files)] == [7]


def test_parts_of_a_dump_are_counted_as_they_appear(tmp_path: Path) -> None:
    whole = make_dump(tmp_path / "whole", arms=("none", "ratio"), rows=80, ranks=1, parts=2)
    run = tmp_path / "run"
    run.mkdir()
    files, seen = StepFiles(run), 0
    for path in part_files(whole):
        target = run / path.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        assert files.refresh()
        now = sum(tokens(files).values())
        assert now > seen
        seen = now
    assert not files.refresh()
    dump = Dump.open(whole)
    assert seen == sum(dump.rows(arm, seed) for arm in dump.arms for seed in dump.seeds(arm))
    assert tokens(StepFiles(whole)) == tokens(files)
    assert not files.problems


def test_responses_are_counted_whole_across_batches_of_a_file(tmp_path: Path) -> None:
    options = {"arms": ("none",), "seeds": (0,), "rows": 60, "ranks": 1, "parts": 1}
    sums = []
    for size in (7, 60):
        run = make_dump(tmp_path / str(size), row_group_size=size, **options)  # type: ignore[arg-type]
        files = StepFiles(run)
        files.refresh()
        sums.append([each.logprobs for each in files.steps()])
    assert [each.sequences for each in sums[0]] == [4, 4, 4]
    for first, second in zip(*sums, strict=True):
        assert vars(first) == pytest.approx(vars(second))


def test_a_monitors_lines_stand_for_the_parts_beside_them(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), seeds=(0, 1), rows=40, ranks=1, parts=1)
    JsonLines(run).log_step(step(0, arm="none", seed=0, tokens=1000))
    found = tokens(StepFiles(run))
    assert found[("none", 0, 0)] == 1000
    assert {key[1] for key in found} == {0, 1}
    assert sum(count for key, count in found.items() if key[1] == 1) == 40


def test_another_question_is_answered_from_the_parts(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), seeds=(0,), rows=40, ranks=1, parts=1)
    JsonLines(run).log_step(step(0, arm="none", tokens=1000))
    asked = StepFiles(run, StepQuestion(threshold=0.01))
    assert sum(tokens(asked).values()) == 40
    assert all(each.question.threshold == 0.01 for each in asked.steps())
    same = StepFiles(run, StepQuestion(masked=("binary-kl",)))
    assert tokens(same)[("none", 0, 0)] == 1000


def test_what_cannot_be_read_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), seeds=(0, 1), rows=40, ranks=1, parts=1)
    broken = run / "arm=none" / "seed=0" / "part-0-0.parquet"
    broken.write_bytes(b"PAR1 no more")
    files = StepFiles(run)
    assert {key[1] for key in tokens(files)} == {1}
    assert list(files.problems) == [str(broken)]
    make_dump(tmp_path / "run", arms=("none",), seeds=(0, 1), rows=40, ranks=1, parts=1)
    assert {key[1] for key in tokens(files)} == {0, 1}
    assert not files.problems
    narrow = StepFiles(
        make_dump(tmp_path / "thin", stored=("kl", 0.1)), StepQuestion(threshold=0.01)
    )
    assert not tokens(narrow)
    assert "stores only" in next(iter(narrow.problems.values()))
