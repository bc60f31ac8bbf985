"""Laws of the weights, and each against the gradient of the loss that it comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.masks import CRITERIA, NONE, CriterionError, Tokens
from deltad.weights import (
    CISPO_CAP,
    DRPO_THRESHOLD,
    ICEPOP_HIGH,
    ICEPOP_LOW,
    MIS_CAP,
    TIS_CAP,
    WEIGHTS,
    weight,
)
from tests.policies import Pair, as_numpy, draw_pair, pairs
from tests.test_masks import tokens_of

OWN = [name for name, entry in WEIGHTS.items() if entry.criterion is None]
few = settings(max_examples=8, deadline=None)
each_own = pytest.mark.parametrize("name", OWN)
BOUNDS = {
    "icepop": (0.0, 1.0),
    "mis": (0.0, 1.0),
    "tis": (0.0, 1.0),
    "cispo": (0.0, 1.0),
    "drpo": (1 - 1 / DRPO_THRESHOLD, 1 + 1 / DRPO_THRESHOLD),
}


def surrogate(name: str, log_pi: torch.Tensor, log_mu: torch.Tensor, a: torch.Tensor) -> Any:
    """The objective of each method as its source writes it, to be differentiated."""
    r = (log_pi - log_mu).exp()
    fixed = r.detach()
    if name == "icepop":
        return torch.where((fixed >= ICEPOP_LOW) & (fixed <= ICEPOP_HIGH), r, 0 * r) * a
    if name == "mis":
        return torch.where(fixed <= MIS_CAP, r, 0 * r) * a
    if name == "tis":
        return torch.clamp(fixed, max=TIS_CAP) * a * log_pi
    if name == "cispo":
        return torch.clamp(fixed, max=CISPO_CAP) * a * log_pi
    assert name == "drpo"
    return r * a - a.abs() / (2 * DRPO_THRESHOLD) * log_mu.exp() * (r - 1) ** 2


@each_own
@few
@given(pair=pairs())
def test_weight_times_plain_gradient_is_the_gradient_of_the_method(name: str, pair: Pair) -> None:
    log_mu, log_pi = (torch.tensor(p).double() for p in pair.logprobs()[2:])
    log_pi.requires_grad_()
    a = torch.tensor(pair.advantage)
    (gradient,) = torch.autograd.grad(surrogate(name, log_pi, log_mu, a).sum(), log_pi)
    weights = WEIGHTS[name].compute(tokens_of(pair))
    plain = pair.advantage * np.exp(pair.logprobs()[3] - pair.logprobs()[2])
    np.testing.assert_allclose(weights * plain, gradient.numpy(), rtol=1e-9, atol=1e-12)


@each_own
@few
@given(pair=pairs())
def test_a_weight_stays_in_its_bounds(name: str, pair: Pair) -> None:
    low, high = BOUNDS[name]
    weights = WEIGHTS[name].compute(tokens_of(pair))
    assert weights.shape == pair.advantage.shape
    assert (weights >= low - 1e-12).all()
    assert (weights <= high + 1e-12).all()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_weight_is_one_where_the_policies_agree(name: str, advantage: float) -> None:
    family = "tv" if "-tv-" in name else "kl"
    pair = draw_pair(np.random.default_rng(1), drift=0.0)
    tokens = tokens_of(pair, advantage=np.full(len(pair.mu), advantage))
    weights = WEIGHTS[name].compute(tokens, threshold=0.0, divergence=family)
    np.testing.assert_allclose(weights, 1.0, atol=1e-12)


@pytest.mark.parametrize("name", [*CRITERIA, "none"])
@few
@given(pair=pairs())
def test_a_criterion_weighs_what_it_keeps(name: str, pair: Pair) -> None:
    family = "tv" if "-tv-" in name else "kl"
    rule = CRITERIA.get(name, NONE)
    question = {"threshold": 0.02, "divergence": family}
    kept = rule.keep(tokens_of(pair), **question)  # type: ignore[arg-type]
    entry = WEIGHTS[name]
    weights = entry.compute(tokens_of(pair), **question)  # type: ignore[arg-type]
    assert weights.dtype == np.float64
    np.testing.assert_array_equal(weights, np.where(kept, 1.0, 0.0))
    np.testing.assert_array_equal(entry.keep(tokens_of(pair), **question), kept)  # type: ignore[arg-type]
    assert (entry.columns, entry.source) == (rule.columns, rule.source)


@few
@given(pair=pairs())
def test_drpo_attenuates_what_drifts_away_and_amplifies_what_comes_back(pair: Pair) -> None:
    tokens = tokens_of(pair)
    weights = WEIGHTS["drpo"].compute(tokens)
    away = pair.advantage * tokens.ratio_direction
    assert (weights[away > 0] <= 1).all()
    assert (weights[away < 0] >= 1).all()
    assert (weights[pair.advantage == 0] == 1).all()


def test_drpo_vanishes_at_its_boundary_and_pulls_back_beyond() -> None:
    mu, shift = 0.2, np.array([0.1, 0.15, 0.3])
    tokens = Tokens(np.ones(3), np.log(np.full(3, mu)), np.log(mu + shift))
    weights = WEIGHTS["drpo"].compute(tokens, delta=0.15)
    np.testing.assert_allclose(weights, [1 / 3, 0.0, -1.0], atol=1e-12)
    np.testing.assert_array_equal(
        WEIGHTS["drpo"].compute(tokens, delta=0.151) > 0, [True, True, False]
    )


def test_icepop_drops_both_sides_whatever_the_advantage() -> None:
    ratio = np.array([0.49, 0.51, 1.0, 4.99, 5.01])
    for advantage in (-1.0, 1.0):
        tokens = Tokens(np.full(5, advantage), np.log(np.full(5, 0.1)), np.log(0.1 * ratio))
        assert WEIGHTS["icepop"].compute(tokens).tolist() == [0, 1, 1, 1, 0]
        assert WEIGHTS["mis"].compute(tokens, cap=1.5).tolist() == [1, 1, 1, 0, 0]


@each_own
def test_a_ratio_that_overflows_has_a_finite_weight(name: str) -> None:
    tokens = Tokens(np.array([1.0, -1.0]), np.array([-800.0, 0.0]), np.array([0.0, -800.0]))
    weights = WEIGHTS[name].compute(tokens)
    assert np.isfinite(weights).all()
    if name != "drpo":
        assert weights[0] == 0


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_tensors_weigh_like_arrays(name: str, dtype: str) -> None:
    family = "tv" if "-tv-" in name else "kl"
    pair = draw_pair(np.random.default_rng(2), tokens=32, drift=1.5)
    numbers = [
        as_numpy(
            WEIGHTS[name].compute(
                tokens_of(pair, backend=backend, dtype=dtype), threshold=0.02, divergence=family
            )
        )
        for backend in ("numpy", "torch")
    ]
    assert {str(each.dtype) for each in numbers} == {dtype}
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tis", {"cap": 0.0}),
        ("cispo", {"cap": np.inf}),
        ("drpo", {"delta": -0.1}),
        ("icepop", {"low": 1.5}),
        ("icepop", {"high": 0.5}),
        ("mis", {"cap": 0.5}),
        ("tis", {"alpha": 1.0}),
        ("ratio", {"cap": 1.0}),
    ],
)
def test_impossible_and_unknown_parameters_are_refused_by_name(
    name: str, parameters: dict[str, float]
) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(3)))
    with pytest.raises(CriterionError, match=r"must|has no parameter"):
        WEIGHTS[name].compute(tokens, **parameters)  # type: ignore[arg-type]


def test_an_unknown_weight_lists_those_that_exist() -> None:
    with pytest.raises(CriterionError, match="icepop"):
        weight("no-such")
    assert weight("none").criterion is NONE


@each_own
def test_every_weight_names_formula_and_source(name: str) -> None:
    entry = WEIGHTS[name]
    assert entry.name == name
    assert entry.formula
    assert entry.source
    assert entry.parameters


@few
@given(ratios=st.lists(st.floats(0.01, 9.0), min_size=1, max_size=6))
def test_capped_weights_grow_with_their_cap(ratios: list[float]) -> None:
    log_mu = np.log(np.full(len(ratios), 0.1))
    tokens = Tokens(np.ones(len(ratios)), log_mu, log_mu + np.log(ratios))
    low, high = (WEIGHTS["tis"].compute(tokens, cap=cap) for cap in (1.5, 3.0))
    assert (low <= high).all()
