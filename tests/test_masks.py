"""Laws of the criteria, each for every entry of the registry."""

from __future__ import annotations

import itertools
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.divergence import DIVERGENCES
from deltad.masks import (
    CRITERIA,
    NONE,
    RULES,
    CriterionError,
    Rule,
    RuleError,
    Tokens,
    distinct,
    rule,
)
from tests.policies import Pair, as_array, as_numpy, draw_pair, pairs

OWN = [name for name, each in RULES.items() if each.weight is not None]
PARAMETERS = {name: dict(RULES[name].parameters) for name in OWN}
each_own = pytest.mark.parametrize("name", OWN)
few = settings(max_examples=8, deadline=None)
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
                as_array(DIVERGENCES[name].value(full), **how),
                as_array(DIVERGENCES[name].direction(full).total, **how),
            )
            for name in DIVERGENCES
        },
        sequence=as_array(np.arange(len(pair.mu)) // 2, **how),
    )


@each_question
@given(pair=pairs(), threshold=st.sampled_from([0.0, 0.02, 0.15, 1.0]))
def test_masked_is_outside_and_pushed_further_both_strictly(
    name: str, family: str, pair: Pair, threshold: float
) -> None:
    tokens = tokens_of(pair)
    kept = CRITERIA[name].keeps(tokens, threshold=threshold, divergence=family)
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
    assert CRITERIA[name].keeps(tokens, threshold=0.0, divergence=family).all()


@each_question
@given(pair=pairs())
def test_advantage_of_the_other_sign_flips_the_decision_outside(
    name: str, family: str, pair: Pair
) -> None:
    """At most one of the two signs is masked; outside, exactly one unless the push is 0."""
    up, down = (
        CRITERIA[name].keeps(
            tokens_of(pair, advantage=np.full(len(pair.mu), sign)), divergence=family
        )
        for sign in (1.0, -1.0)
    )
    assert (up | down).all()
    tokens = tokens_of(pair)
    limit = 0.0 if name == "clip-higher" else 0.15
    outside = CRITERIA[name].regions(tokens, family) > limit
    moves = CRITERIA[name].pushes(tokens, family) != 0
    np.testing.assert_array_equal(~(up & down), outside & moves)


@each_question
@given(pair=pairs(), size=st.sampled_from([1e-6, 3.0, 1e6]))
def test_size_of_the_advantage_does_not_matter(
    name: str, family: str, pair: Pair, size: float
) -> None:
    plain, scaled = (
        CRITERIA[name].keeps(tokens_of(pair, advantage=factor * pair.advantage), divergence=family)
        for factor in (1.0, size)
    )
    np.testing.assert_array_equal(plain, scaled)


@each_question
@given(pair=pairs())
def test_on_policy_tokens_are_kept(name: str, family: str, pair: Pair) -> None:
    same = Pair(pair.mu, pair.mu, pair.topk_ids, pair.token_id, pair.advantage)
    assert CRITERIA[name].keeps(tokens_of(same), threshold=1e-9, divergence=family).all()


@each_question
def test_a_wider_region_masks_no_more(name: str, family: str) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(0), tokens=256, drift=1.0))
    kept = [
        CRITERIA[name].keeps(tokens, threshold=threshold, divergence=family)
        for threshold in (0.0, 0.05, 0.15, 0.5, 2.0)
    ]
    for narrow, wide in itertools.pairwise(kept):
        assert (narrow <= wide).all()
    assert not kept[0].all()


@each_question
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_decides_as_numpy_does(name: str, family: str, dtype: str) -> None:
    pair = draw_pair(np.random.default_rng(1), tokens=64, drift=1.0)
    reference = CRITERIA[name].keeps(tokens_of(pair), divergence=family)
    kept = CRITERIA[name].keeps(tokens_of(pair, backend="torch", dtype=dtype), divergence=family)
    np.testing.assert_array_equal(as_numpy(kept), reference)


def test_binary_criterion_needs_no_support() -> None:
    pair = draw_pair(np.random.default_rng(2), tokens=64, drift=1.0)
    bare = Tokens(pair.advantage, *pair.logprobs()[2:])
    for family in DIVERGENCES:
        binary = CRITERIA[f"binary-{family}"]
        np.testing.assert_array_equal(binary.keeps(bare), binary.keeps(tokens_of(pair)))


def test_binary_kl_direction_is_the_ratio_rule_on_the_binary_region() -> None:
    """The paper's identity: predicting the binary divergence is PPO's direction test."""
    pair = draw_pair(np.random.default_rng(3), tokens=512, drift=1.5)
    mu_k, pi_k = pair.logprobs()[2:]
    from deltad.support import binary_support

    for family in DIVERGENCES:
        binary = Tokens(pair.advantage, mu_k, pi_k, support=binary_support(mu_k, pi_k))
        predicted = CRITERIA[f"predictive-{family}-aggregated"].keeps(binary, divergence=family)
        ratio_rule = CRITERIA[f"binary-{family}"].keeps(tokens_of(pair), divergence=family)
        np.testing.assert_array_equal(predicted, ratio_rule)
        assert not predicted.all()


