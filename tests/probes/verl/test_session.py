"""The plugin in real trainings of verl's FSDP2 engine on the CPU, one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltad.divergence import DIVERGENCES
from deltad.dumps import Dump, batch_tokens
from deltad.masks import rule
from deltad.probes import ProbeError
from deltad.probes.verl import plugin
from deltad.support import binary_support
from examples import verl_cpu
from tests.probes.verl.engine_case import expected_rows, recorded, same, train, whole_weights
from tests.probes.verl.verl_here import imported

pytestmark = [
    pytest.mark.verl,
    pytest.mark.filterwarnings("ignore::UserWarning:verl"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

HALF = 8  # responses of a mini-batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A saved model, and verl on the CPU."""
    imported("verl")
    verl_cpu.use_cpu()
    imported("verl.workers.engine_workers")
    yield verl_cpu.tiny_model(str(tmp_path_factory.mktemp("model")))
    plugin.uninstall()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def batch(model: str) -> Any:
    """A rollout of the model."""
    return verl_cpu.rollout(model)


@pytest.mark.parametrize(
    ("loss_mode", "precision"),
    [("vanilla", "fp32"), ("dppo_kl", "bf16"), ("binary_tv", "fp32")],
)
def test_recording_changes_no_bit_of_the_training(
    model: str, batch: Any, tmp_path: Path, loss_mode: str, precision: str
) -> None:
    options: dict[str, Any] = {"batch": batch, "loss_mode": loss_mode, "precision": precision}
    bare = train(model, plugged=loss_mode == "binary_tv", **options)
    assert same(bare, train(model, tmp_path / "run", **options))
    assert not same(bare, train(model, lr=1e-2, **options))  # the comparison can fail


def test_recording_leaves_random_numbers_alone(batch: Any, tmp_path: Path) -> None:
    """With dropout on, the same numbers are drawn in training, before it and after it."""
    dropping = verl_cpu.tiny_model(str(tmp_path / "model"))
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.3}))
    bare = train(dropping, batch=batch, plugged=False)
    assert same(bare, train(dropping, tmp_path / "run", batch=batch))
    still = train(dropping, tmp_path / "still", batch=batch, lr=0.0)
    assert len(still.weights) == 3
    rows = recorded(tmp_path / "still")
    assert np.array_equal(rows["pre_logprob"], rows["post_logprob"])


def test_rows_are_what_transformers_says(model: str, batch: Any, tmp_path: Path) -> None:
    """Every column of both mini-batches, the policy's against float64 of the same weights."""
    training = train(model, tmp_path / "run", batch=batch, loss_mode="predictive_kl", lr=1e-2)
    rows = recorded(tmp_path / "run")
    lengths = [len(row) for row in batch["responses"].unbind()]
    for step, (first, half) in enumerate([(0, slice(0, HALF)), (HALF, slice(HALF, None))]):
        mine = {name: values[rows["step"] == step] for name, values in rows.items()}
        for when, weights in (
            ("pre", training.weights[step]),
            ("post", training.weights[step + 1]),
        ):
            expected = expected_rows(model, weights, batch, half, 1.0)
            for column, name in (
                (f"{when}_logprob", "logprob"),
                (f"topk_{when}_logprobs", "topk"),
                (f"{when}_collision", "collision"),
                (f"{when}_entropy", "entropy"),
            ):
                np.testing.assert_allclose(mine[column], expected[name], rtol=0, atol=3e-5)
            assert np.array_equal(mine["token_id"], expected["token_id"])
        counts = lengths[first : first + HALF]
        # One rank's sequences are numbered within the mini-batch.
        assert np.array_equal(mine["sequence"], np.repeat(np.arange(HALF), counts))
        assert np.array_equal(mine["position"], np.concatenate([np.arange(n) for n in counts]))
        for column, name in (
            ("advantage", "advantages"), ("behavior_logprob", "rollout_log_probs"),
        ):  # fmt: skip
            flat = torch.cat([*batch[name].unbind()[half]]).numpy()
            np.testing.assert_allclose(mine[column], flat, rtol=0, atol=1e-6)
        groups = [mine["group"][mine["sequence"] == each][0] for each in range(HALF)]
        assert len(set(groups)) == 2
        assert groups[:4] == groups[:1] * 4
    change = np.abs(rows["post_logprob"] - rows["pre_logprob"])
    assert change.max() > 0.1
    # Rollout and first step are of the same weights.
    first_step = rows["step"] == 0
    np.testing.assert_allclose(
        rows["pre_logprob"][first_step], rows["behavior_logprob"][first_step], rtol=0, atol=1e-5
    )
    metadata = Dump.open(tmp_path / "run").metadata("actual")
    assert (metadata.top_k, metadata.vocab_size) == (verl_cpu.TOP_K, verl_cpu.VOCAB)
    assert metadata.ranks == 1
    assert metadata.behavior["mu_source"] == "rollout"
    assert metadata.behavior["topk_source"].startswith("rescored")
    assert metadata.readout["logits_rounded"] is False
    assert metadata.update["criterion"] == "predictive-kl-aggregated"
    assert metadata.update["clip_ratio_high"] == 0.15


