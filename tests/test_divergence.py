"""Laws of the divergences and their derivatives, each for every entry of the registry."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given

from deltad.divergence import DIVERGENCES, KL_TAIL_FLOOR, TAILS, kl, kl_direction, tv
from deltad.support import binary_support, topk_support
from tests import oracle
from tests.policies import Pair, as_numpy, draw_pair, pairs

ORACLES = {"kl": oracle.kl, "tv": oracle.tv}


def test_every_divergence_has_an_oracle() -> None:
    assert set(ORACLES) == set(DIVERGENCES)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_divergence_is_that_of_the_equations(name: str, pair: Pair) -> None:
    found = DIVERGENCES[name].value(pair.support())
    for row in range(len(found)):
        ids = oracle.support_of(pair.topk_ids[row].tolist(), int(pair.token_id[row]))
        expected = ORACLES[name](pair.mu[row].tolist(), pair.pi[row].tolist(), ids)
        assert found[row] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_divergence_is_not_negative(name: str, pair: Pair) -> None:
    assert (DIVERGENCES[name].value(pair.support()) >= -1e-12).all()


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_divergence_of_a_policy_from_itself_is_exactly_zero(name: str, pair: Pair) -> None:
    same = Pair(pair.mu, pair.mu, pair.topk_ids, pair.token_id, pair.advantage)
    support = same.support()
    floored = (support.mu_tail > 0) & (support.mu_tail < KL_TAIL_FLOOR)
    found = DIVERGENCES[name].value(support)
    assert (found[~floored] == 0).all()
    # μ_t log(μ_t / 1e-12) is least at 1e-12/e
    np.testing.assert_allclose(found[floored], 0, atol=KL_TAIL_FLOOR)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_reduction_never_increases_a_divergence(name: str, pair: Pair) -> None:
    divergence = DIVERGENCES[name].value
    reduced, full = divergence(pair.support()), divergence(pair.full())
    assert (reduced <= full + 1e-9 * (1 + full)).all()
    mu_k, pi_k = pair.logprobs()[2:]
    binary = divergence(binary_support(mu_k, pi_k))
    assert (binary <= reduced + 1e-9 * (1 + reduced)).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_top_k_of_the_whole_vocabulary_is_the_full_divergence(name: str) -> None:
    pair = draw_pair(np.random.default_rng(0), vocab_size=9, top_k=9)
    found = DIVERGENCES[name].value
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
        DIVERGENCES[name].value(pair.support()),
        DIVERGENCES[name].value(moved.support()),
        rtol=1e-12,
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
    found = DIVERGENCES[name].value(binary_support(low, high))
    assert np.isfinite(found).all()
    assert (found > 0).all()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_single_precision_is_right_to_its_rounding(name: str, backend: str) -> None:
    pair = draw_pair(np.random.default_rng(3), tokens=256, vocab_size=64, top_k=20)
    single = as_numpy(DIVERGENCES[name].value(pair.support(backend=backend, dtype="float32")))
    assert single.dtype == np.float32
    # 21 terms and a tail 1 − Σ, each rounded to 6e-8, weighted by log-ratios of about 1.
    np.testing.assert_allclose(single, DIVERGENCES[name].value(pair.support()), atol=5e-6)


def _rows(pair: Pair) -> list[tuple[list[float], list[float], list[int], int]]:
    return [
        (
            pair.mu[row].tolist(),
            pair.pi[row].tolist(),
            oracle.support_of(pair.topk_ids[row].tolist(), int(pair.token_id[row])),
            int(pair.token_id[row]),
        )
        for row in range(len(pair.mu))
    ]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("seed", range(5))
def test_exact_tail_is_the_derivative_of_the_reduced_divergence(name: str, seed: int) -> None:
    pair = draw_pair(np.random.default_rng(seed), vocab_size=14, top_k=3, padded=seed % 2)
    collision = (pair.pi**2).sum(axis=1)
    found = DIVERGENCES[name].direction(pair.support(), tail="exact", collision=collision).total
    expected = [oracle.central_difference(ORACLES[name], *row) for row in _rows(pair)]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
def test_whole_vocabulary_gives_the_derivative_whatever_the_tail(name: str, tail: str) -> None:
    pair = draw_pair(np.random.default_rng(6), vocab_size=7, top_k=7)
    collision = (pair.pi**2).sum(axis=1)
    found = DIVERGENCES[name].direction(pair.full(), tail=tail, collision=collision).total
    everything = list(range(pair.vocab_size))
    expected = [
        oracle.central_difference(ORACLES[name], mu, pi, everything, k)
        for mu, pi, _, k in _rows(pair)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("tail", "equal"), [("aggregated", False), ("uniform", True)])
def test_assumed_tails_are_exact_where_their_assumption_holds(
    name: str, tail: str, equal: bool
) -> None:
    rng = np.random.default_rng(7)
    pair = draw_pair(rng, tokens=6, vocab_size=9, top_k=3)
    pi = pair.pi.copy()
    for row, (_, values, ids, _) in enumerate(_rows(pair)):
        rest = [j for j in range(pair.vocab_size) if j not in ids]
        mass = sum(values[j] for j in rest)
        pi[row, rest] = mass / len(rest) if equal else 0.0
        if not equal:
            pi[row, rest[0]] = mass
    shaped = Pair(pair.mu, pi, pair.topk_ids, pair.token_id, pair.advantage)
    found = DIVERGENCES[name].direction(shaped.support(), tail=tail).total
    exact = (
        DIVERGENCES[name]
        .direction(shaped.support(), tail="exact", collision=(pi**2).sum(axis=1))
        .total
    )
    np.testing.assert_allclose(found, exact, atol=1e-14)
    expected = [oracle.central_difference(ORACLES[name], *row) for row in _rows(shaped)]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_autograd_agrees_with_the_closed_form(name: str) -> None:
    pair = draw_pair(np.random.default_rng(8), vocab_size=11, top_k=11)
    logits = torch.log(torch.from_numpy(pair.pi)).requires_grad_()
    log_pi = torch.log_softmax(logits, dim=1)
    token = torch.from_numpy(pair.token_id)
    (push,) = torch.autograd.grad(log_pi.gather(1, token[:, None]).sum(), logits, retain_graph=True)
    mu = torch.from_numpy(pair.mu)
    pi = log_pi.exp()
    divergence = (mu * (mu.log() - log_pi)).sum() if name == "kl" else (mu - pi).abs().sum() / 2
    (slope,) = torch.autograd.grad(divergence, logits)
    found = DIVERGENCES[name].direction(pair.full()).total
    np.testing.assert_allclose(found, (slope * push).sum(dim=1).numpy(), atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_binary_support_gives_the_ratio_direction(name: str, pair: Pair) -> None:
    mu_k, pi_k = pair.logprobs()[2:]
    found = DIVERGENCES[name].direction(binary_support(mu_k, pi_k)).total
    clear = np.abs(pi_k - mu_k) > 1e-9
    inside = np.exp(np.maximum(pi_k, mu_k)) < 1 - 1e-9  # at π_k = 1 the push has no length
    judged = clear & inside
    np.testing.assert_array_equal(np.sign(found[judged]), np.sign(pi_k - mu_k)[judged])


def test_binary_kl_direction_has_its_closed_form() -> None:
    pair = draw_pair(np.random.default_rng(9), tokens=64)
    mu_k, pi_k = pair.logprobs()[2:]
    mu, pi = np.exp(mu_k), np.exp(pi_k)
    found = kl_direction(binary_support(mu_k, pi_k)).total
    np.testing.assert_allclose(found, 2 * (pi - mu) * (1 - pi), atol=1e-14)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tail_choice_is_irrelevant_without_a_tail(name: str) -> None:
    pair = draw_pair(np.random.default_rng(10), vocab_size=5, top_k=5)
    collision = (pair.pi**2).sum(axis=1)
    totals = [
        DIVERGENCES[name].direction(pair.support(), tail=tail, collision=collision).total
        for tail in TAILS
    ]
    for other in totals[1:]:
        np.testing.assert_array_equal(totals[0], other)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pair=pairs())
def test_local_term_is_the_push_without_renormalization(name: str, pair: Pair) -> None:
    """The global term is what remains; their sum is Ḋ, and the KL's local term is π_k − μ_k."""
    support = pair.support()
    direction = DIVERGENCES[name].direction(support)
    np.testing.assert_array_equal(direction.total, direction.local + direction.global_)
    if name == "kl":
        np.testing.assert_array_equal(direction.local, support.pi_sampled - support.mu_sampled)


