"""The paper's headline read again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from deltad.analysis import Headline, read_headline
from deltad.analysis.headline import SPLITS

FOUND = read_headline()


def test_the_share_of_seeds_has_the_exact_interval() -> None:
    expected = scipy.stats.binomtest(38, 61).proportion_ci(method="exact")
    np.testing.assert_allclose(FOUND.share_ci95, (expected.low, expected.high))
    all_lower = Headline(0.1, 0.2, 5, 5, 10).share_ci95
    np.testing.assert_allclose(all_lower, (0.025 ** (1 / 5), 1.0))


def test_two_ties_among_the_others_would_settle_the_sign_test() -> None:
    assert FOUND.sign_test_p == FOUND.with_ties[0] == pytest.approx(0.0722, abs=1e-4)
    below = [ties for ties, p in FOUND.with_ties.items() if p < 0.05]
    assert below == [2, 3, 4, 5]
    for ties, p in FOUND.with_ties.items():
        assert p == pytest.approx(scipy.stats.binomtest(38, 61 - ties).pvalue)


def test_a_normal_spread_gives_the_share_of_lower_seeds_back() -> None:
    spread = FOUND.spreads[0].spread
    assert scipy.stats.norm.cdf(0.027 / spread) == pytest.approx(38 / 61)


def test_noise_of_tokens_alone_is_the_binomial_one() -> None:
    for each, (ours, theirs) in zip(FOUND.spreads[1:], SPLITS, strict=True):
        assert ours + theirs == FOUND.disagreement
        variance = 0.342 * 0.658 / ours + 0.369 * 0.631 / theirs
        assert each.spread == pytest.approx(math.sqrt(variance))
    assert FOUND.spreads[1].lower_if_equal == pytest.approx(0.5)


def test_rates_that_are_equal_in_truth_are_lower_as_often_as_simulated() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = SPLITS[1]
    a, b = (rng.binomial(n, (0.342 + 0.369) / 2, 400_000) / n for n in (ours, theirs))
    share = (a < b).sum() / (a != b).sum()
    assert FOUND.spreads[2].lower_if_equal == pytest.approx(share, abs=0.003)


def test_power_and_seeds_are_those_of_simulated_normal_differences() -> None:
    rng = np.random.default_rng(1)
    for each in FOUND.spreads:
        for size, seeds, power in (
            (0.027, 61, each.power),
            (each.detectable, 61, 0.8),
            (0.027, each.seeds, 0.8),
        ):
            draws = rng.normal(size, each.spread, (4000, seeds))
            rejected = scipy.stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
            assert np.mean(rejected) == pytest.approx(power, abs=0.03)


def test_every_form_tells_the_same() -> None:
    text = str(FOUND)
    assert "34.2 against 36.9 %, lower in 38 of 61 seeds" in text
    assert "Suggestive, not settled" in text
    found = FOUND.to_json_object()
    assert [each["spread"] for each in found["spreads"]] == FOUND.columns()["spread"]
    assert found["lower_ci95"] == list(FOUND.share_ci95)
    assert len(FOUND.to_frame()) == 4
