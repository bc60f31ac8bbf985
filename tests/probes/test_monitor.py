"""The monitor counts what the probe hands over, and training never notices it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltad.dumps import Batch, Dump, Metadata, check_dump
from deltad.masks import CriterionError
from deltad.probes import (
    JsonLines,
    Monitor,
    Recorder,
    Rows,
    TensorBoard,
    Trackio,
    UpdateProbe,
    Wandb,
    branch,
)
from deltad.steps import StepQuestion, StepScalars, count_steps, steps_path
from tests.probes.tiny import TOP_K, VOCAB, backward, batch, same_bits, surrogate, tiny, weights

THRESHOLD = 0.02


class Log:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.steps.append((step, dict(scalars)))


def train(record: Any, *, steps: int = 3, micro: int = 2) -> Any:
    """A few steps of gradient accumulation under the probe; without one for None."""
    model = tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = [batch(model, seed=seed, first_sequence=10 * seed) for seed in range(micro)]
    torch.manual_seed(3)

    def step(probe: UpdateProbe | None) -> None:
        for each in batches:
            if probe is not None:
                probe.expect(each.tokens)
            backward(surrogate(model(**each.inputs).logits, each))
        optimizer.step()
        optimizer.zero_grad()

    if record is None:
        for _ in range(steps):
            step(None)
    else:
        with UpdateProbe(model, optimizer, record) as probe:
            for _ in range(steps):
                step(probe)
    return model


def rows_of_probe() -> list[tuple[str, Rows]]:
    """What a probe hands over in three steps of two micro-batches."""
    calls: list[tuple[str, Rows]] = []
    train(lambda arm, rows: calls.append((arm, rows)))
    return calls


@pytest.fixture(scope="module")
def calls() -> list[tuple[str, Rows]]:
    return rows_of_probe()


def play(calls: list[tuple[str, Rows]], monitor: Monitor) -> None:
    """Hand recorded rows to a monitor."""
    with monitor:
        for arm, rows in calls:
            monitor(arm, rows)


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = weights(train(None))
    state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    with Monitor([Log(), JsonLines(tmp_path)]) as monitor:
        watched = weights(train(monitor))
    assert same_bits(plain, watched)
    assert torch.equal(state, torch.get_rng_state())
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]  # noqa: NPY002
    assert monitor.last["actual"].step == 2
    assert monitor.failures == 0


def test_a_monitor_before_a_recorder_counts_what_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(
        tmp_path, seed=0, metadata_for=lambda arm: Metadata(top_k=TOP_K, vocab_size=VOCAB)
    )
    log = Log()
    with Monitor(
        log, threshold=THRESHOLD, criterion="predictive-kl-uniform", vocab_size=VOCAB, then=recorder
    ) as monitor:
        train(monitor)
    assert not check_dump(tmp_path)
    dump = Dump.open(tmp_path)
    (found,) = dump.batches("actual", 0)
    steps = list(
        count_steps(found, dump.metadata("actual"), monitor.question, arm="actual", seed=0)
    )
    assert [step for step, _ in log.steps] == [0, 1, 2]
    for (_, scalars), step in zip(log.steps, steps, strict=True):
        assert scalars == pytest.approx(step.scalars())
    assert sum(scalars["deltad/outside"] for _, scalars in log.steps) > 20


def test_micro_batches_add_up_and_a_step_closes_when_the_next_begins(
    calls: list[tuple[str, Rows]],
) -> None:
    log = Log()
    monitor = Monitor(log, threshold=THRESHOLD)
    for at, (arm, rows) in enumerate(calls):
        monitor(arm, rows)
        assert len(log.steps) == at // 2
    monitor.flush()
    assert len(log.steps) == 3
    monitor.flush()
    assert len(log.steps) == 3
    tokens = [len(rows["step"]) for _, rows in calls]
    assert [scalars["deltad/tokens"] for _, scalars in log.steps] == [
        tokens[0] + tokens[1],
        tokens[2] + tokens[3],
        tokens[4] + tokens[5],
    ]


def test_a_sequence_of_rows_is_only_read(calls: list[tuple[str, Rows]]) -> None:
    frozen = [(arm, {name: values.copy() for name, values in rows.items()}) for arm, rows in calls]
    for _, rows in frozen:
        for values in rows.values():
            values.flags.writeable = False
    monitor = Monitor(Log(), on_error="raise")
    play(frozen, monitor)
    for (_, before), (_, after) in zip(calls, frozen, strict=True):
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values)


def test_other_steps_are_not_even_counted(calls: list[tuple[str, Rows]]) -> None:
    log, seen = Log(), []
    play(calls, Monitor(log, every=2, then=lambda arm, rows: seen.append(rows)))
    assert [step for step, _ in log.steps] == [0, 2]
    assert len(seen) == len(calls)


def test_arms_of_one_step_are_logged_apart() -> None:
    model = tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    each = batch(model)
    log = Log()
    with Monitor(log) as monitor, UpdateProbe(model, optimizer, monitor) as probe:

        def update(arm: str) -> None:
            probe.expect(each.tokens)
            backward(surrogate(model(**each.inputs).logits, each))
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            branch(model, optimizer, ["none", "zero-step"], update, probe=probe)
    assert [step for step, _ in log.steps] == [0, 0, 1, 1]
    names = [
        {name.split("/")[1] for name in scalars if "sums" not in name} for _, scalars in log.steps
    ]
    assert all(len(each) == 1 for each in names)
    assert {arm for each in names for arm in each} == {"none", "zero-step"}
    for _, scalars in log.steps:
        if "deltad/zero-step/tokens" in scalars:
            assert scalars["deltad/zero-step/delta_d_abs_max"] == 0


class Broken:
    """A sink that is down."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        raise OSError("no route to host")