def test_exact_tail_clamps_an_impossible_collision() -> None:
    pair = draw_pair(np.random.default_rng(11), vocab_size=30, top_k=3)
    support = pair.support()
    for collision, tail in ((np.zeros(8), "uniform"), (np.ones(8), "aggregated")):
        found = kl_direction(support, tail="exact", collision=collision).total
        np.testing.assert_allclose(found, kl_direction(support, tail=tail).total, atol=1e-15)


def test_exact_tail_needs_the_collision_and_a_tail_has_a_name() -> None:
    support = draw_pair(np.random.default_rng(12)).support()
    with pytest.raises(ValueError, match="`collision`"):
        kl_direction(support, tail="exact")
    with pytest.raises(ValueError, match="aggregated, uniform, exact, got 'flat'"):
        kl_direction(support, tail="flat")


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
def test_directions_of_torch_and_numpy_agree(name: str, tail: str) -> None:
    pair = draw_pair(np.random.default_rng(13), padded=1)
    collision = (pair.pi**2).sum(axis=1)
    reference = DIVERGENCES[name].direction(pair.support(), tail=tail, collision=collision)
    for dtype, atol in (("float64", 1e-14), ("float32", 2e-6)):
        found = DIVERGENCES[name].direction(
            pair.support(backend="torch", dtype=dtype),
            tail=tail,
            collision=torch.from_numpy(collision.astype(dtype)),
        )
        for got, expected in zip(found, reference, strict=True):
            assert str(got.dtype) == f"torch.{dtype}"
            np.testing.assert_allclose(as_numpy(got), expected, atol=atol)
