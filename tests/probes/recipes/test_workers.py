"""Worker processes: nothing lost when one fails, dies or is interrupted."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deltad.probes.recipes import RecipeError, WorkerError
from deltad.probes.recipes.workers import Progress, default_workers, run

from .jobs import Touch

in_process_and_in_a_worker = pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.process)]
)


def done(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("seed-")) for path in folder.glob("seed-*"))


def collect(folder: Path, *, workers: int, count: int = 5, **wrong: Any) -> list[Progress]:
    seen: list[Progress] = []
    run(Touch(folder, **wrong), range(count), workers=workers, watch=seen.append)
    return seen


@pytest.mark.parametrize(
    "workers", [0, 3, *(pytest.param(n, marks=pytest.mark.process) for n in (1, 9))]
)
def test_every_seed_is_done_once_and_prepared_once(tmp_path: Path, workers: int) -> None:
    seen = collect(tmp_path, workers=workers)
    assert done(tmp_path) == [0, 1, 2, 3, 4]
    assert sorted(each.seed for each in seen if each.done and each.seed is not None) == done(
        tmp_path
    )
    assert Progress(None, "preparing", 0.5) in seen
    assert Progress(3, "working", 0.5) in seen
    processes = {(tmp_path / f"seed-{seed}").read_text() for seed in range(5)}
    assert len(processes) <= max(1, workers)


@pytest.mark.process
def test_failing_seed_names_itself_and_spares_the_others(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"^seed 1: ZeroDivisionError at jobs.py:\d+: one over"
    ) as caught:
        collect(tmp_path, workers=2, raises=1)
    assert 0 in done(tmp_path)
    assert 1 not in done(tmp_path)
    assert "Traceback" in caught.value.__notes__[0]
    assert not list(tmp_path.glob("aside-*"))


@pytest.mark.process
def test_error_of_ours_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^seed 0: no such thing\n"):
        collect(tmp_path, workers=1, count=1, refuses=0)
    with pytest.raises(RecipeError, match=r"^cannot prepare$"):
        collect(tmp_path, workers=1, count=1, prepare_raises=True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dies": 1}, "worker at seed 1 was killed by SIGKILL, as happens where memory runs out"),
        ({"quits": 1}, "worker at seed 1 ended with exit status 7"),
    ],
)
def test_worker_that_dies_is_named_and_the_others_finish(
    tmp_path: Path, wrong: dict[str, int], message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        collect(tmp_path, workers=2, **wrong)
    assert 0 in done(tmp_path)
    assert 1 not in done(tmp_path)


@pytest.mark.process
def test_interruption_stops_the_workers_and_clears_what_they_had_begun(tmp_path: Path) -> None:
    """As Ctrl-C does: KeyboardInterrupt in the parent, while a worker is in the middle."""

    def watch(message: Progress) -> None:
        if message.seed == 1 and not message.done:
            while not (tmp_path / "hanging").exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    before = threading.active_count()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(Touch(tmp_path, hangs=1), range(3), workers=1, watch=watch)
    assert time.monotonic() - began < 30
    assert done(tmp_path) == [0]
    assert not list(tmp_path.glob("aside-*"))
    assert threading.active_count() == before


@in_process_and_in_a_worker
@pytest.mark.parametrize(
    ("wrong", "message"),
    [("refuses", "seed 2: no such thing"), ("raises", "seed 2: ZeroDivisionError at jobs.py")],
)
def test_failures_look_the_same_in_this_process_and_in_a_worker(
    tmp_path: Path, workers: int, wrong: str, message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        collect(tmp_path, workers=workers, **{wrong: 2})
    assert done(tmp_path) == [0, 1]


@in_process_and_in_a_worker
def test_preparation_that_is_refused_is_the_recipes_error(tmp_path: Path, workers: int) -> None:
    with pytest.raises(RecipeError, match="cannot prepare"):
        collect(tmp_path, workers=workers, prepare_raises=True)
    assert done(tmp_path) == []


def test_default_is_the_cores_that_may_be_used() -> None:
    assert default_workers() >= 1
