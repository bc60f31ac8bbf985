"""Spans cover a dump, and an engine gives what its items give, in their order."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from deltad.analysis.engine import LocalEngine, by_seed, read_arms, spans_of
from deltad.dumps import Dump
from tests.dumps.factory import make_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return Dump.open(
        make_dump(
            tmp_path_factory.mktemp("engine") / "run", rows=70, seeds=(0, 3), empty_seeds=(3,)
        )
    )


@pytest.mark.parametrize("least", [1, 12, 30, 10**9])
def test_spans_hold_every_row_group_once_and_in_order(dump: Dump, least: int) -> None:
    spans = spans_of(dump, dump.arms, least_rows=least)
    for part in dump.parts:
        mine = [span for span in spans if span.part == part]
        assert [at for span in mine for at in span.groups] == list(range(len(part.groups)))
        assert sum(span.rows for span in mine) == part.rows
        assert sum(span.rows_seen for span in mine) == part.metadata.rows_seen
        assert all(span.rows >= least for span in mine[:-1])
    assert [span.part for span in spans] == sorted(
        (span.part for span in spans), key=lambda part: (part.arm, part.seed, part.rank, part.part)
    )


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_order_and_progress_tells_every_item(workers: int) -> None:
    told: list[int] = []

    def slow(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        return item * item

    found = list(LocalEngine(workers).map(slow, range(23), progress=told.append))
    assert found == [item * item for item in range(23)]
    assert told == list(range(23))


def test_no_more_than_two_items_a_worker_are_ahead_of_what_was_taken() -> None:
    begun: list[int] = []

    def note(item: int) -> int:
        begun.append(item)
        return item

    stream = LocalEngine(3).map(note, range(100))
    assert next(stream) == 0
    time.sleep(0.05)
    assert len(begun) <= 1 + 2 * 3
    stream.close()  # type: ignore[attr-defined]
    count = len(begun)
    time.sleep(0.02)
    assert len(begun) == count


@pytest.mark.parametrize("workers", [1, 4])
def test_the_first_item_that_fails_is_named_whichever_fails_first(workers: int) -> None:
    def fail(item: int) -> int:
        if item == 5:
            time.sleep(0.03)
        if item >= 5:
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match="item 5"):
        list(LocalEngine(workers).map(fail, range(40)))
    assert threading.active_count() < 40


def test_an_interruption_leaves_no_thread_behind() -> None:
    def interrupted(item: int) -> None:
        if item == 3:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        list(LocalEngine(4).map(interrupted, range(50)))
    assert threading.active_count() == before


def test_fewer_workers_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="`workers` must be at least 1, got 0"):
        LocalEngine(0)


def test_arms_are_read_by_seed_and_progress_counts_rows(dump: Dump) -> None:
    told: list[int] = []
    found = read_arms(lambda span: span.rows, dump, ["none"], progress=told.append)
    assert {key: sum(rows) for key, rows in found.items()} == {
        ("none", seed): dump.rows("none", seed) for seed in (0, 3)
    }
    assert sum(told) == sum(part.rows for part in dump.files("none"))
    spans = spans_of(dump, ["none"])
    assert by_seed(spans, [span.rows for span in spans]) == found


def test_a_damaged_file_is_the_first_one_in_order(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", rows=40, arms=("none",), seeds=(0, 1, 2))
    dump = Dump.open(run)
    for part in dump.parts[3::2]:
        part.path.write_bytes(b"PAR1" + b"\0" * 40)
    from deltad.analysis import rate_table

    for workers in (1, 3):
        with pytest.raises(ValueError, match="part-1-1") as raised:
            rate_table(dump, engine=LocalEngine(workers))
        assert str(dump.parts[3].path) in str(raised.value)
