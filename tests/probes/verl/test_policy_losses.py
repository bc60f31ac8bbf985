"""verl's own policy losses on random batches against `deltad.losses`, and the registered masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltad.losses import trust_region_loss
from deltad.masks import CRITERIA
from deltad.probes import ProbeError
from deltad.probes.verl.policy_losses import LOSSES, TopKFields, offer_topk, register_losses
from tests.losses.batch import Batch, draw
from tests.probes.verl.verl_here import imported

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
LOW, HIGH, CAP = 0.03, 0.06, 1.5
INFO = {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 7, "loss_scale_factor": 11}


def config(**options: Any) -> Any:
    """What a policy loss looks at in verl's actor config."""
    values = {
        "clip_ratio": 0.2,
        "clip_ratio_low": LOW,
        "clip_ratio_high": HIGH,
        "clip_ratio_c": CAP,
        "global_batch_info": INFO,
        **options,
    }
    return SimpleNamespace(**values, get=lambda name, default=None: values.get(name, default))


def loss_and_gradient(function: Any, batch: Batch, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Call a loss of verl's signature."""
    logprob = batch.log_pi.clone().requires_grad_()
    loss, metrics = function(
        old_log_prob=batch.log_mu,
        log_prob=logprob,
        advantages=batch.advantage,
        response_mask=batch.mask.long(),
        **options,
    )
    (gradient,) = torch.autograd.grad(loss, logprob)
    return loss.detach(), gradient, metrics


def fields(batch: Batch) -> TopKFields:
    topk = batch.topk()
    return TopKFields(
        topk.token_ids, topk.topk_ids, topk.behavior, topk.policy, topk.collision, topk.vocab_size
    )


@pytest.fixture(scope="module")
def core_algos() -> Any:
    """verl's module of losses."""
    return imported("verl.trainer.ppo.core_algos")


@pytest.mark.verl
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("theirs", ["vanilla", "dppo_kl", "dppo_tv"])
def test_deltad_losses_reproduce_verls(
    core_algos: Any, theirs: str, mode: str, weighted: bool
) -> None:
    """Value, gradient and the share of masked tokens, all in float64."""
    differing = 0.0
    for seed in range(8):
        batch = draw(seed)
        weights = torch.rand(batch.mask.shape, dtype=torch.float64) if weighted else None
        expected, gradient, metrics = loss_and_gradient(
            core_algos.get_policy_loss_fn(theirs),
            batch,
            loss_agg_mode=mode,
            config=config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
            if theirs == "vanilla"
            else config(),
            rollout_is_weights=weights,
        )
        logprob = batch.log_pi.clone().requires_grad_()
        ours = trust_region_loss(
            logprob,
            batch.log_mu,
            batch.advantage,
            batch.mask,
            **(
                {
                    "criterion": "clip-higher",
                    "parameters": {"low": 0.2, "high": 0.28, "dual": 3.0},
                }
                if theirs == "vanilla"
                else {
                    "criterion": f"binary-{theirs[-2:]}",
                    "threshold": (LOW, HIGH),
                    "ratio_cap": CAP,
                }
            ),
            token_weight=weights,
            convention="verl",
            aggregation=mode,
            denominator={"token-mean": 31, "token-sum": None}.get(mode, 7),
            ranks=2,
            horizon=11,
        )
        ours.loss.backward()  # type: ignore[no-untyped-call]
        assert logprob.grad is not None
        torch.testing.assert_close(ours.loss.detach(), expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(logprob.grad, gradient, rtol=1e-6, atol=1e-9)
        if theirs != "vanilla":  # it counts tokens clipped to the dual bound apart
            share = metrics["actor/pg_clipfrac"]
            assert ours.metrics["masked"].value == pytest.approx(share, abs=1e-6)
            differing += share
        assert ours.metrics["ppo_kl"].value == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)
    assert theirs == "vanilla" or differing > 0


@pytest.mark.verl
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["kl", "tv"])
def test_our_binary_masks_train_as_verls_dppo(core_algos: Any, family: str, mode: str) -> None:
    """What `binary_kl` trains with is what `dppo_kl` does, in float32 as verl calls it."""
    for seed in range(8):
        batch = draw(seed)
        options = {"loss_agg_mode": mode, "config": config()}
        _, expected, _ = loss_and_gradient(
            core_algos.get_policy_loss_fn(f"dppo_{family}"), batch, **options
        )
        _, gradient, _ = loss_and_gradient(LOSSES[f"binary_{family}"], batch, **options)
        torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.verl
def test_every_loss_is_registered_under_a_name_of_its_own(core_algos: Any) -> None:
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    register_losses(core_algos)
    assert {name for name in LOSSES if core_algos.get_policy_loss_fn(name) is LOSSES[name]} == set(
        LOSSES
    )
    for name, loss in before.items():
        assert core_algos.POLICY_LOSS_REGISTRY[name] is loss


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_registered_loss_keeps_what_its_criterion_keeps(name: str) -> None:
    loss = LOSSES[name]
    masked = 0
    for seed in range(3):
        batch = draw(seed)
        with offer_topk(fields(batch) if loss.wants_topk else None):
            value, gradient, metrics = loss_and_gradient(loss, batch, config=config())
        expected = trust_region_loss(
            batch.log_pi,
            batch.log_mu,
            batch.advantage,
            batch.mask,
            criterion=loss.criterion,
            divergence=loss.divergence,
            **(
                {"parameters": {"low": LOW, "high": HIGH, "dual": CAP}}
                if name == "clip_higher"
                else {"threshold": (LOW, HIGH), "ratio_cap": CAP}
            ),
            topk=batch.topk() if loss.wants_topk else None,
            denominator=31,
            ranks=2,
        )
        assert torch.equal(gradient != 0, expected.keep & (batch.advantage != 0))
        torch.testing.assert_close(value.double(), expected.loss, rtol=1e-5, atol=1e-6)
        share = expected.metrics["masked"].value
        masked += int((~expected.keep & (batch.mask != 0)).sum())
        assert metrics["deltad/masked/sum"] / metrics["deltad/masked/count"] == pytest.approx(share)
        assert metrics["actor/pg_clipfrac"] == pytest.approx(share)
    assert masked > 0


def test_the_names_cover_every_criterion_that_a_trainer_has_numbers_for() -> None:
    covered = {loss.criterion for loss in LOSSES.values()}
    assert covered == {name for name in CRITERIA if not name.endswith("-full")}
    assert LOSSES["predictive_kl"].criterion == "predictive-kl-aggregated"
    assert LOSSES["dppo_topk_tv"].criterion == "ratio"
    assert LOSSES["dppo_topk_tv"].divergence == "tv"


def test_no_logged_name_makes_verl_take_an_extreme() -> None:
    """verl's `reduce_metrics` takes the least or greatest where a name holds "min" or "max"."""
    batch = draw(0)
    with offer_topk(fields(batch)):
        _, _, metrics = loss_and_gradient(LOSSES["predictive_kl"], batch, config=config())
    assert "deltad/outside/sum" in metrics
    assert not [name for name in metrics if "min" in name or "max" in name]


def test_a_topk_loss_without_the_topk_says_what_to_set() -> None:
    with pytest.raises(ProbeError, match=r"deltad_rescored .*default_agent_loop"):
        loss_and_gradient(LOSSES["predictive_kl"], draw(0), config=config())


def test_a_name_that_is_taken_is_refused() -> None:
    taken = SimpleNamespace(POLICY_LOSS_REGISTRY={"binary_kl": print})
    with pytest.raises(ProbeError, match="has a policy loss 'binary_kl' already"):
        register_losses(taken)  # type: ignore[arg-type]
