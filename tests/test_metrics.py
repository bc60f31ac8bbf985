"""The metrics against loops over tokens and sequences, and the laws that they obey."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.logprobs import LOG_RATIO_BOUND, LogprobSums, k1, k2, k3
from deltad.masks import CRITERIA, Tokens
from deltad.metrics import METRICS, metric_values, metrics_reference

few = settings(max_examples=20, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """Log-probs of a few sequences, in any order of tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = draw(st.integers(2, 30))
    behavior = -rng.exponential(size=tokens)
    drift = draw(st.sampled_from([0.0, 0.01, 1.0]))
    return {
        "behavior_logprob": behavior,
        "policy_logprob": np.minimum(
            behavior + drift * rng.normal(size=tokens), -1e-3 * rng.random(tokens)
        ),
        "advantage": rng.choice([-1.0, 0.0, 1.0], size=tokens),
        "sequence": rng.integers(0, 4, size=tokens) * 7 - 3,
    }


def sums_of(batch: dict[str, Any]) -> LogprobSums:
    return LogprobSums.of(
        batch["behavior_logprob"],
        batch["policy_logprob"],
        advantage=batch["advantage"],
        sequence=batch["sequence"],
    )


def by_hand(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, float]:
    """Every metric as a formula over Python's own numbers."""
    mu, pi, advantage, sequence = (values.tolist() for values in batch.values())
    ratio = [math.exp(p - m) for m, p in zip(mu, pi, strict=True)]
    shift = [abs(math.exp(p) - math.exp(m)) for m, p in zip(mu, pi, strict=True)]
    mean = statistics.fmean
    groups = [[i for i, each in enumerate(sequence) if each == one] for one in set(sequence)]
    log_mu = [-mean(mu[i] for i in group) for group in groups]
    log_pi = [-mean(pi[i] for i in group) for group in groups]
    gaps = [p - m for m, p in zip(log_mu, log_pi, strict=True)]
    products = [math.prod(ratio[i] for i in group) for group in groups]
    both = list(zip(ratio, advantage, strict=True))
    return {
        "kl": mean(m - p for m, p in zip(mu, pi, strict=True)),
        "k2_kl": mean(math.log(r) ** 2 / 2 for r in ratio),
        "k3_kl": mean(r - 1 - math.log(r) for r in ratio),
        "chi2_token": mean(r * r - 1 for r in ratio),
        "chi2_seq": mean(r * r - 1 for r in products),
        "ess": sum(ratio) ** 2 / sum(r * r for r in ratio) / len(ratio),
        "ess_seq": sum(products) ** 2 / sum(r * r for r in products) / len(products),
        "sequence_ratio_mean": mean(products),
        "ratio_mean": mean(ratio),
        "ratio_max": max(ratio),
        "ratio_min": min(ratio),
        "behavior_ppl": mean(map(math.exp, log_mu)),
        "policy_ppl": mean(map(math.exp, log_pi)),
        "behavior_log_ppl": mean(log_mu),
        "policy_log_ppl": mean(log_pi),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean(map(abs, gaps)),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean(map(math.exp, gaps)),
        "logprob_diff_mean": mean(abs(p - m) for m, p in zip(mu, pi, strict=True)),
        "logprob_diff_max": max(abs(p - m) for m, p in zip(mu, pi, strict=True)),
        "prob_diff_mean": mean(shift),
        "prob_diff_max": max(shift),
        "prob_diff_std": statistics.stdev(shift),
        "prob_pearson": statistics.correlation([*map(math.exp, mu)], [*map(math.exp, pi)]),
        "clip_fraction": mean((r > 1.28 and a > 0) or (r < 0.8 and a < 0) for r, a in both),
    }


@few
@given(batch=batches())
def test_every_metric_is_its_formula(batch: dict[str, np.ndarray[Any, Any]]) -> None:
    expected = by_hand(batch)
    found = metric_values(sums_of(batch))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


