"""Whole trainings: what they log, and that an interrupted one ends as an undisturbed one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltad.curves import CURVES, log_path, options_path, read_lines
from deltad.dumps import Dump
from deltad.dumps.lock import InUseError, locked
from deltad.dumps.validate import check_dump
from deltad.probes.recipes import RecipeError, WorkerError
from deltad.probes.training import Run, Training, train
from deltad.probes.training.files import RunFiles
from deltad.probes.training.loop import Trainer

from .micro import contents, micro

MASKS = ("ratio", "clip-higher")


class Killed(BaseException):
    """Ends a run where it stands, as a signal would."""


def silent(text: str, fraction: float) -> None:
    pass


def train_here(run: Path, **options: Any) -> list[Run]:
    given: dict[str, Any] = {"masks": MASKS, "seeds": 1, "workers": 0, "quiet": True}
    given |= options
    return train(given.pop("training", micro(probe_every=2)), run, **given)


def dumped(run: Path, mask: str) -> dict[str, Any]:
    dump = Dump.open(run / "_probes" / mask)
    names = ("step", "token_id", "pre_logprob", "post_logprob", "in_loss", "topk_post_logprobs")
    batches = list(dump.batches(mask, 0, columns=list(names)))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def weights(run: Path, mask: str) -> dict[str, torch.Tensor]:
    saved = RunFiles(run, Run(mask, 0)).load()
    assert saved is not None
    found: dict[str, torch.Tensor] = saved["weights"]
    return found


def test_log_has_a_line_a_batch_and_one_for_the_last_evaluation(trained: Path) -> None:
    for mask in MASKS:
        lines = list(read_lines(log_path(trained, mask, 0)))
        assert [(line.mask, line.seed) for line in lines] == [(mask, 0)] * 4
        assert [(line.batch, line.step) for line in lines] == [(0, 0), (1, 2), (2, 4), (3, 6)]
        known = ["correct" in line.sums for line in lines]
        assert known == [True, False, True, True]
        for line in lines[:-1]:
            assert set(line.sums) >= {c.below for n, c in CURVES.items() if n != "accuracy"}
            assert line.sums["responses"] == 2 * 2 * 4
            assert line.sums["tokens"] == line.sums["length"]
            assert line.sums["samples"] == 8 if "samples" in line.sums else True
            values = line.values()
            assert 0 <= values["reward"] <= 1
            assert 1 <= values["length"] <= 5
            assert 0 < values["entropy"] < math.log(72)


def test_runs_of_one_seed_begin_alike_and_then_differ(trained: Path) -> None:
    first, second = (next(iter(read_lines(log_path(trained, mask, 0)))).values() for mask in MASKS)
    for name in ("accuracy", "reward", "length"):
        assert first[name] == second[name]
    ours, theirs = (weights(trained, mask) for mask in MASKS)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


def test_steps_are_those_of_the_log(trained: Path) -> None:
    for mask in MASKS:
        lines = list(read_lines(log_path(trained, mask, 0)))
        path = trained / "_steps" / f"arm={mask}" / "seed=0" / "rank-0.jsonl"
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        assert [step["step"] for step in steps] == list(range(6))
        for name in ("tokens", "outside", "disagreement", "outside_increase"):
            assert sum(step["counts"][name] for step in steps) == sum(
                line.sums.get(name, 0) for line in lines
            )
        assert sum(step["masked"][mask] for step in steps) == sum(
            line.sums.get("masked", 0) for line in lines
        )
        kl = sum(step["logprobs"]["k1"] for step in steps)
        assert sum(line.sums.get("kl", 0) for line in lines) == pytest.approx(kl, rel=1e-7)


def test_recorded_steps_are_a_dump_whose_mask_recomputes(trained: Path) -> None:
    for mask in MASKS:
        assert check_dump(trained / "_probes" / mask, strict=False) == []
        rows = dumped(trained, mask)
        assert sorted(set(rows["step"].tolist())) == [0, 2, 4]


def test_first_minibatch_of_a_batch_is_on_policy(trained: Path) -> None:
    rows = Dump.open(trained / "_probes" / "ratio").batches(
        "ratio", 0, columns=["behavior_logprob", "pre_logprob"]
    )
    for batch in rows:
        assert np.array_equal(batch["behavior_logprob"], batch["pre_logprob"])


@pytest.mark.parametrize(
    ("moment", "every"),
    [("before_steps", 1), ("after_steps", 2), ("after_log", 1), ("in_checkpoint", 2)],
)
def test_killed_run_ends_as_an_undisturbed_one(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, every: int
) -> None:
    run, ratio = tmp_path / "run", ("ratio",)
    training = micro(probe_every=2, checkpoint_every=every)
    with monkeypatch.context() as patch:
        _kill(patch, moment)
        with pytest.raises(Killed):
            train_here(run, training=training, masks=ratio)
    assert contents(run) != of_ratio(trained)
    assert train_here(run, training=training, masks=ratio, resume=True) == [Run("ratio", 0)]
    assert contents(run) == of_ratio(trained)
    ours, theirs = weights(run, "ratio"), weights(trained, "ratio")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows, wanted = dumped(run, "ratio"), dumped(trained, "ratio")
    assert all(np.array_equal(rows[name], wanted[name]) for name in wanted)
    assert train_here(run, training=training, masks=ratio, resume=True) == []


def of_ratio(run: Path) -> dict[str, bytes]:
    return {name: text for name, text in contents(run).items() if "=ratio/" in name}


def _kill(patch: pytest.MonkeyPatch, moment: str) -> None:
    """Raise in the second batch of the first run."""
    count = 0
    owner: Any
    owner, name = {
        "before_steps": (Trainer, "_steps"),
        "after_steps": (Trainer, "_steps"),
        "after_log": (RunFiles, "write_line"),
        "in_checkpoint": (RunFiles, "save"),
    }[moment]
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 and moment in ("before_steps", "in_checkpoint"):
            raise Killed
        found = original(*args, **kwargs)
        if count == 2:
            raise Killed
        return found

    patch.setattr(owner, name, wrapped)


def test_half_a_line_is_cut_off(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        _kill(patch, "after_log")
        with pytest.raises(Killed):
            train_here(run, masks=("ratio",))
    with log_path(run, "ratio", 0).open("ab") as file:
        file.write(b'{"mask":"ratio","se')
    train_here(run, masks=("ratio",), resume=True)
    assert contents(run) == of_ratio(trained)


def test_log_that_lacks_what_the_checkpoint_has_seen_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        _kill(patch, "before_steps")
        with pytest.raises(Killed):
            train_here(run, masks=("ratio",))
    log_path(run, "ratio", 0).write_bytes(b'{"mask":"ratio"')
    with pytest.raises(WorkerError, match=r"seen 1 rollout batches .* holds 0 .*delete the check"):
        train_here(run, masks=("ratio",), resume=True)


@pytest.mark.slow
def test_workers_give_the_same_numbers(trained: Path, tmp_path: Path) -> None:
    train_here(tmp_path / "run", masks=("ratio",), workers=1)
    assert contents(tmp_path / "run") == of_ratio(trained)


def test_other_options_are_refused_and_other_seeds_are_not(tmp_path: Path, cache: Path) -> None:
    run = tmp_path / "run"
    small = {"batches": 1, "minibatches": 1, "checkpoint_every": 0}
    train_here(run, training=micro(**small), masks=("none",))
    with pytest.raises(RecipeError, match="is not empty: resume it"):
        train_here(run, training=micro(**small), masks=("none",))
    with pytest.raises(RecipeError, match=r"threshold is 0\.15 there and 0.05 now"):
        train_here(run, training=micro(**small, threshold=0.05), resume=True)
    done = train_here(run, training=micro(**small), masks=("none",), seeds=2, resume=True)
    assert done == [Run("none", 1)]


def test_failure_names_mask_and_seed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_steps", lambda *args: 1 / 0)
    with pytest.raises(WorkerError, match=r"^ratio, seed 3: ZeroDivisionError"):
        train_here(tmp_path / "run", masks=("ratio",), seeds=[3])


@pytest.mark.parametrize("precision", ["bf16", "fp8-rollout", "fp8"])
def test_low_precision_trains_from_master_weights(
    tmp_path: Path, cache: Path, precision: str
) -> None:
    training: Training = micro(precision=precision, batches=1, probe_every=1)
    run = tmp_path / "run"
    train_here(run, training=training, masks=("none",))
    saved = weights(run, "none")
    matrices = [value for value in saved.values() if value.ndim > 1]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in matrices)
    rows = Dump.open(run / "_probes" / "none").batches(
        "none", 0, columns=["step", "behavior_logprob", "pre_logprob"]
    )
    gap = np.concatenate(
        [np.abs(b["behavior_logprob"] - b["pre_logprob"])[b["step"] == 0] for b in rows]
    )
    assert 0 < gap.max() < 0.5  # on-policy but for the precision of the rollout
    line = next(iter(read_lines(log_path(run, "none", 0))))
    assert math.isfinite(line.values()["delta_d"])


def test_two_trainings_into_one_folder_are_kept_apart(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(InUseError, match=r"by process \d+ on "):
        train_here(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("start", [None, {"policy_sha256": "0" * 64}, [], "missing"])
def test_a_training_of_another_start_is_not_resumed(
    trained: Path, cache: Path, tmp_path: Path, start: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    path = options_path(run)
    options = json.loads(path.read_text())
    assert options["start"] == {"policy_sha256": options["start"]["policy_sha256"]}
    if start == "missing":
        del options["start"]
    else:
        options["start"] = start
    path.write_text(json.dumps(options))
    with pytest.raises(RecipeError, match=r"does not say which policy|started from the policy"):
        train_here(run, seeds=2, resume=True)
    assert json.loads(path.read_text()) == options
