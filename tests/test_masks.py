"""Laws of the criteria, each for every entry of the registry."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.direction import DIRECTIONS
from deltad.divergence import DIVERGENCES
from deltad.masks import CRITERIA, NONE, Criterion, CriterionError, Tokens, criterion
from tests.policies import Pair, as_array, as_numpy, draw_pair, pairs

FITTING = [
    (name, family)
    for name, rule in CRITERIA.items()
    for family in DIVERGENCES
    if rule.family in (None, family)
]
each_question = pytest.mark.parametrize(("name", "family"), FITTING)


def tokens_of(pair: Pair, advantage: np.ndarray | None = None, **how: Any) -> Tokens:
    """Everything that any criterion may look at."""
    full = pair.full()
    mu_k, pi_k = pair.logprobs()[2:]
    return Tokens(
        as_array(pair.advantage if advantage is None else advantage, **how),
        as_array(mu_k, **how),
        as_array(pi_k, **how),
        support=pair.support(**how),
        collision=as_array((pair.pi**2).sum(axis=1), **how),
        full={
            name: (
                as_array(DIVERGENCES[name](full), **how),
                as_array(DIRECTIONS[name](full).total, **how),
            )
            for name in DIVERGENCES
        },
    )


@each_question
@given(pair=pairs(), threshold=st.sampled_from([0.0, 0.02, 0.15, 1.0]))
def test_masked_is_outside_and_pushed_further_both_strictly(
    name: str, family: str, pair: Pair, threshold: float
) -> None:
    tokens = tokens_of(pair)
    kept = CRITERIA[name].keep(tokens, threshold=threshold, divergence=family)
    assert kept.dtype == bool
    if name == "clip-higher":
        outside = (tokens.ratio > 1.28) | (tokens.ratio < 0.8)
    elif name.startswith("binary"):
        outside = tokens.binary_divergence(name.split("-")[1]) > threshold
    elif name.endswith("full"):
        outside = tokens.full_divergence(family) > threshold
    else:
        outside = tokens.divergence(family) > threshold
    if name.endswith("full"):
        push = tokens.full_direction(family)
    elif name.startswith("predictive"):
        push = tokens.direction(family, name.rsplit("-", 1)[1]).total
    else:
        push = tokens.ratio_direction
    np.testing.assert_array_equal(kept, ~(outside & (pair.advantage * push > 0)))


@each_question
@given(pair=pairs())
def test_no_advantage_no_mask(name: str, family: str, pair: Pair) -> None:
    tokens = tokens_of(pair, advantage=np.zeros(len(pair.mu)))
    assert CRITERIA[name].keep(tokens, threshold=0.0, divergence=family).all()


@each_question
@given(pair=pairs())
def test_advantage_of_the_other_sign_flips_the_decision_outside(
    name: str, family: str, pair: Pair
) -> None:
    """At most one of the two signs is masked; outside, exactly one unless the push is 0."""
    up, down = (
        CRITERIA[name].keep(
            tokens_of(pair, advantage=np.full(len(pair.mu), sign)), divergence=family
        )
        for sign in (1.0, -1.0)
    )
    assert (up | down).all()
    tokens = tokens_of(pair)
    outside = CRITERIA[name].outside(tokens, 0.15, family)
    moves = CRITERIA[name].push(tokens) != 0
    np.testing.assert_array_equal(~(up & down), outside & moves)


@each_question
@given(pair=pairs(), size=st.sampled_from([1e-6, 3.0, 1e6]))
def test_size_of_the_advantage_does_not_matter(
    name: str, family: str, pair: Pair, size: float
) -> None:
    plain, scaled = (
        CRITERIA[name].keep(tokens_of(pair, advantage=factor * pair.advantage), divergence=family)
        for factor in (1.0, size)
    )
    np.testing.assert_array_equal(plain, scaled)


@each_question
@given(pair=pairs())
def test_on_policy_tokens_are_kept(name: str, family: str, pair: Pair) -> None:
    same = Pair(pair.mu, pair.mu, pair.topk_ids, pair.token_id, pair.advantage)
    assert CRITERIA[name].keep(tokens_of(same), threshold=1e-9, divergence=family).all()


@each_question
def test_a_wider_region_masks_no_more(name: str, family: str) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(0), tokens=256, drift=1.0))
    kept = [
        CRITERIA[name].keep(tokens, threshold=threshold, divergence=family)
        for threshold in (0.0, 0.05, 0.15, 0.5, 2.0)
    ]
    for narrow, wide in itertools.pairwise(kept):
        assert (narrow <= wide).all()
    assert not kept[0].all()


@each_question
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_decides_as_numpy_does(name: str, family: str, dtype: str) -> None:
    pair = draw_pair(np.random.default_rng(1), tokens=64, drift=1.0)
    reference = CRITERIA[name].keep(tokens_of(pair), divergence=family)
    kept = CRITERIA[name].keep(tokens_of(pair, backend="torch", dtype=dtype), divergence=family)
    np.testing.assert_array_equal(as_numpy(kept), reference)


def test_binary_criterion_needs_no_support() -> None:
    pair = draw_pair(np.random.default_rng(2), tokens=64, drift=1.0)
    bare = Tokens(pair.advantage, *pair.logprobs()[2:])
    for family in DIVERGENCES:
        rule = CRITERIA[f"binary-{family}"]
        np.testing.assert_array_equal(rule.keep(bare), rule.keep(tokens_of(pair)))


def test_binary_kl_direction_is_the_ratio_rule_on_the_binary_region() -> None:
    """The paper's identity: predicting the binary divergence is PPO's direction test."""
    pair = draw_pair(np.random.default_rng(3), tokens=512, drift=1.5)
    mu_k, pi_k = pair.logprobs()[2:]
    from deltad.support import binary_support

    for family in DIVERGENCES:
        binary = Tokens(pair.advantage, mu_k, pi_k, support=binary_support(mu_k, pi_k))
        predicted = CRITERIA[f"predictive-{family}-aggregated"].keep(binary, divergence=family)
        ratio_rule = CRITERIA[f"binary-{family}"].keep(tokens_of(pair), divergence=family)
        np.testing.assert_array_equal(predicted, ratio_rule)
        assert not predicted.all()


def test_clip_higher_is_grpos_pair_of_inequalities() -> None:
    advantage = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    ratio = np.array([1.29, 1.27, 0.5, 0.79, 0.81, 2.0, 9.0])
    tokens = Tokens(advantage, np.full(7, -5.0), -5.0 + np.log(ratio))
    kept = CRITERIA["clip-higher"].keep(tokens)
    assert kept.tolist() == [False, True, True, False, True, True, True]


def test_none_keeps_everything() -> None:
    pair = draw_pair(np.random.default_rng(4), drift=3.0)
    for backend in ("numpy", "torch"):
        kept = NONE.keep(tokens_of(pair, backend=backend), threshold=0.0)
        assert as_numpy(kept).all()
        assert as_numpy(kept).dtype == bool
    assert criterion("none") is NONE


def test_predictive_criterion_refuses_another_family() -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(5)))
    with pytest.raises(CriterionError, match="predictive-tv-uniform"):
        CRITERIA["predictive-kl-uniform"].keep(tokens, divergence="tv")
    with pytest.raises(CriterionError, match="one of kl, tv, got 'js'"):
        CRITERIA["ratio"].keep(tokens, divergence="js")


def test_unknown_criterion_is_answered_with_the_list() -> None:
    with pytest.raises(CriterionError, match=r"predictive-kl-aggregated.*clip-higher"):
        criterion("predictive")


@pytest.mark.parametrize(
    "rule", [r for r in CRITERIA.values() if r.columns], ids=lambda rule: rule.name
)
def test_missing_column_is_named(rule: Criterion) -> None:
    pair = draw_pair(np.random.default_rng(6))
    bare = Tokens(pair.advantage, *pair.logprobs()[2:], support=pair.support())
    with pytest.raises(CriterionError, match=f"`{rule.columns[0]}`"):
        rule.keep(bare, divergence=rule.family or "kl")


def test_registry_entries_describe_themselves() -> None:
    for name, rule in CRITERIA.items():
        assert rule.name == name
        assert rule.proximity
        assert rule.direction
        assert rule.source


def test_no_advantage_keeps_a_token_whose_ratio_overflows() -> None:
    tokens = Tokens(np.array([0.0, 1.0]), np.full(2, -1000.0), np.full(2, -1.0))
    assert CRITERIA["binary-tv"].keep(tokens).tolist() == [True, False]


@pytest.mark.parametrize("threshold", [-0.1, np.nan, np.inf])
def test_threshold_must_be_one(threshold: float) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(7)))
    with pytest.raises(CriterionError, match="`threshold` must be finite and not negative"):
        CRITERIA["ratio"].keep(tokens, threshold=threshold)
