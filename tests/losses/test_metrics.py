"""Numerators and denominators against counts made token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deltad.losses import Metric, add_metrics
from deltad.losses.metrics import MEANINGS
from tests import oracle
from tests.losses.batch import Batch, draw, run

THRESHOLD = 0.05


def count(batch: Batch, rule: str, cap: float) -> dict[str, float]:
    """Sums over the response tokens, in plain Python from both whole distributions."""
    sums: dict[str, float] = dict.fromkeys(MEANINGS, 0.0)
    keep = run(batch, criterion=rule).keep
    ids = batch.topk().topk_ids
    for row, column in batch.mask.nonzero().tolist():
        mu, pi = (p[row, column].exp().tolist() for p in (batch.mu, batch.pi))
        k, a = int(batch.token_ids[row, column]), float(batch.advantage[row, column])
        r = pi[k] / mu[k]
        d = oracle.kl(mu, pi, oracle.support_of(ids[row, column].tolist(), k))
        kept = bool(keep[row, column])
        ratio_masks = d > THRESHOLD and a * (r - 1) > 0
        sums["outside"] += d > THRESHOLD
        sums["masked"] += not kept
        sums["masked_positive"] += not kept and a > 0
        sums["masked_negative"] += not kept and a < 0
        sums["disagreement"] += d > THRESHOLD and ratio_masks == kept
        sums["clip_fraction"] += (a > 0 and r > 1.28) or (a < 0 and r < 0.8)
        sums["capped"] += kept and r > cap
        sums["ppo_kl"] -= math.log(r)
        sums["ratio"] += r
        sums["divergence"] += d
        sums["probability_shift"] += abs(pi[k] - mu[k])
        sums["weight"] += kept
    return sums


@pytest.mark.parametrize("rule", ["ratio", "predictive-kl-aggregated", "clip-higher"])
def test_sums_are_those_of_a_loop_over_tokens(rule: str) -> None:
    batch = draw(0, rows=8, columns=9)
    expected = count(batch, rule, cap=1.2)
    found = run(batch, criterion=rule, ratio_cap=1.2).metrics
    assert found.keys() == expected.keys() - {"dual_clipped"}
    tokens = batch.mask.sum().item()
    for name, metric in found.items():
        assert metric.numerator.item() == pytest.approx(expected[name], rel=1e-10), name
        assert metric.denominator.item() == tokens
    assert expected["outside"] > expected["masked"] > 0
    assert expected["capped"] > 0


def test_the_ratio_rule_disagrees_with_itself_nowhere_and_with_a_prediction_somewhere() -> None:
    batch = draw(1, rows=12, columns=12)
    assert run(batch, criterion="ratio").metrics["disagreement"].value == 0
    assert run(batch).metrics["disagreement"].value > 0


def test_without_a_top_k_the_binary_divergence_is_measured_and_no_disagreement() -> None:
    batch = draw(2)
    found = run(batch, criterion="binary-tv", topk=None).metrics
    assert "disagreement" not in found
    shift = (batch.log_pi.exp() - batch.log_mu.exp()).abs()[batch.mask]
    assert found["divergence"].numerator.item() == pytest.approx(shift.sum().item())
    assert found["outside"].numerator.item() == (shift > THRESHOLD).sum().item()


def test_the_dual_clip_is_counted_apart() -> None:
    batch = draw(3, rows=10, columns=10, shift=2.0)
    found = run(batch, criterion="clip-higher", parameters={"dual": 1.5}).metrics
    ratio = (batch.log_pi - batch.log_mu).exp()
    expected = (batch.advantage < 0) & (ratio > 1.5) & batch.mask
    assert found["dual_clipped"].numerator.item() == expected.sum().item() > 0
    plain = run(batch, criterion="clip-higher").metrics
    assert (
        found["masked"].numerator.item() == plain["masked"].numerator.item() + expected.sum().item()
    )


def test_outside_takes_the_threshold_of_the_advantages_sign() -> None:
    batch = draw(4)
    both = run(batch, threshold=(0.02, 0.3)).metrics["outside"].numerator.item()
    negative = replace(batch, mask=batch.mask & (batch.advantage <= 0))
    positive = replace(batch, mask=batch.mask & (batch.advantage > 0))
    assert both == (
        run(negative, threshold=0.02).metrics["outside"].numerator.item()
        + run(positive, threshold=0.3).metrics["outside"].numerator.item()
    )


def test_a_share_is_divided_last_and_undefined_over_no_tokens() -> None:
    one, two = (
        {"masked": Metric(torch.tensor(n), torch.tensor(d))} for n, d in ((1.0, 2.0), (0.0, 6.0))
    )
    assert add_metrics([one, two])["masked"].value == 0.125
    assert math.isnan(Metric(torch.tensor(0.0), torch.tensor(0.0)).value)
    assert add_metrics([]) == {}
    assert add_metrics([one, {}]) == {}