def test_clip_higher_is_grpos_pair_of_inequalities() -> None:
    advantage = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    ratio = np.array([1.29, 1.27, 0.5, 0.79, 0.81, 2.0, 9.0])
    tokens = Tokens(advantage, np.full(7, -5.0), -5.0 + np.log(ratio))
    kept = CRITERIA["clip-higher"].keeps(tokens)
    assert kept.tolist() == [False, True, True, False, True, True, True]


def test_none_keeps_everything() -> None:
    pair = draw_pair(np.random.default_rng(4), drift=3.0)
    for backend in ("numpy", "torch"):
        kept = NONE.keeps(tokens_of(pair, backend=backend), threshold=0.0)
        assert as_numpy(kept).all()
        assert as_numpy(kept).dtype == bool
    assert rule("none") is NONE


def test_predictive_criterion_refuses_another_family() -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(5)))
    with pytest.raises(CriterionError, match="predictive-tv-uniform"):
        CRITERIA["predictive-kl-uniform"].keeps(tokens, divergence="tv")
    with pytest.raises(CriterionError, match="one of kl, tv, got 'js'"):
        CRITERIA["ratio"].keeps(tokens, divergence="js")


def test_unknown_criterion_is_answered_with_the_list() -> None:
    with pytest.raises(CriterionError, match=r"predictive-kl-aggregated.*clip-higher"):
        rule("predictive")


@pytest.mark.parametrize(
    "needy", [r for r in CRITERIA.values() if r.columns], ids=lambda rule: rule.name
)
def test_missing_column_is_named(needy: Rule) -> None:
    pair = draw_pair(np.random.default_rng(6))
    bare = Tokens(pair.advantage, *pair.logprobs()[2:], support=pair.support())
    with pytest.raises(CriterionError, match=f"`{needy.columns[0]}`"):
        needy.keeps(bare, divergence=needy.family or "kl")


def test_registry_entries_describe_themselves() -> None:
    for name, each in RULES.items():
        assert each.name == name
        assert each.words
        assert each.source


def test_no_advantage_keeps_a_token_whose_ratio_overflows() -> None:
    tokens = Tokens(np.array([0.0, 1.0]), np.full(2, -1000.0), np.full(2, -1.0))
    assert CRITERIA["binary-tv"].keeps(tokens).tolist() == [True, False]


@pytest.mark.parametrize("threshold", [-0.1, np.nan, np.inf])
def test_threshold_must_be_one(threshold: float) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(7)))
    with pytest.raises(CriterionError, match="`threshold` must be finite and not negative"):
        CRITERIA["ratio"].keeps(tokens, threshold=threshold)


def test_ratio_is_exact_at_both_extremes() -> None:
    mu, pi = np.array([-31.0, -1.0, -1.0, 5e-5]), np.array([-1.0, -31.0, -1.0, 0.0])
    tokens = Tokens(mu, mu, pi)
    np.testing.assert_allclose(tokens.ratio, [np.exp(30), np.exp(-30), 1, 1], rtol=1e-15)
    np.testing.assert_array_equal(np.sign(tokens.ratio_direction), [1, -1, 0, 0])


def test_ratio_that_overflows_is_infinite_and_keeps_its_sign() -> None:
    mu, pi = np.array([-1000.0, -1.0]), np.array([-1.0, -1000.0])
    tokens = Tokens(mu, mu, pi)
    assert tokens.ratio.tolist() == [np.inf, 0.0]
    assert tokens.ratio_direction.tolist() == [np.inf, -1.0]


