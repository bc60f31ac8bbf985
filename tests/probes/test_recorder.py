"""From a real step to a dump that the validator accepts."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.dumps import BackgroundWriter, Dump, DumpError, Metadata, unfinished
from deltad.dumps.validate import check_dump
from deltad.masks import rule
from deltad.probes import ZERO_STEP, Recorder, UpdateProbe, branch
from tests.dumps.recording import OPTIONS, ROWS, batches
from tests.dumps.recording import metadata as recorded

from .tiny import VOCAB, Batch, backward, batch, surrogate, tiny
from .training import adamw

THRESHOLD = 0.02
ARMS = ["none", "ratio", "predictive-kl-exact", "binary-kl", ZERO_STEP]


def metadata(arm: str, probe: UpdateProbe | None = None, **more: Any) -> Metadata:
    mask = "none" if arm == ZERO_STEP else arm
    return Metadata(
        top_k=5,
        vocab_size=VOCAB,
        readout={} if probe is None else probe.readout_metadata,
        update={"mask": mask, "threshold": THRESHOLD, "divergence": "kl"},
        **more,
    )


def record(run: Path, *, fail_at: int | None = None) -> None:
    """Two steps of two micro-batches in every arm."""
    model = tiny("qwen3", attention_dropout=0.1)
    optimizer = adamw(model)
    batches = [batch(model, seed=seed, first_sequence=10 * seed) for seed in range(2)]
    with (
        Recorder(run, seed=3, metadata_for=lambda arm: metadata(arm, probe)) as recorder,
        UpdateProbe(model, optimizer, recorder) as probe,
    ):

        def update(arm: str) -> None:
            if probe.step == fail_at and arm == "ratio":
                raise ZeroDivisionError
            decides = rule("none" if arm == ZERO_STEP else arm)
            optimizer.zero_grad()
            for each in batches:
                handle = probe.expect(each.tokens)
                logits = model(**each.inputs).logits
                keep = decides.keeps(handle.criterion_tokens(), threshold=THRESHOLD)
                handle.keep(keep)
                kept = handle.scatter(keep, False)
                masked = Batch(each.inputs, each.tokens)
                backward(surrogate(logits * kept.roll(-1, 1)[..., None], masked))
            optimizer.step()

        for _ in range(2):
            branch(model, optimizer, ARMS, update, probe=probe)


def test_a_recorded_dump_obeys_the_contract_and_its_masks_are_recomputed(tmp_path: Path) -> None:
    record(tmp_path / "run")
    assert check_dump(tmp_path / "run", strict=True) == []
    dump = Dump.open(tmp_path / "run")
    assert set(dump.arms) == set(ARMS)
    kept = {}
    for arm in ARMS:
        rows = [b for b in dump.batches(arm, 3, columns=["in_loss", "step", "sequence"])]
        kept[arm] = np.concatenate([b["in_loss"] for b in rows])
        assert set(np.concatenate([b["step"] for b in rows])) == {0, 1}
        assert dump.metadata(arm).readout["forward"] == "training"
        assert dump.metadata(arm).readout["hidden_dtype"] == "float32"
    assert kept["none"].all()
    assert kept[ZERO_STEP].all()
    assert 0 < kept["ratio"].mean() < 1
    assert (kept["ratio"] != kept["predictive-kl-exact"]).any()


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        record(tmp_path / "run", fail_at=1)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == []


def test_an_arm_of_which_no_row_came_can_have_its_file(tmp_path: Path) -> None:
    stored = {"rule": "above", "divergence": "kl", "threshold": 50.0}
    with Recorder(
        tmp_path / "run", seed=0, metadata_for=lambda arm: metadata(arm, stored=stored)
    ) as recorder:
        recorder.writer("none").skip(7)
    dump = Dump.open(tmp_path / "run")
    assert dump.arms == ("none",)
    assert dump.rows_seen("none", 0) == 7


def test_files_that_cannot_all_be_completed_are_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = tiny("llama")
    optimizer = adamw(model)
    each = batch(model)
    recorder = Recorder(run, seed=0, metadata_for=metadata)
    with UpdateProbe(model, optimizer, recorder) as probe:
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        optimizer.step()
    recorder.writer("other").close()
    target = run / "arm=actual" / "seed=0" / "part-0-0.parquet"
    target.parent.mkdir(parents=True)
    target.write_text("somebody else's")
    with pytest.raises(ValueError, match="part-0-0"):
        recorder.close()
    assert target.read_text() == "somebody else's"


def rows_of(step: int) -> dict[str, Any]:
    """A micro-batch as the probe hands it over."""
    return next(itertools.islice(batches(), step, None))


def small(run: Path, **options: Any) -> Recorder:
    """A recorder of small files in two arms."""
    return Recorder(
        run,
        seed=0,
        metadata_for=recorded,
        **{**OPTIONS, **options},
    )


def full_disk(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Let the disk be full for every file that begins after the rows recorded so far."""
    for writer in recorder.writers.values():
        if isinstance(writer, BackgroundWriter):
            writer.flush()
    numbers = itertools.count()

    def aside(run: Path, name: str) -> Path:
        path = run / f"_writing.{name}.{next(numbers)}.tmp"
        path.symlink_to("/dev/full")
        return path

    monkeypatch.setattr("deltad.dumps.writer.aside_path", aside)


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize("background", [True, False])
def test_training_stops_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    steps = 0

    def train() -> None:
        nonlocal steps
        with small(tmp_path, background=background) as recorder:
            for step in range(8):
                if step == 4:
                    full_disk(monkeypatch, recorder)
                for arm in ("none", "other"):
                    recorder(arm, rows_of(step))
                steps += 1

    with pytest.raises(OSError, match="No space left on device"):
        train()
    assert 4 <= steps <= 8
    names = [entry.name for entry in tmp_path.iterdir()]
    assert not [name for name in names if name.startswith("_writing")]
    assert check_dump(tmp_path, strict=False) != []
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