@few
@given(batch=batches(), cut=st.integers(0, 4))
def test_batches_of_whole_sequences_add_up(
    batch: dict[str, np.ndarray[Any, Any]], cut: int
) -> None:
    first = batch["sequence"] < cut * 7 - 3
    parts = [{name: values[rows] for name, values in batch.items()} for rows in (first, ~first)]
    together = metric_values(sums_of(parts[0]) + sums_of(parts[1]))
    for name, value in metric_values(sums_of(batch)).items():
        assert together[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@few
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.1, 1.0, 4.0]))
def test_expectations_under_the_behavior_policy(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    mu, pi = np.exp(logits := rng.normal(size=(2, 9)) * scale) / np.exp(logits).sum(1)[:, None]
    log_mu, log_pi = np.log(mu), np.log(pi)
    forward = (mu * (log_mu - log_pi)).sum()
    assert (mu * k1(log_mu, log_pi)).sum() == pytest.approx(forward)
    assert (mu * k3(log_mu, log_pi)).sum() == pytest.approx(forward)
    ratio = pi / mu
    assert (mu * ratio).sum() == pytest.approx(1)
    chi2 = ((pi - mu) ** 2 / mu).sum()
    assert (mu * (ratio**2 - 1)).sum() == pytest.approx(chi2)


def test_k2_equals_the_kl_to_second_order() -> None:
    rng = np.random.default_rng(0)
    logits, move = rng.normal(size=(2, 9))
    errors = []
    for step in (1e-2, 5e-3):
        mu, pi = (np.exp(z) / np.exp(z).sum() for z in (logits, logits + step * move))
        log_mu, log_pi = np.log(mu), np.log(pi)
        kl = (mu * (log_mu - log_pi)).sum()
        errors.append(abs((mu * k2(log_mu, log_pi)).sum() - kl) / kl)
    assert errors[0] < 0.02
    assert errors[1] < 0.6 * errors[0]


@few
@given(batch=batches())
def test_bounds(batch: dict[str, np.ndarray[Any, Any]]) -> None:
    mu, pi = batch["behavior_logprob"], batch["policy_logprob"]
    assert (k2(mu, pi) >= 0).all()
    assert (k3(mu, pi) >= -1e-15).all()
    sums = sums_of(batch)
    found = metric_values(sums)
    for name, count in (("ess", sums.tokens), ("ess_seq", sums.sequences)):
        assert 1 / count - 1e-9 <= found[name] <= 1 + 1e-9
    assert -1 - 1e-6 <= found["prob_pearson"] <= 1 + 1e-6
    assert found["log_ppl_diff_min"] <= found["log_ppl_diff"] <= found["log_ppl_diff_max"] + 1e-12
    assert found["log_ppl_diff"] <= found["log_ppl_abs_diff"] + 1e-12
    assert 0 <= found["clip_fraction"] <= 1


@few
@given(batch=batches())
def test_equal_policies_have_nothing_to_report(batch: dict[str, np.ndarray[Any, Any]]) -> None:
    same = {**batch, "policy_logprob": batch["behavior_logprob"]}
    found = metric_values(sums_of(same))
    zero = ("kl", "k2_kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff",
            "logprob_diff_max", "prob_diff_max", "prob_diff_std", "clip_fraction")  # fmt: skip
    assert all(found[name] == pytest.approx(0, abs=1e-12) for name in zero)
    one = (
        "ess",
        "ess_seq",
        "sequence_ratio_mean",
        "ratio_mean",
        "ratio_max",
        "ratio_min",
        "ppl_ratio",
    )
    assert all(found[name] == pytest.approx(1) for name in one)


@few
@given(batch=batches())
def test_the_clip_fraction_is_what_clip_higher_masks(
    batch: dict[str, np.ndarray[Any, Any]],
) -> None:
    tokens = Tokens(batch["advantage"], batch["behavior_logprob"], batch["policy_logprob"])
    masked = ~CRITERIA["clip-higher"].keeps(tokens)
    assert metric_values(sums_of(batch))["clip_fraction"] == pytest.approx(masked.mean())


def test_what_is_not_known_is_nan() -> None:
    assert all(math.isnan(value) for value in metric_values(LogprobSums()).values())
    found = metric_values(LogprobSums.of(np.log([0.5]), np.log([0.25])))
    assert {name for name, value in found.items() if math.isnan(value)} == {
        "chi2_seq", "ess_seq", "sequence_ratio_mean", "behavior_ppl", "policy_ppl",
        "behavior_log_ppl", "policy_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
        "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio",
        "prob_diff_std", "prob_pearson", "clip_fraction",
    }  # fmt: skip
    assert LogprobSums.of(np.zeros(0), np.zeros(0), sequence=np.zeros(0, int)) == LogprobSums()


def test_one_absurd_token_leaves_every_sum_finite() -> None:
    sums = LogprobSums.of(
        np.array([-5000.0, -1.0]), np.array([-1.0, -5000.0]), sequence=np.array([0, 1])
    )
    found = metric_values(sums)
    infinite = {name for name, value in found.items() if not np.isfinite(value)}
    assert infinite == {"clip_fraction", "chi2_seq", "sequence_ratio_mean"}
    assert found["ess_seq"] == pytest.approx(0.5)  # of two sequences one counts
    assert found["ratio_max"] == pytest.approx(math.exp(LOG_RATIO_BOUND))


@pytest.mark.parametrize("per_token", [-0.05, 0.0, 0.005])
def test_products_over_long_sequences_are_neither_bounded_nor_rounded_to_nothing(
    per_token: float,
) -> None:
    """Whole sequences far from μ are not equally good, and batches of them add up."""
    rng = np.random.default_rng(0)
    sequences, length = 64, 32_000
    log_ratio = per_token + 0.1 * rng.normal(size=(sequences, length))
    sums = LogprobSums()
    for rows in np.split(log_ratio, 4):
        mu = np.full(rows.size, -1.0)
        sequence = np.repeat(np.arange(len(rows)), length)
        sums += LogprobSums.of(mu, mu + rows.ravel(), sequence=sequence)
    products = log_ratio.sum(axis=1)
    most = products.max()
    weights = [math.exp(each - most) for each in products]
    expected = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / sequences
    found = metric_values(sums)
    assert found["ess_seq"] == pytest.approx(expected, rel=1e-6)
    assert found["ess_seq"] < 0.1
    mean = math.log(math.fsum(weights) / sequences) + most
    assert sums.log_sequence_ratio - math.log(sequences) == pytest.approx(mean, rel=1e-9)
    square = math.log(math.fsum(w * w for w in weights) / sequences) + 2 * most
    chi2 = math.exp(square) - 1 if square < 700 else math.inf
    assert found["chi2_seq"] == pytest.approx(chi2, rel=1e-6)


def test_tensors_count_like_arrays() -> None:
    rng = np.random.default_rng(0)
    mu, pi = -rng.exponential(size=(2, 20))
    sequence, advantage = np.arange(20) // 6, rng.normal(size=20)
    arrays = LogprobSums.of(mu, pi, advantage=advantage, sequence=sequence)
    tensors = LogprobSums.of(
        torch.from_numpy(mu).requires_grad_(),
        torch.from_numpy(pi),
        advantage=torch.from_numpy(advantage),
        sequence=torch.from_numpy(sequence),
    )
    assert arrays == tensors
    for estimator in (k1, k2, k3):
        np.testing.assert_allclose(
            estimator(torch.from_numpy(mu), torch.from_numpy(pi)).numpy(), estimator(mu, pi)
        )


def test_arrays_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="advantage"):
        LogprobSums.of(np.zeros(3), np.zeros(3), advantage=np.zeros(2))
    with pytest.raises(ValueError, match="policy_logprob"):
        LogprobSums.of(np.zeros(3), np.zeros((3, 1)))


def test_the_page_holds_the_table_of_all_metrics() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert metrics_reference() in page
    assert all(name == metric.name for name, metric in METRICS.items())