def test_in_loss_is_what_the_mask_decides(model: str, batch: Any, tmp_path: Path) -> None:
    """Trained off-policy by some noise, so that masks bite; decided anew from the columns."""
    noise = torch.Generator().manual_seed(1)
    shifted = batch.copy()
    values = batch["old_log_probs"].values()
    moved = values - 0.5 + torch.randn(values.shape, generator=noise)
    nested = torch.nested.nested_tensor_from_jagged(
        moved.clamp(max=-1e-3), batch["old_log_probs"].offsets()
    )
    shifted["old_log_probs"] = nested
    shifted["rollout_log_probs"] = nested
    for theirs, ours in (("dppo_kl", "binary-kl"), ("binary_kl", "binary-kl")):
        run = tmp_path / theirs
        train(
            model, run, batch=shifted, drop=("teacher_ids", "teacher_logprobs"), loss_mode=theirs,
            actor={"clip_ratio_low": 0.004, "clip_ratio_high": 0.004},
        )  # fmt: skip
        rows = recorded(run)
        dump = Dump.open(run)
        keep = np.concatenate(
            [
                rule(ours).keeps(tokens_of(each, dump), threshold=0.004, divergence="kl")
                for each in dump.batches("actual", 0)
            ]
        )
        assert np.array_equal(rows["in_loss"], keep)
        assert 0.05 < (~keep).mean() < 0.95


def tokens_of(each: Any, dump: Dump) -> Any:
    return batch_tokens(each, dump.metadata("actual"))


