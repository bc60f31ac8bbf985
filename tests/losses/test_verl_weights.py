"""The soft weights against verl's own: its engine correction (capped, IcePop) and CISPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltad.losses import trust_region_loss
from deltad.masks import Tokens, rule
from tests.losses.batch import draw

pytestmark = pytest.mark.verl

LOW, HIGH = 0.7, 1.5


@pytest.mark.parametrize(
    ("threshold", "name", "parameters"),
    [(HIGH, "tis", {"cap": HIGH}), (f"{LOW}_{HIGH}", "icepop", {"low": LOW, "high": HIGH})],
)
def test_weight_times_r_is_verls_correction(
    threshold: float | str, name: str, parameters: dict[str, Any]
) -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    batch = draw(0, rows=8, columns=12, shift=1.5)
    correction = helper.compute_rollout_correction_weights(
        batch.log_pi - batch.log_mu,
        batch.mask.double(),
        rollout_is="token",
        rollout_is_threshold=threshold,
    )[0]
    tokens = Tokens(batch.advantage.flatten(), batch.log_mu.flatten(), batch.log_pi.flatten())
    found = rule(name).with_parameters(parameters).weigh(tokens) * tokens.ratio
    used = batch.mask.flatten()
    ratio = tokens.ratio[used]
    assert (ratio > HIGH).any()
    assert (ratio < LOW).any()
    torch.testing.assert_close(found[used], correction.flatten()[used], rtol=1e-9, atol=0)


def test_cispo_is_verls_without_its_lower_bound() -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    config: Any = pytest.importorskip("verl.workers.config").ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=1.0,
        clip_ratio_high=HIGH - 1,
    )
    batch = draw(1, rows=8, columns=12, shift=1.5)
    theirs, ours = (batch.log_pi.clone().requires_grad_() for _ in range(2))
    expected, logged = core.get_policy_loss_fn("cispo")(
        batch.log_mu, theirs, batch.advantage, batch.mask.double(), "token-mean", config
    )
    expected.backward()
    found = trust_region_loss(
        ours,
        batch.log_mu,
        batch.advantage,
        batch.mask,
        criterion="cispo",
        parameters={"cap": HIGH},
        convention="verl",
    )
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert logged["actor/pg_clipfrac"] > 0
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-12)
