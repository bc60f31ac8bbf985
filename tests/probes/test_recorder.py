"""From a real step to a dump that the validator accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.dumps import Dump, Metadata
from deltad.dumps.validate import check_dump
from deltad.masks import criterion
from deltad.probes import ZERO_STEP, Recorder, UpdateProbe, branch

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
            rule = criterion("none" if arm == ZERO_STEP else arm)
            optimizer.zero_grad()
            for each in batches:
                handle = probe.expect(each.tokens)
                logits = model(**each.inputs).logits
                keep = rule.keep(handle.criterion_tokens(), threshold=THRESHOLD)
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
