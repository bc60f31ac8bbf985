from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltad.dumps import Dump
from deltad.losses import TopKLogprobs, trust_region_loss
from deltad.masks import CriterionError
from deltad.probes import ProbeError
from deltad.probes.trl.loss import LOSS_TYPES, MaskedLoss
from tests.probes.trl import laws, trainers

THRESHOLD = 0.02


def trained(folder: Path, *, how: Any, **options: Any) -> Any:
    """A training with a criterion, its witness and its rows."""
    from deltad.probes.trl import attach

    settings = {"num_iterations": 2, "max_steps": 2, "max_grad_norm": 0.0, **options}
    made = laws.build(folder / "made", **settings)
    witness = trainers.Witness(made)
    attach(made, folder / "run", **how)
    laws.train(made)
    return made, witness, trainers.rows(folder / "run")


def aggregated(made: Any, inputs: Any) -> dict[str, Any]:
    """How TRL divides: the options of `trust_region_loss` for one of its micro-batches."""
    mask, accumulation = inputs["completion_mask"], made.args.gradient_accumulation_steps
    per_window = made.args.steps_per_generation if trainers.is_old() else accumulation
    denominator = {
        "grpo": len(mask) * accumulation,
        "bnpo": float(mask.sum()) * accumulation,
        "dr_grpo": len(mask) * accumulation,
        "luspo": len(mask) * accumulation,
        "dapo": float(inputs["num_items_in_batch"]) * per_window / made.args.steps_per_generation,
    }[made.loss_type]
    horizon = made.max_completion_length if made.loss_type == "dr_grpo" else None
    return {"aggregation": made.loss_type, "denominator": denominator, "horizon": horizon}