def surrogate(name: str, tokens: Tokens, log_pi: torch.Tensor) -> Any:
    """The objective of each method as its source writes it, to be differentiated by log π."""
    log_mu, a, given = tokens.behavior_logprob, tokens.advantage, PARAMETERS[name]
    r = (log_pi - log_mu).exp()
    fixed = r.detach()
    if name in ("icepop", "mis"):
        low, high = given.get("low", 0.0), given.get("high", given.get("cap"))
        return torch.where((fixed >= low) & (fixed <= high), r, 0 * r) * a
    if name in ("tis", "cispo"):
        return torch.clamp(fixed, max=given["cap"]) * a * log_pi
    if name.startswith("sequence"):
        whole = torch.stack([fixed[2 * (at // 2) : 2 * (at // 2) + 2].prod() for at in range(4)])
        if name == "sequence_mask":
            return torch.where(whole <= given["cap"], whole, 0 * whole) * a * log_pi
        return torch.clamp(whole, max=given["cap"]) * a * log_pi
    assert name == "drpo"
    return r * a - a.abs() / (2 * given["delta"]) * log_mu.exp() * (r - 1) ** 2


@each_own
@few
@given(pair=pairs())
def test_weight_times_plain_gradient_is_the_gradient_of_the_method(name: str, pair: Pair) -> None:
    tokens = tokens_of(pair, backend="torch")
    log_pi = tokens.policy_logprob.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(name, tokens, log_pi).sum(), log_pi)
    plain = pair.advantage * np.exp(pair.logprobs()[3] - pair.logprobs()[2])
    weights = RULES[name].weigh(tokens_of(pair))
    np.testing.assert_allclose(weights * plain, gradient.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_weight_is_one_where_the_policies_agree(name: str, advantage: float) -> None:
    pair = draw_pair(np.random.default_rng(1), drift=0.0)
    tokens = tokens_of(pair, advantage=np.full(len(pair.mu), advantage))
    weights = RULES[name].weigh(tokens, threshold=0.0, divergence=RULES[name].family or "kl")
    np.testing.assert_allclose(weights, 1.0, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@few
@given(pair=pairs())
def test_a_rule_keeps_what_it_weighs_above_zero(name: str, pair: Pair) -> None:
    question: dict[str, Any] = {"threshold": 0.02, "divergence": RULES[name].family or "kl"}
    weights = RULES[name].weigh(tokens_of(pair), **question)
    assert weights.dtype == np.float64
    np.testing.assert_array_equal(RULES[name].keeps(tokens_of(pair), **question), weights > 0)
    if name not in OWN:
        assert set(weights.tolist()) <= {0.0, 1.0}


@few
@given(pair=pairs())
def test_drpo_attenuates_what_drifts_away_and_amplifies_what_comes_back(pair: Pair) -> None:
    tokens = tokens_of(pair)
    weights = RULES["drpo"].weigh(tokens)
    away = pair.advantage * tokens.ratio_direction
    assert (weights[away > 0] <= 1).all()
    assert (weights[away < 0] >= 1).all()
    assert (weights[pair.advantage == 0] == 1).all()


def test_drpo_vanishes_at_its_boundary_and_pulls_back_beyond() -> None:
    mu, shift = 0.2, np.array([0.1, 0.15, 0.3])
    tokens = Tokens(np.ones(3), np.log(np.full(3, mu)), np.log(mu + shift))
    found = [
        RULES["drpo"].with_parameters({"delta": delta}).weigh(tokens) for delta in (0.15, 0.151)
    ]
    np.testing.assert_allclose(found[0], [1 / 3, 0.0, -1.0], atol=1e-12)
    np.testing.assert_array_equal(found[1] > 0, [True, True, False])


def test_icepop_drops_both_sides_whatever_the_advantage() -> None:
    ratio = np.array([0.49, 0.51, 1.0, 4.99, 5.01])
    for advantage in (-1.0, 1.0):
        tokens = Tokens(np.full(5, advantage), np.log(np.full(5, 0.1)), np.log(0.1 * ratio))
        assert RULES["icepop"].weigh(tokens).tolist() == [0, 1, 1, 1, 0]
        tight = RULES["mis"].with_parameters({"cap": 1.5})
        assert tight.weigh(tokens).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["tis", "cispo", "sequence_truncate"])
def test_a_capped_rule_keeps_a_token_whose_ratio_overflows(name: str, dtype: str) -> None:
    """And of all rules' weights none is infinite there."""
    logs = np.array([-2000.0, -0.0]), np.array([-0.0, -2000.0])
    tokens = Tokens(
        as_array(np.array([1.0, -1.0]), dtype=dtype),
        as_array(logs[0], dtype=dtype),
        as_array(logs[1], dtype=dtype),
        sequence=np.array([0, 1]),
    )
    assert RULES[name].keeps(tokens).all()
    for each in OWN:
        assert np.isfinite(RULES[each].weigh(tokens)).all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_tensors_weigh_like_arrays(name: str, dtype: str) -> None:
    pair = draw_pair(np.random.default_rng(2), tokens=32, drift=1.5)
    numbers = [
        as_numpy(
            RULES[name].weigh(
                tokens_of(pair, backend=backend, dtype=dtype),
                threshold=0.02,
                divergence=RULES[name].family or "kl",
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
        ("sequence_mask", {"cap": -1.0}),
        ("clip-higher", {"low": 2.0}),
        ("tis", {"alpha": 1.0}),
        ("ratio", {"cap": 1.0}),
    ],
)
def test_impossible_and_unknown_parameters_are_refused_by_name(
    name: str, parameters: dict[str, float]
) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(3)))
    with pytest.raises(CriterionError, match=r"must|has no parameter"):
        RULES[name].with_parameters(parameters).weigh(tokens)


def test_a_rule_of_whole_responses_refuses_tokens_that_are_none() -> None:
    tokens = replace(tokens_of(draw_pair(np.random.default_rng(3))), sequence=None)
    with pytest.raises(CriterionError, match="sequence_mask judges whole responses"):
        RULES["sequence_mask"].keeps(tokens)


OWN_FILE = """
import deltad

far = deltad.Rule("far", region=lambda tokens: abs(tokens.log_ratio), threshold=0.5)
half = deltad.Rule("half", weight=lambda tokens: tokens.ratio * 0 + 0.5, source="made up")
needy = deltad.Rule("needy", push=lambda tokens: tokens["pre_entropy"], needs=("pre_entropy",))
number = 3
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    (tmp_path / "my_masks.py").write_text(OWN_FILE)
    return tmp_path / "my_masks.py"


def test_a_rule_of_a_file_decides_and_says_where_it_is_from(own_file: Path) -> None:
    tokens = tokens_of(draw_pair(np.random.default_rng(4), tokens=64, drift=1.0))
    far = rule(f"{own_file}:far")
    away = (np.abs(tokens.log_ratio) > 0.5) & (tokens.advantage * tokens.ratio_direction > 0)
    np.testing.assert_array_equal(far.keeps(tokens), ~away)
    assert far.origin == str(own_file)
    assert rule(f"{own_file}:half").weigh(tokens).tolist() == [0.5] * 64
    assert pickle.loads(pickle.dumps(RULES["tis"])) is RULES["tis"]
    with pytest.raises(CriterionError, match="`pre_entropy` is not here"):
        rule(f"{own_file}:needy").keeps(tokens)


def test_a_changed_file_is_loaded_anew(own_file: Path) -> None:
    assert rule(f"{own_file}:far").threshold == 0.5
    own_file.write_text(OWN_FILE.replace("threshold=0.5", "threshold=0.7"))
    os.utime(own_file, ns=(1, 1))
    assert rule(f"{own_file}:far").threshold == 0.7


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ("", "far", "has no rule 'far'; define one"),
        (OWN_FILE, "number", "has no rule 'number'; its rules are far, half, needy"),
        ("import no_such_module", "far", "cannot be loaded: ModuleNotFoundError"),
        ("raise SystemExit(3)", "far", "cannot be loaded: SystemExit: 3"),
        ("x = (", "far", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_file_without_the_rule_says_so(
    tmp_path: Path, body: str, name: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(CriterionError, match=re.escape(message)):
        rule(f"{tmp_path / 'mine.py'}:{name}")
    with pytest.raises(CriterionError, match="there is no file"):
        rule(f"{tmp_path / 'other.py'}:{name}")


def test_a_rule_of_an_installed_package_is_found(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = own_file.parent / "masks-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: masks\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[deltad.rules]\nkpop = my_masks:far\nbad = my_masks:number\nnone-such = nowhere:x\n"
    )
    monkeypatch.syspath_prepend(str(own_file.parent))
    assert rule("kpop").name == "far"
    with pytest.raises(CriterionError, match=r"must be a deltad.Rule, my_masks:number is not"):
        rule("bad")
    with pytest.raises(CriterionError, match="none-such cannot be loaded: ModuleNotFoundError"):
        rule("none-such")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Rule("own", region=lambda tokens: 1 / 0), "rule own raised ZeroDivisionError"),
        (Rule("own", region=lambda tokens: tokens.ratio[:2]), r"shape \(8,\), gave \(2,"),
        (Rule("own", push=lambda tokens: 1.0), "`push` of shape"),
        (Rule("own", weight=lambda tokens: tokens.ratio * np.nan), "NaN as `weight` at token 0"),
        (Rule("own", keep=lambda tokens, threshold, divergence: tokens.ratio), "`keep` as bool"),
    ],
)  # fmt: skip
def test_a_rule_that_fails_is_named(made: Rule, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        made.keeps(tokens_of(draw_pair(np.random.default_rng(5))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "no name"}, "the name of a rule"),
        ({"region": "divergenc"}, "`region` of rule own is 'divergenc', but must be a function"),
        ({"scope": "batch"}, "`scope` of rule own"),
        ({"divergence": "js"}, "`divergence` of rule own"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CriterionError, match=message):
        Rule(**{"name": "own", **options})


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(CriterionError, match="did you mean predictive-kl-uniform"):
        rule("predictive-kl-unifrom")


def test_two_rules_of_one_name_are_refused_unless_they_are_one() -> None:
    one, other = (Rule("mine", region="divergence", push="ratio") for _ in range(2))
    assert list(distinct([one, RULES["ratio"], one])) == ["mine", "ratio"]
    with pytest.raises(CriterionError, match="two different rules are named mine"):
        distinct([one, other])