def test_without_the_topk_the_binary_support_is_recorded(
    model: str, batch: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(model, run, batch=batch, drop=("teacher_ids", "teacher_logprobs", "uid"))
    rows = recorded(run)
    assert (rows["topk_ids"] == -1).all()
    dump = Dump.open(run)
    metadata = dump.metadata("actual")
    assert metadata.top_k == 1
    assert metadata.behavior["topk_source"].startswith("none")
    support = binary_support(
        rows["behavior_logprob"].astype(np.float64), rows["pre_logprob"].astype(np.float64)
    )
    for family, divergence in DIVERGENCES.items():
        recordings = [
            tokens_of(each, dump).divergence(family) for each in dump.batches("actual", 0)
        ]
        np.testing.assert_allclose(
            np.concatenate(recordings), divergence.value(support), atol=1e-12
        )
    # Without a uid the same prompt is the same group.
    assert len(set(rows["group"])) == 4


def test_recomputed_log_probs_are_named_so(model: str, batch: Any, tmp_path: Path) -> None:
    train(model, tmp_path / "run", batch=batch, drop=("rollout_log_probs",))
    behavior = Dump.open(tmp_path / "run").metadata("actual").behavior
    assert (behavior["mu_source"], behavior["mu_field"]) == ("recomputed", "old_log_probs")


def test_hidden_states_are_read_where_logits_are_rounded(
    model: str, batch: Any, tmp_path: Path
) -> None:
    """Against a float64 head over what entered the engine's head in its own training forward."""
    seen: list[torch.Tensor] = []

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:  # the training forward
            assert output.dtype == torch.bfloat16
            seen.append((inputs[0].double() @ module.weight.double().T).detach().cpu())

    worker = verl_cpu.worker
    with pytest.MonkeyPatch.context() as patch:

        def watched(*args: Any, **options: Any) -> Any:
            made = worker(*args, **options)
            made.engine.module.get_output_embeddings().register_forward_hook(look)
            return made

        patch.setattr(verl_cpu, "worker", watched)
        for readout in ("auto", "logits"):
            train(
                model, tmp_path / readout, batch=batch, precision="bf16",
                settings={"readout": readout},
            )  # fmt: skip
    assert len(seen) == 8  # two steps of two micro-batches, twice
    expected = []
    for index, logits in enumerate(seen[:4]):
        for row in range(4):
            prompt = len(batch["prompts"].unbind()[4 * index + row])
            ids = batch["input_ids"].unbind()[4 * index + row]
            each = logits[row, prompt - 1 : len(ids) - 1].log_softmax(-1)
            expected.append(each.gather(1, ids[prompt:, None])[:, 0])
    truth = torch.cat(expected).numpy()
    hidden, rounded = recorded(tmp_path / "auto"), recorded(tmp_path / "logits")
    error = np.abs(hidden["pre_logprob"] - truth).max()
    assert error < 2e-5
    assert np.abs(rounded["pre_logprob"] - truth).max() > 100 * error
    found = [Dump.open(tmp_path / each).metadata("actual").readout for each in ("auto", "logits")]
    assert [each["logits_rounded"] for each in found] == [False, True]
    assert found[0]["head_dtype"] == found[1]["logits_dtype"] == "bfloat16"


def test_a_step_of_no_length_changes_nothing_that_is_read(
    model: str, batch: Any, tmp_path: Path
) -> None:
    train(model, tmp_path / "run", batch=batch, lr=0.0, precision="bf16")
    rows = recorded(tmp_path / "run")
    for name in ("logprob", "collision", "entropy"):
        assert np.array_equal(rows[f"pre_{name}"], rows[f"post_{name}"])
    assert np.array_equal(rows["topk_pre_logprobs"], rows["topk_post_logprobs"])


def test_micro_batches_of_a_token_budget_come_back_in_order(
    model: str, batch: Any, tmp_path: Path
) -> None:
    for name, flags in (
        ("fixed", {}),
        ("budget", {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40}),
    ):
        train(model, tmp_path / name, batch=batch, loss_mode="dppo_tv", flags=flags)
    fixed, budget = recorded(tmp_path / "fixed"), recorded(tmp_path / "budget")
    for column in ("sequence", "position", "token_id", "in_loss"):
        assert np.array_equal(fixed[column], budget[column])
    first = fixed["step"] == 0
    np.testing.assert_allclose(
        fixed["pre_logprob"][first], budget["pre_logprob"][first], rtol=0, atol=1e-5
    )


def test_log_probs_are_at_the_temperature(model: str, batch: Any, tmp_path: Path) -> None:
    training = train(
        model, tmp_path / "run", batch=batch, flags={"temperature": 0.7},
        drop=("teacher_ids", "teacher_logprobs"),
    )  # fmt: skip
    rows = recorded(tmp_path / "run")
    assert Dump.open(tmp_path / "run").temperature == 0.7
    expected = expected_rows(model, training.weights[0], batch, slice(0, HALF), 0.7)
    first = rows["step"] == 0
    np.testing.assert_allclose(rows["pre_logprob"][first], expected["logprob"], atol=3e-5, rtol=0)


def test_steps_left_out_files_and_a_training_that_goes_on(
    model: str, batch: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(model, run, batch=batch, settings={"every": 2, "seed": 5})
    assert set(recorded(run, seed=5)["step"]) == {0}
    with pytest.raises(Exception, match="exists already"):
        train(model, run, batch=batch, settings={"seed": 5})
    train(model, run, batch=batch, settings={"seed": 5, "existing": "append"})
    assert sorted(set(recorded(run, seed=5)["step"])) == [0, 1, 2]
    assert len(Dump.open(run).files("actual", 5)) == 3
    train(model, run, batch=batch, settings={"seed": 5, "existing": "replace", "steps_per_file": 2})
    assert sorted(set(recorded(run, seed=5)["step"])) == [0, 1]
    assert len(Dump.open(run).files("actual", 5)) == 1


def test_a_step_that_the_engine_skips_is_not_recorded(
    model: str, batch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = batch.copy()
    values = batch["advantages"].values().clone()
    values[-1] = torch.inf  # in the second mini-batch
    broken["advantages"] = torch.nested.nested_tensor_from_jagged(
        values, batch["advantages"].offsets()
    )
    training = train(model, tmp_path / "run", batch=broken)
    assert len(training.weights) == 2
    assert set(recorded(tmp_path / "run")["step"]) == {0}
    assert "optimizer step 1 was skipped" in caplog.text


def test_the_topk_losses_train_with_the_topk(model: str, batch: Any) -> None:
    training = train(model, batch=batch, loss_mode="predictive_kl_exact", lr=1e-2)
    assert (
        training.metrics["deltad/divergence/sum"][1] > training.metrics["deltad/divergence/sum"][0]
    )
    with pytest.raises(ProbeError, match="predictive_kl needs the behaviour policy's top-K"):
        train(
            model, batch=batch, loss_mode="predictive_kl", drop=("teacher_ids", "teacher_logprobs")
        )


@pytest.mark.parametrize(
    ("flags", "engine", "message"),
    [
        ({"use_fused_kernels": True}, {}, r"use_fused_kernels=False"),
        ({}, {"pad_to_length": True}, r"pad_to_length=False"),
    ],
)
def test_options_that_hide_the_logits_are_refused(
    model: str, batch: Any, tmp_path: Path, flags: Any, engine: Any, message: str
) -> None:
    with pytest.raises(ProbeError, match=message):
        train(model, tmp_path / "run", batch=batch, flags=flags, engine=engine)


def test_other_batches_go_to_the_engine_as_they_are(model: str, batch: Any, tmp_path: Path) -> None:
    """A fine-tuning: no advantages, no rows."""
    plugin.install()
    worker = verl_cpu.worker(model)
    before = whole_weights(worker)
    tensordict_utils = imported("verl.utils.tensordict_utils")
    data = batch.copy()
    del data["advantages"]

    def fine_tuning(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, Any]:
        return model_output["log_probs"].values().sum() * -1e-2, {}

    worker.set_loss_fn(fine_tuning)
    tensordict_utils.assign_non_tensor(data, mini_batch_size=8)
    worker.train_mini_batch(data)
    assert not (tmp_path / "run").exists()
    assert any(not torch.equal(before[name], now) for name, now in whole_weights(worker).items())