@needs_full
@pytest.mark.parametrize("background", [True, False])
def test_training_goes_on_where_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    recorder = small(tmp_path, background=background, on_error="stop-recording")

    def train() -> None:
        with recorder:
            for step in range(8):
                if step == 4:
                    full_disk(monkeypatch, recorder)
                for arm in ("none", "other"):
                    recorder(arm, rows_of(step))

    with pytest.warns(RuntimeWarning, match="No space left .*training goes on without") as warned:
        train()
    assert len(warned) == 1
    assert recorder.stopped is not None
    assert "No space left" in recorder.stopped
    found = check_dump(tmp_path, strict=False)
    assert [problem.kind for problem in found] == ["unfinished"] * 2  # of both arms
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("_writing")]


@needs_full
def test_a_disk_that_is_full_at_the_very_end_stops_recording_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = small(tmp_path, on_error="stop-recording")
    full_disk(monkeypatch, recorder)
    recorder("none", rows_of(0))
    recorder("other", rows_of(0))
    with pytest.warns(RuntimeWarning, match="No space left"):
        recorder.close()
    assert {each.arm for each in unfinished(tmp_path)} == {"none", "other"}
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_run_that_cannot_be_made_stops_recording_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    recorder = small(tmp_path / "file" / "run", on_error="stop-recording")
    with pytest.warns(RuntimeWarning, match="Not a directory; training goes on"):
        recorder("none", rows_of(0))
    recorder("none", rows_of(1))
    recorder.close()


def test_a_folder_that_vanishes_stops_recording_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recorder = small(run, on_error="stop-recording")
    recorder("none", rows_of(0))
    recorder.writer("none").flush()  # type: ignore[union-attr]
    shutil.rmtree(run)
    with pytest.warns(RuntimeWarning, match=f"{run} is gone"):
        recorder.close()


def test_bad_rows_are_raised_whatever_was_chosen(tmp_path: Path) -> None:
    bad = {**rows_of(0), "token_id": np.full(ROWS, -5, dtype=np.int32)}
    with (
        pytest.raises(DumpError, match="token_id"),
        small(tmp_path, on_error="stop-recording") as recorder,
    ):
        recorder("none", bad)
    assert list(tmp_path.iterdir()) == []


def test_what_follows_an_error_must_be_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_error"):
        small(tmp_path, on_error="ignore")
