"""The names that `deltad.metrics` says are verl's, against what verl's own functions log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deltad.logprobs import LogprobSums
from deltad.metrics import METRICS, metric_values
from tests.losses.batch import Batch, draw
from tests.probes.verl.verl_here import imported

pytestmark = pytest.mark.verl

HERE = ("rollout_corr/", "training/", "actor/")


def logged(batch: Batch) -> dict[str, float]:
    """Everything that verl logs of two policies, by verl's names."""
    helper = imported("verl.trainer.ppo.rollout_corr_helper")
    debug = imported("verl.utils.debug.metrics")
    core = imported("verl.trainer.ppo.core_algos")
    _, _, found = helper.compute_rollout_correction_and_rejection_mask(
        batch.log_pi, batch.log_mu, batch.mask, rollout_is="token", rollout_is_threshold=1e9
    )
    columns = {
        "rollout_log_probs": batch.log_mu,
        "old_log_probs": batch.log_pi,
        "response_mask": batch.mask.long(),
        "responses": batch.token_ids,
    }
    found = dict(found) | debug.calculate_debug_metrics(SimpleNamespace(batch=columns))
    config: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    _, metrics = core.get_policy_loss_fn("vanilla")(
        batch.log_mu,
        batch.log_pi,
        batch.advantage,
        batch.mask.long(),
        config=SimpleNamespace(**config, global_batch_info={}, get=lambda *_: 3.0),
    )
    logged: dict[str, float] = found | metrics
    return logged


def test_every_name_of_verls_is_logged_with_our_value() -> None:
    """On batches without an empty response, which verl's perplexities are not for."""
    claimed: set[str] = set()
    for seed in range(5):
        batch = draw(seed).rows(slice(0, 4))
        row, _ = np.nonzero(batch.mask.numpy())
        mask = batch.mask
        sums = LogprobSums.of(
            batch.log_mu[mask].numpy(),
            batch.log_pi[mask].numpy(),
            advantage=batch.advantage[mask].numpy(),
            sequence=row,
        )
        ours, theirs = metric_values(sums), logged(batch)
        for name, metric in METRICS.items():
            for verl_name in metric.theirs:
                if verl_name.startswith(HERE):
                    assert ours[name] == pytest.approx(theirs[verl_name], rel=1e-5, abs=1e-7), (
                        name,
                        verl_name,
                    )
                    claimed.add(verl_name)
    assert len(claimed) == 23


def test_nothing_of_verls_off_policy_metrics_is_left_out() -> None:
    helper = imported("verl.trainer.ppo.rollout_corr_helper")
    batch = draw(0).rows(slice(0, 4))
    names = helper.compute_rollout_corr_metrics_from_logprobs(
        batch.log_pi, batch.log_mu, batch.mask
    )
    assert set(names) <= {each for metric in METRICS.values() for each in metric.theirs}