def own_gradients(
    made: Any, witness: Any, rows: Any, step: int, **options: Any
) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Gradient of `deltad.losses` over the step's micro-batches by a plain model, and keep."""
    policy = trainers.model()
    policy.load_state_dict(witness.before[step], strict=False)
    policy.eval()
    keep: list[bool] = []
    taken = rows[rows.step == step].reset_index(drop=True)
    at = 0
    for inputs in witness.batches[step]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        first = inputs["prompt_ids"].shape[1] - 1
        logits = policy(input_ids=ids, attention_mask=attended, use_cache=False).logits
        logp = (logits[:, first:-1] / made.temperature).log_softmax(-1)
        mask = inputs["completion_mask"].bool()
        part = taken.iloc[at : at + int(mask.sum())]
        at += int(mask.sum())
        sampled = logp.gather(2, inputs["completion_ids"][..., None])[..., 0]

        def laid(values: Any, where: torch.Tensor = mask, fill: float = 0.0) -> torch.Tensor:
            values = torch.from_numpy(np.stack(values))
            shape = (*where.shape, *values.shape[1:])
            whole = torch.full(shape, fill, dtype=values.dtype)
            whole[where] = values
            return whole

        topk_ids = laid(part.topk_ids).long()
        result = trust_region_loss(
            sampled.double(),
            laid(part.behavior_logprob).double(),
            inputs["advantages"].double(),
            mask,
            topk=TopKLogprobs(
                inputs["completion_ids"],
                topk_ids,
                laid(part.topk_behavior_logprobs).double(),
                logp.detach().gather(2, topk_ids).double(),
                made.model.config.vocab_size,
                logp.detach().double().exp().square().sum(-1),
            ),
            **aggregated(made, inputs),
            **options,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        keep += result.keep[mask].tolist()
    return {name: each.grad for name, each in policy.named_parameters()}, keep


def same_gradients(found: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    """Equal to the rounding of float32, relative to the largest."""
    assert found.keys() == own.keys()
    for name, each in found.items():
        largest = float(own[name].abs().max())
        assert largest > 0
        torch.testing.assert_close(each, own[name], atol=2e-5 * largest, rtol=0)


@pytest.mark.parametrize(
    ("loss_type", "how"),
    [
        ("dapo", {"criterion": "predictive-kl-aggregated"}),
        pytest.param(
            "grpo",
            {"criterion": "ratio", "divergence": "tv", "ratio_cap": 1.1},
            marks=pytest.mark.slow,
        ),
        pytest.param("bnpo", {"criterion": "binary-kl"}, marks=pytest.mark.slow),
        pytest.param("dr_grpo", {"criterion": "predictive-tv-exact"}, marks=pytest.mark.slow),
        pytest.param("luspo", {"criterion": "clip-higher"}, marks=pytest.mark.slow),
        pytest.param(
            "dapo", {"criterion": "tis", "parameters": {"cap": 1.2}}, marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_those_of_the_losses(
    tmp_path: Path, loss_type: str, how: dict[str, Any]
) -> None:
    how = {"threshold": THRESHOLD, **how}
    made, witness, rows = trained(tmp_path, how=how, loss_type=loss_type)
    own, keep = own_gradients(made, witness, rows, 1, **how)
    same_gradients(witness.gradients[1], own)
    assert rows[rows.step == 1].in_loss.tolist() == keep
    holds_of_a_dump_with_a_criterion(made, rows, tmp_path / "run", how["criterion"])
    if "parameters" not in how:
        assert 5 < sum(keep) < len(keep) - 5


def holds_of_a_dump_with_a_criterion(made: Any, rows: Any, run: Path, name: str) -> None:
    """It is in order, names its mask, and what is logged is what it holds."""
    laws.the_dump_is_in_order(run)
    update = Dump.open(run).metadata("actual").update
    assert (update["mask"], update["threshold"]) == (name, THRESHOLD)
    for entry in made.state.log_history[:2]:
        taken = rows[rows.step == entry["step"] - 1]
        masked = 1 - taken.in_loss.mean()
        assert entry["deltad/loss/masked"] == pytest.approx(masked)
        assert entry["deltad/in_loss_rate"] == pytest.approx(1 - masked)
        assert entry["deltad/outside_rate"] == pytest.approx(entry["deltad/loss/outside"])


def test_no_criterion_on_policy_is_trls_own_loss_bit_for_bit(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    plain = laws.build(tmp_path / "plain", max_steps=2)
    laws.train(plain)
    masked = laws.build(tmp_path / "masked", max_steps=2)
    attach(masked, criterion="none", metrics=False)
    laws.train(masked)
    assert trainers.logs(plain) == trainers.logs(masked)
    first, second = trainers.weights(plain), trainers.weights(masked)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_no_criterion_is_trls_loss_with_the_clip_out_of_reach(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    both = {"num_iterations": 2, "max_steps": 2, "max_grad_norm": 0.0, "beta": 0.0}
    plain = laws.build(tmp_path / "plain", epsilon=1e9, **both)
    seen = trainers.Witness(plain)
    laws.train(plain)
    masked = laws.build(tmp_path / "masked", **both)
    witness = trainers.Witness(masked)
    attach(masked, criterion="none")
    laws.train(masked)
    same_gradients(witness.gradients[1], seen.gradients[1])
    logged = [each.state.log_history[1]["loss"] for each in (plain, masked)]
    assert logged[1] == pytest.approx(logged[0], abs=1e-6)


@pytest.mark.slow
def test_without_rows_no_forward_is_made_after_the_step(tmp_path: Path) -> None:
    from deltad.probes.trl import attach

    made = laws.build(tmp_path / "made", max_steps=2)
    calls: list[int] = []
    made.model.model.register_forward_hook(
        lambda *_: calls.append(made.state.global_step) if made.model.training else None
    )
    attach(made, criterion="binary-tv", metrics=False)
    laws.train(made)
    with_rows = laws.build(tmp_path / "rows", max_steps=2)
    more: list[int] = []
    with_rows.model.model.register_forward_hook(
        lambda *_: more.append(with_rows.state.global_step) if with_rows.model.training else None
    )
    attach(with_rows, criterion="binary-tv")
    laws.train(with_rows)
    assert len(more) - len(calls) == 2 * 2  # steps of two micro-batches


@pytest.mark.parametrize("name", ["predictive-kl-full", "nonsense"])
def test_criteria_that_cannot_be_known_are_refused(name: str) -> None:
    with pytest.raises(CriterionError):
        MaskedLoss(name)


def test_a_divergence_of_another_family_is_refused() -> None:
    with pytest.raises(CriterionError):
        MaskedLoss("predictive-kl-aggregated", divergence="tv")
    with pytest.raises(ValueError, match="ratio_cap"):
        MaskedLoss("ratio", ratio_cap=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sapo"}, f"one of {', '.join(LOSS_TYPES)}; got 'sapo'"),
        ({"importance_sampling_level": "sequence"}, "token by token"),
        ({"beta": 0.1, "use_bias_correction_kl": True}, "use_bias_correction_kl"),
    ],
)
def test_settings_under_which_the_loss_is_another_are_refused(
    options: dict[str, Any], message: str
) -> None:
    from types import SimpleNamespace

    from deltad.probes.trl.loss import check_trainer

    settings = {"loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, **options}
    made = SimpleNamespace(**settings, args=SimpleNamespace(**settings))
    with pytest.raises(ProbeError, match=message):
        check_trainer(made)
