"""Ḋ against finite differences of the divergence itself, and its identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from deltad.direction import DIRECTIONS, TAILS, kl_direction, ratio, ratio_direction
from deltad.divergence import DIVERGENCES
from deltad.support import binary_support
from tests import oracle
from tests.policies import Pair, as_numpy, draw_pair, pairs

ORACLES = {"kl": oracle.kl, "tv": oracle.tv}


def test_every_divergence_has_a_direction() -> None:
    assert set(DIRECTIONS) == set(DIVERGENCES)


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


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_exact_tail_is_the_derivative_of_the_reduced_divergence(name: str, seed: int) -> None:
    pair = draw_pair(np.random.default_rng(seed), vocab_size=14, top_k=3, padded=seed % 2)
    collision = (pair.pi**2).sum(axis=1)
    found = DIRECTIONS[name](pair.support(), tail="exact", collision=collision).total
    expected = [oracle.central_difference(ORACLES[name], *row) for row in _rows(pair)]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_whole_vocabulary_gives_the_derivative_whatever_the_tail(name: str, tail: str) -> None:
    pair = draw_pair(np.random.default_rng(6), vocab_size=7, top_k=7)
    collision = (pair.pi**2).sum(axis=1)
    found = DIRECTIONS[name](pair.full(), tail=tail, collision=collision).total
    everything = list(range(pair.vocab_size))
    expected = [
        oracle.central_difference(ORACLES[name], mu, pi, everything, k)
        for mu, pi, _, k in _rows(pair)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", DIRECTIONS)
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
    found = DIRECTIONS[name](shaped.support(), tail=tail).total
    exact = DIRECTIONS[name](shaped.support(), tail="exact", collision=(pi**2).sum(axis=1)).total
    np.testing.assert_allclose(found, exact, atol=1e-14)
    expected = [oracle.central_difference(ORACLES[name], *row) for row in _rows(shaped)]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("name", DIRECTIONS)
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
    found = DIRECTIONS[name](pair.full()).total
    np.testing.assert_allclose(found, (slope * push).sum(dim=1).numpy(), atol=1e-12)


@pytest.mark.parametrize("name", DIRECTIONS)
@given(pair=pairs())
def test_binary_support_gives_the_ratio_direction(name: str, pair: Pair) -> None:
    mu_k, pi_k = pair.logprobs()[2:]
    found = DIRECTIONS[name](binary_support(mu_k, pi_k)).total
    clear = np.abs(pi_k - mu_k) > 1e-9
    inside = np.exp(np.maximum(pi_k, mu_k)) < 1 - 1e-9  # at π_k = 1 the push has no length
    judged = clear & inside
    np.testing.assert_array_equal(
        np.sign(found[judged]), np.sign(ratio_direction(mu_k, pi_k)[judged])
    )


def test_binary_kl_direction_has_its_closed_form() -> None:
    pair = draw_pair(np.random.default_rng(9), tokens=64)
    mu_k, pi_k = pair.logprobs()[2:]
    mu, pi = np.exp(mu_k), np.exp(pi_k)
    found = kl_direction(binary_support(mu_k, pi_k)).total
    np.testing.assert_allclose(found, 2 * (pi - mu) * (1 - pi), atol=1e-14)


@pytest.mark.parametrize("name", DIRECTIONS)
def test_tail_choice_is_irrelevant_without_a_tail(name: str) -> None:
    pair = draw_pair(np.random.default_rng(10), vocab_size=5, top_k=5)
    collision = (pair.pi**2).sum(axis=1)
    totals = [
        DIRECTIONS[name](pair.support(), tail=tail, collision=collision).total for tail in TAILS
    ]
    for other in totals[1:]:
        np.testing.assert_array_equal(totals[0], other)


@pytest.mark.parametrize("name", DIRECTIONS)
@given(pair=pairs())
def test_local_term_is_the_push_without_renormalization(name: str, pair: Pair) -> None:
    """The global term is what remains; their sum is Ḋ, and the KL's local term is π_k − μ_k."""
    support = pair.support()
    direction = DIRECTIONS[name](support)
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


def test_ratio_is_exact_at_both_extremes() -> None:
    mu, pi = np.array([-31.0, -1.0, -1.0, 5e-5]), np.array([-1.0, -31.0, -1.0, 0.0])
    np.testing.assert_allclose(ratio(mu, pi), [np.exp(30), np.exp(-30), 1, 1], rtol=1e-15)
    np.testing.assert_array_equal(np.sign(ratio_direction(mu, pi)), [1, -1, 0, 0])


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_torch_and_numpy_agree(name: str, tail: str) -> None:
    pair = draw_pair(np.random.default_rng(13), padded=1)
    collision = (pair.pi**2).sum(axis=1)
    reference = DIRECTIONS[name](pair.support(), tail=tail, collision=collision)
    for dtype, atol in (("float64", 1e-14), ("float32", 2e-6)):
        found = DIRECTIONS[name](
            pair.support(backend="torch", dtype=dtype),
            tail=tail,
            collision=torch.from_numpy(collision.astype(dtype)),
        )
        for got, expected in zip(found, reference, strict=True):
            assert str(got.dtype) == f"torch.{dtype}"
            np.testing.assert_allclose(as_numpy(got), expected, atol=atol)


def test_ratio_that_overflows_is_infinite_and_keeps_its_sign() -> None:
    mu, pi = np.array([-1000.0, -1.0]), np.array([-1.0, -1000.0])
    assert ratio(mu, pi).tolist() == [np.inf, 0.0]
    assert ratio_direction(mu, pi).tolist() == [np.inf, -1.0]
