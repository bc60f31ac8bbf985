"""Spans cover a dump, and a backend gives what its items give, in their order, on Ray too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltad.analysis import (
    BackendError,
    LocalBackend,
    Question,
    RayBackend,
    backends,
    compare,
    rate_table,
)
from deltad.analysis.backends import RETRIES, Span, spans_of
from deltad.analysis.reading import Ask, Outside, read
from deltad.dumps import Dump, DumpError
from deltad.masks import Rule
from tests.analysis.random_dumps import FAR, write
from tests.dumps.factory import edit_value, part_files


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump whose pairs disagree, of a dozen files, a seed without rows among them."""
    return write(
        tmp_path_factory.mktemp("backends") / "run", rows=150, drift=1.5, seeds=(0, 1, 3),
        empty_seeds=(3,), arms=("none", "ratio", "predictive-kl-aggregated"),
    )  # fmt: skip


@pytest.mark.parametrize("least", [1, 12, 30, 10**9])
def test_spans_hold_every_row_group_once_and_in_order(dump: Dump, least: int) -> None:
    spans = spans_of(dump, dump.arms, least_rows=least)
    for part in dump.parts:
        mine = [span for span in spans if span.part == part]
        assert [at for span in mine for at in span.groups] == list(range(len(part.groups)))
        assert sum(span.rows for span in mine) == part.rows
        assert sum(span.rows_seen for span in mine) == part.metadata.rows_seen
        assert all(span.rows >= least for span in mine[:-1])
    keys = [(each.part.arm, each.part.seed, each.part.rank, each.part.part) for each in spans]
    assert keys == sorted(keys)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_order_and_progress_tells_every_item(workers: int) -> None:
    told: list[int] = []

    def slow(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        return item * item

    found = list(LocalBackend(workers).map(slow, range(23), progress=told.append))
    assert found == [item * item for item in range(23)]
    assert told == list(range(23))


def test_no_more_than_two_items_a_worker_are_ahead_of_what_was_taken() -> None:
    begun: list[int] = []
    stream = LocalBackend(3).map(begun.append, range(100))
    next(stream)
    time.sleep(0.05)
    assert len(begun) <= 1 + 2 * 3
    stream.close()  # type: ignore[attr-defined]
    count = len(begun)
    time.sleep(0.02)
    assert len(begun) == count


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_item_that_fails_is_named_and_no_thread_is_left(
    workers: int, error: type[BaseException]
) -> None:
    before = threading.active_count()

    def fail(item: int) -> int:
        if item == 5:
            time.sleep(0.03)
        if item >= 5:
            raise error(f"item {item}")
        return item

    with pytest.raises(error, match="item 5"):
        list(LocalBackend(workers).map(fail, range(40)))
    assert threading.active_count() == before


def test_fewer_workers_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="`workers` must be at least 1, got 0"):
        LocalBackend(0)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_damaged_file_is_the_first_one_in_order(tmp_path: Path, workers: int) -> None:
    dump = write(tmp_path / "run", rows=40, arms=("none",), seeds=(0, 1, 2))
    for part in dump.parts[3::2]:
        part.path.write_bytes(b"PAR1" + b"\0" * 40)
    with pytest.raises(ValueError, match="part-1-1") as raised:
        rate_table(dump, backend=LocalBackend(workers))
    assert str(dump.parts[3].path) in str(raised.value)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendError, match=r"pip install 'deltad\[ray\]'"):
        RayBackend()


@dataclass(frozen=True)
class Deadly:
    """Reads, but kills its own process in the midst of one span, the first `times`."""

    ask: Ask
    folder: Path
    victim: Span
    times: int = 1

    def __call__(self, span: Span) -> Any:
        """Read, or die."""
        found = self.ask(span)
        if span == self.victim:
            for number in range(self.times):
                try:
                    (self.folder / f"died-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.fixture(scope="module")
def there() -> Iterator[RayBackend]:
    """Two workers on this machine."""
    with RayBackend(workers=2) as made:
        for name in (__name__, FAR.region.__module__):
            sys.modules["ray"].cloudpickle.register_pickle_by_value(sys.modules[name])
        yield made


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_a_table_is_the_single_machines(dump: Dump, there: RayBackend) -> None:
    for question in (Question(), Question(0.02, "tv"), Question(protocol="own")):
        rows: list[int] = []
        local = rate_table(dump, question)
        found = rate_table(dump, question, backend=there, progress=rows.append)
        assert found.to_json_object() == local.to_json_object()
        for side in ("criterion", "baseline"):
            assert found.delta_d[side].tobytes() == local.delta_d[side].tobytes()
        assert sum(rows) >= sum(part.rows for part in dump.files("none"))
    criteria: list[str | Rule] = [FAR, "sequence_mask"]
    assert (
        compare(dump, criteria=criteria, backend=there).to_json_object()
        == compare(dump, criteria=criteria).to_json_object()
    )


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_a_worker_that_is_killed_changes_nothing(
    dump: Dump, there: RayBackend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ask, spans = Ask(Question(), Question().rules), spans_of(dump, ["none"])
    found = list(there.map(Deadly(ask, tmp_path, spans[4]), spans))
    assert (tmp_path / "died-0").exists()
    whole = Outside.joined(
        [outside for each in read(dump, ["none"], ask).values() for outside in each]
    )
    joined = Outside.joined([outside for each in found for outside in each])
    assert joined.columns["delta_d"].tobytes() == whole.columns["delta_d"].tobytes()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_a_file_that_kills_every_worker_is_named(
    dump: Dump, there: RayBackend, tmp_path: Path
) -> None:
    spans = spans_of(dump, ["none"])
    deadly = Deadly(Ask(Question(), Question().rules), tmp_path, spans[2], times=99)
    with pytest.raises(DumpError, match="was lost each of 4 times") as caught:
        list(there.map(deadly, spans))
    assert caught.value.problem.path == str(spans[2].part.path)
    assert len(list(tmp_path.iterdir())) == RETRIES + 1


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_a_poisoned_file_is_named_as_on_one_machine(
    there: RayBackend, tmp_path: Path
) -> None:
    dump = write(tmp_path / "run", rows=60, ranks=1, arms=["none"])
    edit_value(part_files(Path(str(dump.path)))[1], "pre_logprob", 3, 0.5)
    said = []
    for backend in (LocalBackend(), there):
        with pytest.raises(DumpError) as raised:
            rate_table(Dump.open(dump.path), backend=backend)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "part-0-1.parquet, row 3, column `pre_logprob`" in said[0]


@pytest.mark.slow
@pytest.mark.ray
def test_workers_of_another_version_are_refused(
    there: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "__version__", "9.9.9")
    with pytest.raises(BackendError, match=r"workers have deltad .*, and 9\.9\.9 asks them"):
        list(there.map(str, [1, 2]))
