"""Counting on Ray: the same bits, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltad.analysis import Question, rate_table
from deltad.analysis import ray_engine as module
from deltad.analysis.engine import Span, spans_of
from deltad.analysis.kernel import ArmCounter
from deltad.analysis.ray_engine import EngineError, RayEngine
from deltad.analysis.tables import table_of
from deltad.dumps import Dump, DumpError
from tests.dumps.factory import edit_value, make_dump, part_files


@dataclass(frozen=True)
class Deadly:
    """Counts, but kills its own process in the midst of one span, the first `times`."""

    counter: ArmCounter
    folder: Path
    victim: Span
    times: int = 1

    def __call__(self, span: Span) -> Any:
        """Count, or die."""
        found = self.counter(span)
        if span == self.victim:
            for number in range(self.times):
                try:
                    (self.folder / f"died-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose pairs disagree, of a dozen files."""
    return make_dump(tmp_path_factory.mktemp("ray") / "run", rows=150, drift=1.5, seeds=(0, 1, 2))


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    """Two workers on this machine."""
    with RayEngine(workers=2) as made:
        sys.modules["ray"].cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield made


@pytest.mark.slow
@pytest.mark.ray
def test_the_table_is_the_single_machines(run: Path, engine: RayEngine) -> None:
    dump = Dump.open(run)
    for question in (Question(), Question(0.02, "tv"), Question(protocol="own")):
        rows: list[int] = []
        local = rate_table(dump, question)
        there = rate_table(dump, question, engine=engine, progress=rows.append)
        assert there.to_json_object() == local.to_json_object()
        for side in ("criterion", "baseline"):
            assert there.delta_d(side).tobytes() == local.delta_d(side).tobytes()
        arms = question.resolve(dump).arms
        assert sum(rows) == sum(part.rows for arm in arms for part in dump.files(arm))


@pytest.mark.slow
@pytest.mark.ray
def test_a_worker_that_is_killed_changes_nothing(
    run: Path, engine: RayEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dump = Dump.open(run)
    resolved = Question().resolve(dump)
    spans = spans_of(dump, resolved.arms)
    counter = ArmCounter(Question())
    found = list(engine.map(Deadly(counter, tmp_path, spans[4]), spans))
    assert (tmp_path / "died-0").exists()
    grouped: dict[tuple[str, int], list[Any]] = {}
    for span, each in zip(spans, found, strict=True):
        grouped.setdefault((span.part.arm, span.part.seed), []).append(each)
    counted = {key: type(each[0]).joined(each) for key, each in grouped.items()}
    assert table_of(resolved, counted).to_json_object() == rate_table(dump).to_json_object()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.ray
def test_a_file_on_which_every_worker_dies_is_named(
    run: Path, engine: RayEngine, tmp_path: Path
) -> None:
    spans = spans_of(Dump.open(run), ["none"])
    deadly = Deadly(ArmCounter(Question()), tmp_path, spans[2], times=99)
    with pytest.raises(DumpError, match="was lost each of 4 times") as caught:
        list(engine.map(deadly, spans))
    assert caught.value.problem.path == str(spans[2].part.path)
    assert len(list(tmp_path.iterdir())) == module.RETRIES + 1


@pytest.mark.slow
@pytest.mark.ray
def test_a_poisoned_file_is_named_as_on_one_machine(engine: RayEngine, tmp_path: Path) -> None:
    made = make_dump(tmp_path / "run", rows=60, ranks=1, arms=["none"])
    edit_value(part_files(made)[1], "pre_logprob", 3, 0.5)
    dump = Dump.open(made)
    with pytest.raises(DumpError) as here:
        rate_table(dump)
    with pytest.raises(DumpError) as there:
        rate_table(dump, engine=engine)
    assert str(there.value) == str(here.value)
    assert "part-0-1.parquet, row 3, column `pre_logprob`" in str(here.value)


@pytest.mark.slow
@pytest.mark.ray
def test_workers_of_another_version_are_refused(
    run: Path, engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "__version__", "9.9.9")
    with pytest.raises(EngineError, match=r"workers have deltad .*, and 9\.9\.9 asks them"):
        list(engine.map(str, [1, 2]))


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'deltad\[ray\]'"):
        RayEngine()


def test_the_command_says_so_in_a_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.test_cli import assert_refused, deltad

    monkeypatch.setitem(sys.modules, "ray", None)
    assert_refused(deltad("table", run, "--engine", "ray"), 2, "pip install 'deltad[ray]'")