def test_a_broken_sink_warns_once_and_the_others_go_on(calls: list[tuple[str, Rows]]) -> None:
    log = Log()
    monitor = Monitor([Broken(), log])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play(calls, monitor)
    assert [str(each.message).split(" failed")[0] for each in caught] == [
        "logging step 0 to Broken"
    ]
    assert "no route to host" in str(caught[0].message)
    assert monitor.failures == 3
    assert len(log.steps) == 3


def test_a_broken_sink_raises_if_asked(calls: list[tuple[str, Rows]]) -> None:
    with pytest.raises(OSError, match="no route"):
        play(calls, Monitor(Broken(), on_error="raise"))


def test_rows_that_cannot_be_counted_reach_the_recorder(calls: list[tuple[str, Rows]]) -> None:
    arm, rows = calls[0]
    seen = []
    monitor = Monitor(Log(), then=lambda arm, rows: seen.append(rows))
    with pytest.warns(RuntimeWarning, match="counting a step failed"):
        monitor(arm, {"step": rows["step"]})
    monitor(arm, {"step": rows["step"]})
    assert monitor.failures == 2
    assert len(seen) == 2


def test_an_error_of_the_recorder_is_raised(calls: list[tuple[str, Rows]]) -> None:
    def fail(arm: str, rows: Rows) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        play(calls, Monitor(Log(), then=fail))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ValueError, "every"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
        ({"threshold": -1.0}, CriterionError, "threshold"),
        ({"criterion": "predictive-kl-exact"}, CriterionError, "vocab_size"),
        ({"divergence": "tv", "criterion": "predictive-kl-aggregated"}, CriterionError, "TV"),
    ],
)
def test_nonsense_is_refused_before_training(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Monitor(Log(), **options)


def test_a_function_is_a_sink(calls: list[tuple[str, Rows]]) -> None:
    seen: dict[int, float] = {}
    play(
        calls,
        Monitor(lambda scalars, step: seen.update({step: scalars["mine/tokens"]}), prefix="mine"),
    )
    assert list(seen) == [0, 1, 2]


def test_json_lines_hold_every_step_by_arm_seed_and_rank(
    calls: list[tuple[str, Rows]], tmp_path: Path
) -> None:
    for rank in (0, 1):
        play(calls, Monitor(JsonLines(tmp_path), seed=4, rank=rank, on_error="raise"))
    files = [steps_path(tmp_path, "actual", 4, rank) for rank in (0, 1)]
    first, second = (
        [StepScalars.from_json_object(json.loads(line)) for line in file.read_text().splitlines()]
        for file in files
    )
    assert [step.step for step in first] == [0, 1, 2]
    both = first[0] + second[0]
    assert both.ranks == (0, 1)
    assert both.counts["tokens"] == 2 * first[0].counts["tokens"]


def test_a_line_after_a_crash_begins_anew(calls: list[tuple[str, Rows]], tmp_path: Path) -> None:
    sink = JsonLines(tmp_path)
    step = StepScalars("actual", 0, 7)
    file = steps_path(tmp_path, "actual", 0, 0)
    sink.log_step(step)
    with file.open("ab") as half:
        half.write(b'{"format": 1, "arm": "act')
    sink.log_step(step)
    lines = file.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[2]) == json.loads(lines[0])


