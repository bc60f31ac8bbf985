"""The loss against TRL 1.8's DPPO trainer, whose own methods are called on random batches."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltad.losses import PolicyLoss, TopKLogprobs, policy_logprobs, trust_region_loss
from tests.losses.batch import Batch, draw

pytestmark = pytest.mark.trl18

CAP, RANKS, TOP_K, TEMPERATURE = 1.4, 2, 4, 0.9
KINDS = {
    "binary_kl": ("binary-kl", "kl"),
    "binary_tv": ("binary-tv", "tv"),
    "topk_kl": ("ratio", "kl"),
    "topk_tv": ("ratio", "tv"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_threshold = pytest.mark.parametrize("threshold", [(0.05, 0.05), (0.02, 0.1)])


@pytest.fixture(scope="module")
def dppo() -> Any:
    """TRL's trainer class."""
    return pytest.importorskip("trl.experimental.dppo").DPPOTrainer


def make_trainer(dppo: Any, kind: str, threshold: tuple[float, float]) -> Any:
    """Everything that its loss looks at; nothing of its own methods is replaced."""
    trainer = object.__new__(dppo)
    trainer.__dict__.update(
        divergence_type=kind,
        divergence_topk=TOP_K,
        epsilon_low=threshold[0],
        epsilon_high=threshold[1],
        clip_ratio_c=CAP,
        beta=0.0,
        temperature=TEMPERATURE,
        accelerator=SimpleNamespace(
            num_processes=RANKS, is_main_process=False, gather=lambda tensor: tensor
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        model_kwarg_keys=set(),
        _entropy_bonus_enabled=False,
    )
    return trainer


def replaced_lists(batch: Batch) -> tuple[Tensor, Tensor]:
    """Top-K ids and log-probs as TRL keeps them: k in the place of the last where it is missing."""
    listed, ids = batch.mu.topk(TOP_K, dim=-1)
    missing = ~(ids == batch.token_ids[..., None]).any(dim=-1)
    assert missing[batch.mask].any()
    ids[..., -1] = torch.where(missing, batch.token_ids, ids[..., -1])
    listed[..., -1] = torch.where(missing, batch.log_mu, listed[..., -1])
    return listed, ids


class Fixed(torch.nn.Module):
    """A model of the given logits at every completion token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        # The last position predicts what comes after the completion, and is dropped.
        return SimpleNamespace(logits=torch.cat([self.logits, self.logits[:, -1:]], dim=1))


def theirs(trainer: Any, batch: Batch) -> tuple[float, Tensor]:
    """TRL's loss and its gradient with respect to the logits."""
    listed, ids = replaced_lists(batch)
    model = Fixed(batch.pi * TEMPERATURE)
    loss = trainer._compute_loss(
        model,
        {
            "prompt_ids": torch.zeros(len(batch.mask), 3, dtype=torch.int64),
            "prompt_mask": torch.ones(len(batch.mask), 3),
            "completion_ids": batch.token_ids,
            "completion_mask": batch.mask.double(),
            "advantages": batch.advantage,
            "num_items_in_batch": batch.mask.sum() * 2,
            "sampling_per_token_logps": batch.log_mu,
            "sampling_topk_token_ids": ids,
            "sampling_topk_logps": listed,
        },
    )
    loss.backward()
    assert model.logits.grad is not None
    return loss.item(), model.logits.grad


def ours(
    kind: str, threshold: tuple[float, float], batch: Batch, lists: str
) -> tuple[PolicyLoss, Tensor]:
    """Our loss and gradient; from the engine's union or from lists in which k replaced the last."""
    criterion, divergence = KINDS[kind]
    if lists == "union":
        listed, ids = batch.mu.topk(TOP_K, dim=-1)
    else:
        listed, ids = replaced_lists(batch)
    logits = (batch.pi * TEMPERATURE).requires_grad_()
    read = policy_logprobs(logits, batch.token_ids, ids, temperature=TEMPERATURE)
    assert read.topk is not None
    result = trust_region_loss(
        read.logprob,
        batch.log_mu,
        batch.advantage,
        batch.mask,
        criterion=criterion,
        threshold=threshold,
        divergence=divergence,
        topk=TopKLogprobs(
            batch.token_ids,
            ids,
            listed,
            read.topk,
            vocab_size=batch.mu.shape[-1],
            support="replaced-last",
        ),
        ratio_cap=CAP,
        aggregation="dapo",
        denominator=batch.mask.sum() * 2,
        ranks=RANKS,
        convention="trl",
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return result, logits.grad


@each_kind
@each_threshold
@pytest.mark.parametrize("lists", ["union", "replaced"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_agree_to_1e_6(
    dppo: Any, kind: str, threshold: tuple[float, float], lists: str, seed: int
) -> None:
    batch = draw(seed, rows=8, columns=12)
    expected, slope = theirs(make_trainer(dppo, kind, threshold), batch)
    found, gradient = ours(kind, threshold, batch, lists)
    assert found.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-9)


@each_kind
@each_threshold
def test_the_same_tokens_are_kept_and_logged(
    dppo: Any, kind: str, threshold: tuple[float, float]
) -> None:
    batch = draw(20, rows=30, columns=30)
    trainer = make_trainer(dppo, kind, threshold)
    listed, ids = replaced_lists(batch)
    keep = trainer._compute_divergence_mask(
        batch.log_pi,
        batch.log_mu,
        batch.advantage,
        batch.mask,
        current_topk_logps=batch.pi.gather(-1, ids),
        sampling_topk_logps=listed,
    )
    found, _ = ours(kind, threshold, batch, "union")
    assert torch.equal(found.keep, keep.bool())
    assert 0 < found.metrics["masked"].value < 1
    theirs(trainer, batch)
    logged = {name: values[0] for name, values in trainer._metrics["train"].items()}
    for name, metric in (
        ("mask_ratio/overall_mean", "masked"),
        ("mask_ratio/positive_adv_mean", "masked_positive"),
        ("mask_ratio/negative_adv_mean", "masked_negative"),
        ("prob_diff/mean", "probability_shift"),
    ):
        assert found.metrics[metric].value == pytest.approx(logged[name], rel=1e-6)


@pytest.mark.parametrize("kind", ["topk_kl", "topk_tv"])
def test_the_papers_union_is_another_support_than_trls(dppo: Any, kind: str) -> None:
    """Were the option without effect, the agreement above would prove nothing of it."""
    batch = draw(21, rows=30, columns=30)
    criterion, divergence = KINDS[kind]
    _, gradient = ours(kind, (0.05, 0.05), batch, "union")
    union = batch.topk()
    replaced = TopKLogprobs(**{**union.__dict__, "support": "replaced-last"})
    losses = [
        trust_region_loss(
            batch.log_pi,
            batch.log_mu,
            batch.advantage,
            batch.mask,
            criterion=criterion,
            threshold=0.05,
            divergence=divergence,
            topk=topk,
        )
        for topk in (union, replaced)
    ]
    outside = [loss.metrics["divergence"].value for loss in losses]
    assert outside[1] < outside[0]
    assert gradient.abs().max() > 0


def test_near_certain_tokens_are_judged_by_trls_gap(dppo: Any) -> None:
    """1 − π of 1e-9: TRL's binary KL takes it for 1e-7, the paper's for itself."""
    log_mu = torch.log1p(-torch.full((1, 2), 0.02, dtype=torch.float64))
    log_pi = torch.log1p(-torch.tensor([[1e-9, 1e-6]], dtype=torch.float64))
    one = torch.ones(1, 2, dtype=torch.float64)
    # D = 0.02 log(0.02/gap) − 0.98·0.0202: 0.224 nats for a gap of 1e-7, 0.316 for one of 1e-9.
    for threshold, expected in ((0.2, [False, True]), (0.27, [True, True])):
        trainer = make_trainer(dppo, "binary_kl", (threshold, threshold))
        keep = trainer._compute_divergence_mask(log_pi, log_mu, one, one).bool().tolist()[0]
        found = {
            convention: trust_region_loss(
                log_pi,
                log_mu,
                one,
                one,
                criterion="binary-kl",
                threshold=threshold,
                convention=convention,
            ).keep.tolist()[0]
            for convention in ("trl", "paper")
        }
        assert found["trl"] == keep == expected
        assert found["paper"] == [False, True]
