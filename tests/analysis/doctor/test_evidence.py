from __future__ import annotations

import numpy as np
import pytest

from deltad.analysis.doctor.evidence import Evidence
from tests.analysis.doctor.made import LENGTH, RESPONSES, log_softmax, made_sample


def test_slope_and_drift_are_those_of_a_straight_line() -> None:
    evidence = Evidence(made_sample(update=1e-3, policy=lambda logits: logits / 2))
    np.testing.assert_allclose(evidence.slope, 0.5, atol=0.02)
    assert np.median(evidence.drift) < 0.01


def test_correlation_is_numpys() -> None:
    evidence = Evidence(made_sample(update=0.5))
    row = 17
    at = evidence.rows[row]
    expected = np.corrcoef(evidence.mu[at], evidence.pi[at])
    assert evidence.correlation[row] == pytest.approx(expected[0, 1])
    fitted = np.polyfit(evidence.mu[at], evidence.pi[at], 1)
    assert evidence.slope[row] == pytest.approx(fitted[0])


def test_divergence_is_below_that_of_the_whole_vocabulary_and_near_it() -> None:
    evidence = Evidence(made_sample(vocab_size=30, top_k=28))
    mu, pi = np.exp(evidence.mu), np.exp(evidence.pi)
    rest_mu, rest_pi = 1 - mu.sum(axis=1), 1 - pi.sum(axis=1)
    expected = (mu * np.log(mu / pi)).sum(axis=1) + rest_mu * np.log(rest_mu / rest_pi)
    np.testing.assert_allclose(evidence.divergence, expected, atol=1e-4)


def test_estimate_at_vanishing_drift_forgets_rows_that_drifted() -> None:
    evidence = Evidence(made_sample(update=0.4, policy=lambda logits: logits / 1.25))
    found = evidence.at_vanishing_drift(np.log(np.maximum(evidence.slope, 1e-3)))
    assert np.exp(-found.value) == pytest.approx(1.25, rel=0.05)
    assert found.rows <= len(evidence.rows) / 2 + 1
    assert found.clusters > 5


def test_too_few_rows_give_no_estimate() -> None:
    sample = made_sample()
    evidence = Evidence(sample.take(np.arange(20)))
    assert np.isnan(evidence.at_vanishing_drift(evidence.slope).value)


def test_neighbours_are_rows_of_one_response_at_that_distance() -> None:
    sample = made_sample()
    shuffled = sample.take(np.random.default_rng(0).permutation(len(sample)))
    evidence = Evidence(shuffled)
    for distance in (1, -2):
        rows, others = evidence.neighbours(distance)
        gap = shuffled["position"][rows] - shuffled["position"][others]
        assert (gap == distance).all()
        assert (evidence.response[rows] == evidence.response[others]).all()
        assert len(rows) == len(sample) * (LENGTH - abs(distance)) / LENGTH


def test_twins_share_prompt_and_prefix() -> None:
    sample = made_sample()
    evidence = Evidence(sample)
    firsts = [rows for rows in evidence.twins if (sample["position"][rows] == 0).all()]
    assert len(firsts) == len(sample) / LENGTH / RESPONSES
    for rows in firsts:
        assert len(rows) == RESPONSES
        np.testing.assert_array_equal(evidence.mu[rows[0]], evidence.mu[rows[1]])


def test_tilt_is_zero_for_the_recorded_sampler_and_the_known_share_for_another() -> None:
    value, error = Evidence(made_sample(groups=20)).tilt
    assert abs(value) < 4 * error
    # At step 1 the sampler lies 4 of 5 parts of the way from the recorded μ to π.
    sample = made_sample(steps=1, groups=60, lag=4.0, sampler=lambda logits: logits)
    value, error = Evidence(sample).tilt
    assert value == pytest.approx(0.8, abs=4 * error + 0.05)


def test_a_sample_of_log_probs_is_normalised() -> None:
    np.testing.assert_allclose(np.exp(log_softmax(np.zeros((2, 4)))).sum(axis=1), 1)