def test_an_arm_that_no_folder_can_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arm's name"):
        JsonLines(tmp_path).log_step(StepScalars("../none", 0, 0))
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_every_number(calls: list[tuple[str, Rows]], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
        from torch.utils.tensorboard import SummaryWriter

        log = Log()
        writer = SummaryWriter(str(tmp_path))
        play(calls, Monitor([TensorBoard(writer), log], on_error="raise"))
        writer.close()
        events = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert set(events.Tags()["scalars"]) == {name for _, each in log.steps for name in each}
    shown = [(event.step, event.value) for event in events.Scalars("deltad/kl")]
    assert shown == [
        (step, pytest.approx(scalars["deltad/kl"], rel=1e-6)) for step, scalars in log.steps
    ]


class FakeRun:
    """What of a wandb or trackio run the sinks use."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert name not in self.axes
        self.axes[name] = step_metric

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))


def test_wandb_plots_over_an_axis_of_its_own(calls: list[tuple[str, Rows]]) -> None:
    run = FakeRun()
    play(calls, Monitor(Wandb(run), on_error="raise"))
    assert [(row["deltad/step"], step) for row, step in run.rows] == [
        (0, None),
        (1, None),
        (2, None),
    ]
    named = {name for row, _ in run.rows for name in row} - {"deltad/step"}
    assert run.axes == dict.fromkeys(named, "deltad/step")


def test_trackio_gets_the_step(calls: list[tuple[str, Rows]]) -> None:
    run = FakeRun()
    play(calls, Monitor(Trackio(run), on_error="raise"))
    assert [step for _, step in run.rows] == [0, 1, 2]
    assert "deltad/outside" in run.rows[0][0]


@pytest.mark.slow
def test_wandb_for_real(
    calls: list[tuple[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = wandb.init(project="deltad", dir=str(tmp_path))
        play(calls, Monitor(Wandb(run), on_error="raise"))
        assert run.summary["deltad/step"] == 2
        run.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"deltad/outside_rate" in file.read_bytes()


@pytest.mark.slow
def test_trackio_for_real(
    calls: list[tuple[str, Rows]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trackio.init(project="deltad", embed=False)
        play(calls, Monitor(Trackio(run), on_error="raise"))
        run.finish()
    assert any(b"deltad/outside_rate" in path.read_bytes() for path in tmp_path.rglob("*.db*"))


def test_rows_of_the_probe_are_a_checked_batch(calls: list[tuple[str, Rows]]) -> None:
    arm, rows = calls[0]
    part = Batch("", 0, rows, np.ones(len(rows["step"]), np.bool_))
    metadata = Metadata(top_k=TOP_K, vocab_size=VOCAB)
    (step,) = count_steps(part, metadata, StepQuestion(), arm=arm, seed=0)
    log = Log()
    play(calls[:1], Monitor(log))
    assert log.steps[0][1] == pytest.approx(step.scalars())
