"""Laws of the policy loss, each for every rule of the registry."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltad.losses import (
    AGGREGATIONS,
    TopKLogprobs,
    add_metrics,
    count,
    policy_loss,
    trust_region_loss,
)
from deltad.masks import CRITERIA, RULES, CriterionError, rule
from deltad.support import SupportError
from tests.losses.batch import Batch, draw, gradient, run

REGIONS = {name: "tv" if "-tv" in name else "kl" for name in RULES}
each_rule = pytest.mark.parametrize("name", RULES)
each_mask = pytest.mark.parametrize("name", ["none", *CRITERIA])
seeds = st.integers(0, 10_000)
few = settings(max_examples=max(3, settings().max_examples // 10))  # a batch holds many tokens


def by_hand(batch: Batch, weights: Tensor, cap: float = math.inf) -> float:
    """−Σ w min(r, c) Â over the response tokens, over their number, in plain Python."""
    total, tokens = 0.0, 0
    columns = (batch.log_pi, batch.log_mu, batch.advantage, weights, batch.mask)
    for p, m, a, w, used in zip(*(c.flatten().tolist() for c in columns), strict=True):
        if used:
            total -= w * min(math.exp(p - m), cap) * a
            tokens += 1
    return total / tokens


@each_rule
@pytest.mark.parametrize("cap", [None, 1.1])
def test_loss_is_the_formula_with_the_weights_of_the_registry(name: str, cap: float | None) -> None:
    batch = draw(1)
    result = run(batch, criterion=name, ratio_cap=cap)
    assert result.loss.item() == pytest.approx(
        by_hand(batch, result.weight, cap or math.inf), rel=1e-12
    )
    assert torch.equal(result.keep, (result.weight > 0) & batch.mask)
    assert not result.weight[~batch.mask].any()


@each_rule
def test_weights_are_those_of_the_registry_on_the_response_tokens_alone(name: str) -> None:
    """Against The rule given nothing but the tokens of the mask, row after row."""
    from deltad.masks import Tokens
    from deltad.support import topk_support

    batch = draw(2)
    topk, used = batch.topk(), batch.mask
    tokens = Tokens(
        batch.advantage[used],
        batch.log_mu[used],
        batch.log_pi[used],
        support=topk_support(
            topk.topk_ids[used],
            topk.behavior[used],
            topk.policy[used],
            batch.token_ids[used],
            batch.log_mu[used],
            batch.log_pi[used],
            vocab_size=topk.vocab_size,
        ),
        collision=topk.collision[used] if topk.collision is not None else None,
        full={k: (d[used], e[used]) for k, (d, e) in batch.full().items()},
        sequence=used.nonzero()[:, 0],
    )
    expected = rule(name).weigh(tokens, threshold=0.05, divergence=REGIONS[name])
    found = run(batch, criterion=name).weight
    assert torch.equal(found[used], expected.to(found.dtype))


@pytest.mark.parametrize("value", ["ratio", "logprob"])
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [(name, "token-mean") for name in RULES] + [("ratio", name) for name in AGGREGATIONS],
)
def test_gradient_agrees_with_central_differences_of_the_frozen_weight(
    name: str, aggregation: str, value: str
) -> None:
    """Weights, ratio and advantage are held; only the log π that carries the gradient moves.

    For the reading "ratio" that is exp(log π − sg log π), whose truncation error at h = 1e-4 is
    h²/6 ≈ 2e-9 of the value; rounding is about 1e-16/h = 1e-12.
    """
    batch = draw(3)
    options: dict[str, Any] = {
        "criterion": name,
        "aggregation": aggregation,
        "value": value,
        "ratio_cap": 1.5,
    }
    analytic = gradient(batch, **options)
    weights = run(batch, **options).weight
    pull = (weights * (batch.log_pi - batch.log_mu).exp().clamp(max=1.5) * batch.advantage).detach()

    def frozen(moved: Tensor) -> float:
        from deltad.losses import aggregate

        carrier = moved if value == "logprob" else (moved - batch.log_pi).exp()
        return aggregate(-pull * carrier, batch.mask, aggregation).item()

    h = 1e-4
    for row, column in itertools.product(range(2), range(3)):
        step = torch.zeros_like(batch.log_pi)
        step[row, column] = h
        numeric = (frozen(batch.log_pi + step) - frozen(batch.log_pi - step)) / (2 * h)
        assert analytic[row, column].item() == pytest.approx(numeric, rel=1e-6, abs=1e-10)


@each_mask
def test_gradient_of_the_loss_itself_agrees_with_central_differences(name: str) -> None:
    """Through everything, decisions included: no decision flips within h of these tokens."""
    batch = draw(4)
    analytic = gradient(batch, criterion=name)
    h = 1e-6
    for row, column in itertools.product(range(2), range(3)):
        step = torch.zeros_like(batch.log_pi)
        step[row, column] = h
        ends = [
            run(batch, batch.log_pi + sign * step, criterion=name, check=False) for sign in (1, -1)
        ]
        assert torch.equal(ends[0].keep, ends[1].keep)
        numeric = (ends[0].loss - ends[1].loss).item() / (2 * h)
        assert analytic[row, column].item() == pytest.approx(numeric, rel=1e-6, abs=1e-9)


@each_rule
def test_only_the_sampled_log_prob_carries_gradient(name: str) -> None:
    batch = draw(5)
    leaves = {
        key: value.clone().requires_grad_()
        for key, value in {
            "log_pi": batch.log_pi,
            "log_mu": batch.log_mu,
            "advantage": batch.advantage,
            "behavior": batch.topk().behavior,
            "policy": batch.topk().policy,
            "collision": batch.pi.exp().square().sum(dim=-1),
            "token_weight": torch.rand(batch.mask.shape, dtype=torch.float64),
            "d": batch.full()["kl"][0],
            "d_dot": batch.full()["kl"][1],
        }.items()
    }
    topk = replace(
        batch.topk(),
        behavior=leaves["behavior"],
        policy=leaves["policy"],
        collision=leaves["collision"],
    )
    result = trust_region_loss(
        leaves["log_pi"],
        leaves["log_mu"],
        leaves["advantage"],
        batch.mask,
        criterion=name,
        threshold=0.05,
        topk=topk,
        full={"kl": (leaves["d"], leaves["d_dot"]), "tv": batch.full()["tv"]},
        token_weight=leaves["token_weight"],
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert [key for key, leaf in leaves.items() if leaf.grad is not None] == ["log_pi"]
    assert not any(m.numerator.requires_grad for m in result.metrics.values())
    assert not result.weight.requires_grad


@each_rule
@pytest.mark.parametrize("value", ["ratio", "logprob"])
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient(
    name: str, value: str
) -> None:
    batch = draw(6, rows=6)
    used = batch.mask
    kinds = torch.tensor([math.nan, math.inf, -math.inf, 800.0, -800.0], dtype=torch.float64)
    bad = kinds[torch.arange(used.numel()) % len(kinds)].reshape(used.shape)
    assert len(set(bad[~used].tolist())) >= len(kinds)
    topk, full = batch.topk(), batch.full()
    spoiled = [
        torch.where(used, column, bad) for column in (batch.log_pi, batch.log_mu, batch.advantage)
    ]
    assert topk.collision is not None
    listed = replace(
        topk,
        topk_ids=torch.where(used[..., None], topk.topk_ids, 10**9),
        token_ids=torch.where(used, topk.token_ids, -5),
        behavior=torch.where(used[..., None], topk.behavior, bad[..., None]),
        policy=torch.where(used[..., None], topk.policy, bad[..., None]),
        collision=torch.where(used, topk.collision, bad),
    )
    leaf = spoiled[0].requires_grad_()
    result = trust_region_loss(
        leaf,
        spoiled[1],
        spoiled[2],
        used,
        criterion=name,
        threshold=0.05,
        topk=listed,
        value=value,  # type: ignore[arg-type]
        full={
            k: (torch.where(used, d, bad), torch.where(used, e, bad)) for k, (d, e) in full.items()
        },
        token_weight=torch.where(used, torch.ones_like(bad), bad),
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    clean = run(batch, criterion=name, value=value)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient(batch, criterion=name, value=value))
    assert result.loss.item() == clean.loss.item()
    assert {k: m.value for k, m in result.metrics.items()} == {
        k: m.value for k, m in clean.metrics.items()
    }


@each_mask
@few
@given(seed=seeds)
def test_a_flipped_advantage_masks_no_token_twice(name: str, seed: int) -> None:
    batch = draw(seed, rows=12, columns=12)
    flipped = replace(batch, advantage=-batch.advantage)
    kept, other = run(batch, criterion=name).keep, run(flipped, criterion=name).keep
    assert (kept | other)[batch.mask].all()


@each_rule
@few
@given(seed=seeds)
def test_order_of_tokens_and_responses_does_not_matter(name: str, seed: int) -> None:
    batch = draw(seed, rows=12, columns=12)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    whole, mixed = run(batch, criterion=name), run(batch.rows(order), criterion=name)
    assert torch.equal(whole.keep[order], mixed.keep)
    assert mixed.loss.item() == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    assert torch.allclose(
        gradient(batch, criterion=name)[order], gradient(batch.rows(order), criterion=name)
    )


@each_mask
@few
@given(seed=seeds)
def test_a_kept_token_pulls_as_without_a_mask(name: str, seed: int) -> None:
    """Its gradient does not depend on which other tokens are masked."""
    batch = draw(seed, rows=12, columns=12)
    kept = run(batch, criterion=name).keep
    masked, plain = gradient(batch, criterion=name), gradient(batch, criterion="none")
    assert torch.equal(masked, torch.where(kept, plain, torch.zeros_like(plain)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@few
@given(seed=seeds, cut=st.integers(1, 11))
def test_micro_batches_add_up_to_the_step(aggregation: str, seed: int, cut: int) -> None:
    batch = draw(seed, rows=12, columns=12)
    horizon = batch.mask.shape[1]
    options: dict[str, Any] = {"aggregation": aggregation, "horizon": horizon}
    parts = [batch.rows(slice(0, cut)), batch.rows(slice(cut, None))]
    if aggregation == "token-sum":
        total: Tensor | float = 1.0
    else:
        total = torch.stack([count(part.mask, aggregation) for part in parts]).sum()
    whole = run(batch, **options)
    pieces = [run(part, denominator=total, **options) for part in parts]
    assert sum(p.loss.item() for p in pieces) == pytest.approx(
        whole.loss.item(), rel=1e-9, abs=1e-12
    )
    gradients = [gradient(part, denominator=total, **options) for part in parts]
    assert torch.allclose(torch.cat(gradients), gradient(batch, **options), rtol=1e-9)
    added = add_metrics(piece.metrics for piece in pieces)
    for name, metric in whole.metrics.items():
        assert added[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mean_over_ranks_is_the_step(aggregation: str) -> None:
    """Two ranks whose gradients a trainer averages, with one denominator."""
    batch = draw(8)
    options: dict[str, Any] = {"aggregation": aggregation, "horizon": 7}
    parts = [batch.rows(slice(0, 2)), batch.rows(slice(2, None))]
    total = 1.0
    if aggregation != "token-sum":
        total = sum(count(part.mask, aggregation).item() for part in parts)
    losses = [run(part, denominator=total, ranks=2, **options).loss.item() for part in parts]
    assert sum(losses) / 2 == pytest.approx(run(batch, **options).loss.item(), rel=1e-12)


@settings(few, max_examples=5 * few.max_examples)
@given(seed=seeds, threshold=st.sampled_from([0.0, 0.02, 0.15, 0.6]))
def test_on_the_binary_support_prediction_and_dppo_binary_kl_are_one(
    seed: int, threshold: float
) -> None:
    """arXiv:2607.10848v1, Appendix C: same tokens kept, same loss, same gradient."""
    batch = draw(seed, rows=20, columns=20, shift=2.0)
    nothing_listed = batch.topk(k=0)
    ours: dict[str, Any] = {
        "criterion": "predictive-kl-aggregated",
        "topk": nothing_listed,
        "threshold": threshold,
    }
    theirs: dict[str, Any] = {"criterion": "binary-kl", "topk": None, "threshold": threshold}
    found, expected = run(batch, **ours), run(batch, **theirs)
    assert torch.equal(found.keep, expected.keep)
    assert found.loss.item() == expected.loss.item()
    assert torch.equal(gradient(batch, **ours), gradient(batch, **theirs))


def test_the_appendix_c_batches_hold_masked_and_kept_outside_tokens() -> None:
    """The law above would be empty if nothing were outside, or nothing masked."""
    result = run(draw(0, shift=2.0), criterion="binary-kl", topk=None, threshold=0.02)
    masked, outside = (result.metrics[name].numerator.item() for name in ("masked", "outside"))
    assert 0 < masked < outside


def test_without_a_mask_it_is_the_surrogate_of_the_recipes() -> None:
    batch = draw(9)
    expected = policy_loss(
        batch.log_pi,
        batch.log_mu,
        batch.advantage,
        batch.mask,
        denominator=int(batch.mask.sum()),
        ratio_cap=1.3,
    )
    found = run(batch, criterion="none", ratio_cap=1.3)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-13)


@settings(few, max_examples=5 * few.max_examples)
@given(
    seed=seeds,
    low=st.sampled_from([0.0, 0.1, 0.2]),
    high=st.sampled_from([0.1, 0.28]),
    dual=st.sampled_from([1.5, 3.0, math.inf]),
)
def test_clip_reads_ppo_and_has_its_gradient(
    seed: int, low: float, high: float, dual: float
) -> None:
    """−min(r Â, clip(r) Â), at most −dual Â where Â < 0, differentiated by autograd."""
    batch = draw(seed, rows=12, columns=12)
    parameters = {"low": low, "high": high, "dual": dual}
    leaf = batch.log_pi.clone().requires_grad_()
    ratio = (leaf - batch.log_mu).exp()
    objective = torch.minimum(
        ratio * batch.advantage, ratio.clamp(1 - low, 1 + high) * batch.advantage
    )
    objective = torch.where(
        batch.advantage < 0, torch.maximum(objective, dual * batch.advantage), objective
    )
    expected = -objective[batch.mask].sum() / batch.mask.sum()
    expected.backward()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"criterion": "clip-higher", "parameters": parameters}
    assert run(batch, value="clip", **options).loss.item() == pytest.approx(
        expected.item(), rel=1e-12
    )
    assert leaf.grad is not None
    for value in ("clip", "ratio", "logprob"):
        assert torch.allclose(gradient(batch, value=value, **options), leaf.grad, rtol=1e-12)


def test_cap_of_the_ratio_lets_a_token_push_on_with_the_cap() -> None:
    batch = draw(10)
    capped = gradient(batch, criterion="none", ratio_cap=0.9)
    ratio = (batch.log_pi - batch.log_mu).exp()
    expected = -ratio.clamp(max=0.9) * batch.advantage * batch.mask / batch.mask.sum()
    assert ((ratio > 0.9) & batch.mask).any()
    torch.testing.assert_close(capped, expected, rtol=1e-13, atol=0)


def test_a_threshold_a_sign_judges_each_sign_by_its_own() -> None:
    batch = draw(11)
    both = run(batch, threshold=(0.02, 0.3)).keep
    low, high = run(batch, threshold=0.02).keep, run(batch, threshold=0.3).keep
    assert torch.equal(both, torch.where(batch.advantage > 0, high, low))
    assert not torch.equal(low, high)


def test_an_advantage_a_response_is_that_of_its_tokens() -> None:
    batch = draw(12)
    a_response = torch.randn(len(batch.mask), dtype=torch.float64)
    wide = replace(batch, advantage=a_response[:, None].expand_as(batch.log_pi))
    for given_as in (a_response, a_response[:, None]):
        narrow = replace(batch, advantage=given_as)
        assert run(narrow).loss.item() == run(wide).loss.item()


def test_token_weight_multiplies_a_tokens_loss() -> None:
    batch = draw(13)
    extra = torch.rand(batch.mask.shape, dtype=torch.float64)
    assert torch.allclose(gradient(batch, token_weight=extra), gradient(batch) * extra, rtol=1e-13)
    by_response = extra[:, :1]
    assert torch.allclose(
        gradient(batch, token_weight=by_response), gradient(batch) * by_response, rtol=1e-13
    )


@pytest.mark.parametrize("where", ["behavior_logprob", "topk"])
def test_missing_behaviour_numbers_are_refused_or_left_out_and_counted(where: str) -> None:
    batch = draw(14)
    log_mu, topk = batch.log_mu.clone(), batch.topk()
    if where == "topk":
        topk.behavior[0, 2, 1] = math.nan
    else:
        log_mu[0, 2] = math.nan

    def ask(**options: Any) -> Any:
        return trust_region_loss(
            batch.log_pi, log_mu, batch.advantage, batch.mask, topk=topk, threshold=0.05, **options
        )

    with pytest.raises(SupportError, match=r"response 0 of the batch, its token 2: .*nan"):
        ask()
    without = batch.mask.clone()
    without[0, 2] = False
    expected = run(replace(batch, mask=without), denominator=int(batch.mask.sum()))
    for options in ({"drop_missing": True}, {"check": False}):
        found = ask(**options)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-13)
        assert not found.keep[0, 2]
        assert found.metrics["missing"].numerator.item() == 1
        assert found.metrics["missing"].denominator.item() == batch.mask.sum().item()
        assert found.metrics["masked"] == expected.metrics["masked"]


@pytest.mark.parametrize("column", ["log_pi", "advantage", "collision"])
def test_other_missing_numbers_are_never_left_out(column: str) -> None:
    batch = draw(15)
    columns = {
        "log_pi": batch.log_pi.clone(),
        "advantage": batch.advantage.clone(),
        "collision": batch.pi.exp().square().sum(dim=-1),
    }
    columns[column][1, 0] = math.nan
    with pytest.raises(SupportError, match="response 1 of the batch, its token 0: "):
        trust_region_loss(
            columns["log_pi"],
            batch.log_mu,
            columns["advantage"],
            batch.mask,
            criterion="predictive-kl-exact",
            topk=replace(batch.topk(), collision=columns["collision"]),
            drop_missing=True,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decisions_are_made_in_float64_whatever_comes(dtype: torch.dtype) -> None:
    batch = draw(16, rows=20, columns=20)
    topk = batch.topk()
    narrow = trust_region_loss(
        batch.log_pi.to(dtype),
        batch.log_mu.to(dtype),
        batch.advantage.to(dtype),
        batch.mask.to(dtype),
        topk=replace(topk, behavior=topk.behavior.to(dtype), policy=topk.policy.to(dtype)),
        threshold=0.05,
    )
    assert narrow.loss.dtype == dtype
    assert narrow.metrics["divergence"].numerator.dtype == torch.float64
    assert torch.equal(narrow.keep, run(batch).keep)
    assert narrow.loss.item() == pytest.approx(run(batch).loss.item(), rel=1e-5)


def test_nothing_kept_gives_a_zero_that_can_be_differentiated() -> None:
    batch = draw(17)
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    assert run(empty).loss.item() == 0
    assert not gradient(empty).any()
    assert math.isnan(run(empty).metrics["masked"].value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"criterion": "ratoi"}, CriterionError, "no criterion 'ratoi', did you mean ratio"),
        ({"criterion": "ratio", "topk": None}, CriterionError, "no top-K log-probs"),
        (
            {"criterion": "predictive-kl-full", "full": None},
            CriterionError,
            r"needs `full\['kl'\]`",
        ),
        (
            {
                "criterion": "predictive-tv-exact",
                "topk": replace(draw().topk(), collision=None),
            },
            CriterionError,
            "needs `collision` in `topk`",
        ),
        ({"divergence": "tv"}, CriterionError, "cannot judge a TV region"),
        ({"threshold": -0.1}, CriterionError, "`threshold`.*-0.1"),
        ({"threshold": (0.1, math.nan)}, CriterionError, "`threshold`.*nan"),
        ({"parameters": {"cap": 2.0}}, CriterionError, "no parameter cap"),
        ({"criterion": "tis", "parameters": {"low": 1}}, CriterionError, "no parameter low"),
        ({"criterion": "clip-higher", "parameters": {"dual": 1.0}}, ValueError, "`dual`.*1.0"),
        ({"criterion": "clip-higher", "parameters": {"low": 2.0}}, ValueError, "`low`.*2.0"),
        ({"ratio_cap": 0.0}, ValueError, "`ratio_cap` must be positive"),
        ({"value": "clip"}, ValueError, "`value` clip belongs to"),
        ({"value": "sum"}, ValueError, "`value` must be one of.*'sum'"),
        ({"convention": "other"}, ValueError, "no convention 'other'"),
        ({"aggregation": "mean"}, ValueError, "no aggregation 'mean'.*token-mean"),
        ({"token_weight": torch.ones(3)}, ValueError, r"`token_weight`.*\(5, 7\).*\(3, 1\)"),
        ({"ranks": 2}, ValueError, "`denominator` is needed with 2 ranks"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(draw(), **options)


def test_shapes_and_half_precision_are_refused() -> None:
    one = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"`behavior_logprob`.*\(2, 3\).*\(2, 4\)"):
        trust_region_loss(one, torch.zeros(2, 4), one, one, criterion="none")
    with pytest.raises(ValueError, match=r"`response_mask`.*\(2, 3\).*\(3,\)"):
        trust_region_loss(one, one, one, torch.zeros(3), criterion="none")
    with pytest.raises(ValueError, match=r"`advantage` must be of shape .*\(3, 1\)"):
        trust_region_loss(one, one, torch.zeros(3), one, criterion="none")
    with pytest.raises(ValueError, match=r"`logprob` must be of shape \(batch, token\).*\(3,\)"):
        trust_region_loss(one[0], one[0], one[0], one[0], criterion="none")
    with pytest.raises(ValueError, match=r"must be float32 or float64, got torch\.bfloat16"):
        trust_region_loss(one.bfloat16(), one, one, one, criterion="none")


def test_a_batch_of_another_size_than_its_top_k_is_refused() -> None:
    batch = draw()
    with pytest.raises(ValueError, match=r"`topk.token_ids`.*\(5, 7\).*\(2, 7\)"):
        run(batch, topk=batch.rows(slice(0, 2)).topk())


def test_a_criterion_of_ones_own_can_be_given() -> None:
    batch = draw(18)
    stricter = replace(
        CRITERIA["binary-tv"],
        name="own",
        region=lambda tokens: 2 * tokens.binary_divergence("tv"),
    )
    assert torch.equal(
        run(batch, criterion=stricter, threshold=0.1).keep,
        run(batch, criterion="binary-tv", threshold=0.05).keep,
    )
    assert torch.equal(
        run(batch, criterion=RULES["drpo"]).weight, run(batch, criterion="drpo").weight
    )


def test_a_row_of_padding_is_judged_on_the_binary_support() -> None:
    batch = draw(19)
    topk = batch.topk()
    blank = TopKLogprobs(
        batch.token_ids,
        torch.full_like(topk.topk_ids, -1),
        torch.full_like(topk.behavior, math.nan),
        torch.full_like(topk.policy, math.nan),
        topk.vocab_size,
    )
    assert torch.equal(
        run(batch, topk=blank).keep, run(batch, criterion="binary-kl", topk=None).keep
    )


@pytest.mark.parametrize("name", ["mis", "icepop", "clip-higher", "binary-kl"])
def test_a_masked_tokens_overflowing_ratio_is_no_nan(name: str) -> None:
    """log r = 799.9: e to that is infinite in float64, and 0 times it would be NaN."""
    log_mu = torch.tensor([[-800.0, -1.0]], dtype=torch.float64)
    log_pi = torch.tensor([[-0.1, -0.9]], dtype=torch.float64).requires_grad_()
    one = torch.ones(1, 2, dtype=torch.float64)
    result = trust_region_loss(log_pi, log_mu, one, one, criterion=name)
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert result.keep.tolist() == [[False, True]]
    assert result.loss.item() == pytest.approx(-math.exp(0.1) / 2, rel=1e-12)
    assert log_pi.grad is not None
    assert log_pi.grad.tolist() == [[0.0, pytest.approx(-math.exp(0.1) / 2, rel=1e-12)]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"behavior_logprob": torch.tensor([[-0.7, -9999.0]])},
            "token 1: .*log r is 9998.*ratio_cap",
        ),
        ({"token_weight": torch.tensor([[1.0, math.nan]])}, "token 1: .*token_weight is nan"),
        ({"behavior_logprob": torch.full((1, 2), -0.7).half()}, "float32 or float64 too"),
        ({"response_mask": torch.tensor([[1.0, math.nan]])}, "holds NaN"),
        ({"threshold": [0.1, 0.2]}, "`threshold` must be a number, or a tuple"),
        ({"threshold": (0.1, 0.2, 0.3)}, "`threshold` must be a number, or a tuple"),
        ({"denominator": torch.ones(2)}, r"`denominator` must be one number, got shape \(2,\)"),
        ({"denominator": math.inf}, "`denominator` must be positive, got inf"),
        ({"ranks": math.nan, "denominator": 1.0}, "`ranks` must be at least 1, got nan"),
        ({"criterion": None}, "must be a name or a Rule, got None"),
        (
            {"criterion": "predictive-kl-full", "full": {"kl": (torch.full((1, 2), -1.0),) * 2}},
            "full kl divergence is -1, expected a number in",
        ),
    ],
)
def test_what_would_make_a_wrong_loss_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "logprob": torch.full((1, 2), -0.8),
        "behavior_logprob": torch.full((1, 2), -0.7),
        "advantage": torch.ones(1),
        "response_mask": torch.ones(1, 2),
        "criterion": "none",
    }
    assert trust_region_loss(**arguments).loss.isfinite()
    with pytest.raises((ValueError, CriterionError, SupportError), match=message):
        trust_region_loss(**arguments | change)
