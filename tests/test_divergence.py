"""Laws of the divergences, each for every entry of the registry."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given

from deltad.divergence import DIVERGENCES, KL_TAIL_FLOOR, kl, tv
from deltad.support import binary_support, topk_support
from tests import oracle
from tests.policies import Pair, as_numpy, draw_pair, pairs

ORACLES = {"kl": oracle.kl, "tv": oracle.tv}


def test_every_divergence_has_an_oracle() -> None:
    assert set(ORACLES) == set(DIVERGENCES)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_divergence_is_that_of_the_equations(name: str, pair: Pair) -> None:
    found = DIVERGENCES[name](pair.support())
    for row in range(len(found)):
        ids = oracle.support_of(pair.topk_ids[row].tolist(), int(pair.token_id[row]))
        expected = ORACLES[name](pair.mu[row].tolist(), pair.pi[row].tolist(), ids)
        assert found[row] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_divergence_is_not_negative(name: str, pair: Pair) -> None:
    assert (DIVERGENCES[name](pair.support()) >= -1e-12).all()


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_divergence_of_a_policy_from_itself_is_exactly_zero(name: str, pair: Pair) -> None:
    same = Pair(pair.mu, pair.mu, pair.topk_ids, pair.token_id, pair.advantage)
    support = same.support()
    floored = (support.mu_tail > 0) & (support.mu_tail < KL_TAIL_FLOOR)
    found = DIVERGENCES[name](support)
    assert (found[~floored] == 0).all()
    # μ_t log(μ_t / 1e-12) is least at 1e-12/e
    np.testing.assert_allclose(found[floored], 0, atol=KL_TAIL_FLOOR)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_reduction_never_increases_a_divergence(name: str, pair: Pair) -> None:
    divergence = DIVERGENCES[name]
    reduced, full = divergence(pair.support()), divergence(pair.full())
    assert (reduced <= full + 1e-9 * (1 + full)).all()
    mu_k, pi_k = pair.logprobs()[2:]
    binary = divergence(binary_support(mu_k, pi_k))
    assert (binary <= reduced + 1e-9 * (1 + reduced)).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_top_k_of_the_whole_vocabulary_is_the_full_divergence(name: str) -> None:
    pair = draw_pair(np.random.default_rng(0), vocab_size=9, top_k=9)
    found = DIVERGENCES[name]
    np.testing.assert_allclose(found(pair.support()), found(pair.full()), rtol=1e-13)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_order_and_names_of_ids_do_not_matter(name: str) -> None:
    rng = np.random.default_rng(1)
    pair = draw_pair(rng, tokens=32)
    relabel = rng.permutation(pair.vocab_size)
    inverse = np.argsort(relabel)
    moved = Pair(
        pair.mu[:, inverse],
        pair.pi[:, inverse],
        relabel[pair.topk_ids[:, ::-1]],
        relabel[pair.token_id],
        pair.advantage,
    )
    np.testing.assert_allclose(
        DIVERGENCES[name](pair.support()), DIVERGENCES[name](moved.support()), rtol=1e-12
    )


@given(pair=pairs())
def test_pinsker_bounds_total_variation_by_kl(pair: Pair) -> None:
    support = pair.full()
    assert (tv(support) ** 2 <= kl(support) / 2 + 1e-12).all()


def test_half_the_mean_distance_of_the_ratio_from_one_is_total_variation() -> None:
    pair = draw_pair(np.random.default_rng(2), tokens=16)
    mean = (pair.mu * np.abs(pair.pi / pair.mu - 1)).sum(axis=1) / 2
    np.testing.assert_allclose(tv(pair.full()), mean, rtol=1e-12)


def _one_id(mu: float, pi: float, n: int = 3) -> SimpleNamespace:
    """μ and π of one listed id that was sampled; the rest is the tail."""
    listed = np.log([[mu]]), np.log([[pi]])
    return SimpleNamespace(
        support=topk_support(
            np.array([[0]]), *listed, np.array([0]), np.log([mu]), np.log([pi]), vocab_size=n
        )
    )


def test_no_behavior_tail_contributes_nothing_to_kl() -> None:
    assert kl(_one_id(1.0, 0.25).support)[0] == pytest.approx(math.log(4))


def test_no_policy_tail_is_floored_in_kl() -> None:
    found = kl(_one_id(0.75, 1.0).support)[0]
    assert found == pytest.approx(0.75 * math.log(0.75) + 0.25 * math.log(0.25 / 1e-12))


def test_minus_infinity_in_the_behavior_contributes_nothing_to_kl() -> None:
    support = topk_support(
        np.array([[0, 1]]),
        np.array([[np.log(0.5), -np.inf]]),
        np.log([[0.25, 0.5]]),
        np.array([0]),
        np.log([0.5]),
        np.log([0.25]),
        vocab_size=2,
    )
    assert kl(support)[0] == pytest.approx(0.5 * math.log(2))
    assert tv(support)[0] == pytest.approx(0.375)


@pytest.mark.parametrize("gap", [-30.0, 30.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_enormous_ratios_stay_finite(name: str, gap: float) -> None:
    low, high = np.array([-31.0 if gap < 0 else -1.0]), np.array([-1.0 if gap < 0 else -31.0])
    found = DIVERGENCES[name](binary_support(low, high))
    assert np.isfinite(found).all()
    assert (found > 0).all()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_single_precision_is_right_to_its_rounding(name: str, backend: str) -> None:
    pair = draw_pair(np.random.default_rng(3), tokens=256, vocab_size=64, top_k=20)
    single = as_numpy(DIVERGENCES[name](pair.support(backend=backend, dtype="float32")))
    assert single.dtype == np.float32
    # 21 terms and a tail 1 − Σ, each rounded to 6e-8, weighted by log-ratios of about 1.
    np.testing.assert_allclose(single, DIVERGENCES[name](pair.support()), atol=5e-6)
