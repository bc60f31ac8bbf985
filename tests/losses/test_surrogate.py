"""The surrogate's gradient against finite differences and against its closed form."""

import math

import pytest
import torch
from torch import Tensor

from deltad.losses import policy_loss

DENOMINATOR = 7.0


def tokens(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π, log μ, advantage, keep of a few tokens, r between about e^-2 and e^2."""
    generator = torch.Generator().manual_seed(seed)
    log_pi = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    log_mu = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    advantage = torch.randn(count, generator=generator, dtype=torch.float64)
    keep = torch.arange(count) % 3 != 1
    return log_pi, log_mu, advantage, keep


def gradient(log_pi: Tensor, *rest: Tensor, ratio_cap: float | None = None) -> Tensor:
    leaf = log_pi.clone().requires_grad_()
    policy_loss(leaf, *rest, denominator=DENOMINATOR, ratio_cap=ratio_cap).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def test_value_is_the_surrogate() -> None:
    log_pi, log_mu, advantage, keep = tokens()
    loss = policy_loss(log_pi, log_mu, advantage, keep, denominator=DENOMINATOR)
    expected = -sum(
        math.exp(p - m) * a
        for p, m, a, k in zip(
            log_pi.tolist(), log_mu.tolist(), advantage.tolist(), keep.tolist(), strict=True
        )
        if k
    )
    assert loss.item() == pytest.approx(expected / DENOMINATOR, rel=1e-14)


def test_gradient_agrees_with_central_differences() -> None:
    log_pi, log_mu, advantage, keep = tokens()
    # Truncation error h^2/6 and rounding eps/h are both about 1e-11 at h = 1e-5.
    h = 1e-5
    for i in range(len(log_pi)):
        step = torch.zeros_like(log_pi)
        step[i] = h
        up = policy_loss(log_pi + step, log_mu, advantage, keep, denominator=DENOMINATOR)
        down = policy_loss(log_pi - step, log_mu, advantage, keep, denominator=DENOMINATOR)
        numeric = (up - down) / (2 * h)
        assert gradient(log_pi, log_mu, advantage, keep)[i].item() == pytest.approx(
            numeric.item(), abs=1e-9
        )


@pytest.mark.parametrize("ratio_cap", [None, 1e9, 1.5, 0.3])
def test_gradient_is_the_closed_form(ratio_cap: float | None) -> None:
    log_pi, log_mu, advantage, keep = tokens()
    ratio = (log_pi - log_mu).exp()
    weight = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    expected = -(keep * weight * advantage) / DENOMINATOR
    torch.testing.assert_close(
        gradient(log_pi, log_mu, advantage, keep, ratio_cap=ratio_cap),
        expected,
        rtol=1e-13,
        atol=0,
    )


def test_capped_token_keeps_pushing_with_the_cap_as_its_weight() -> None:
    """The gradient is that of the weight held fixed, by central differences of that function."""
    log_pi, log_mu, advantage, keep = tokens()
    cap = 0.8
    weight = (log_pi - log_mu).exp().clamp(max=cap)
    assert (weight[keep] == cap).any()
    assert (weight[keep] < cap).any()
    h = 1e-5

    def frozen(shift: Tensor) -> Tensor:
        return -(keep * weight * advantage * shift.exp()).sum() / DENOMINATOR

    analytic = gradient(log_pi, log_mu, advantage, keep, ratio_cap=cap)
    for i in range(len(log_pi)):
        step = torch.zeros_like(log_pi)
        step[i] = h
        numeric = (frozen(step) - frozen(-step)) / (2 * h)
        assert analytic[i].item() == pytest.approx(numeric.item(), abs=1e-9)


def test_inactive_cap_changes_nothing() -> None:
    log_pi, log_mu, advantage, keep = tokens()
    cap = float((log_pi - log_mu).exp().max()) * 1.01
    assert torch.equal(
        gradient(log_pi, log_mu, advantage, keep, ratio_cap=cap),
        gradient(log_pi, log_mu, advantage, keep),
    )


def test_only_the_policy_logprob_carries_gradient() -> None:
    log_pi, log_mu, advantage, keep = tokens()
    log_pi.requires_grad_()
    log_mu.requires_grad_()
    advantage.requires_grad_()
    loss = policy_loss(log_pi, log_mu, advantage * log_pi.detach(), keep, denominator=DENOMINATOR)
    loss.backward()  # type: ignore[no-untyped-call]
    assert log_pi.grad is not None
    assert log_mu.grad is None
    assert advantage.grad is None


def test_empty_keep_gives_a_zero_that_can_be_differentiated() -> None:
    log_pi, log_mu, advantage, _ = tokens()
    nothing = torch.zeros(len(log_pi), dtype=torch.bool)
    assert policy_loss(log_pi, log_mu, advantage, nothing, denominator=DENOMINATOR).item() == 0
    assert torch.equal(gradient(log_pi, log_mu, advantage, nothing), torch.zeros_like(log_pi))


def test_no_tokens_give_a_zero_that_can_be_differentiated() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert gradient(empty, empty, empty, torch.zeros(0, dtype=torch.bool)).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 800.0, -800.0])
def test_dropped_token_cannot_reach_the_loss(bad: float) -> None:
    log_pi, log_mu, advantage, keep = tokens()
    clean = gradient(log_pi, log_mu, advantage, keep, ratio_cap=5.0)
    dropped = int((~keep).nonzero()[0])
    for column in (log_pi, log_mu, advantage):
        column[dropped] = bad
    assert torch.equal(gradient(log_pi, log_mu, advantage, keep, ratio_cap=5.0), clean)


def test_mask_does_not_change_the_pull_of_the_tokens_it_keeps() -> None:
    log_pi, log_mu, advantage, keep = tokens()
    everything = torch.ones_like(keep)
    whole = gradient(log_pi, log_mu, advantage, everything)
    assert torch.equal(gradient(log_pi, log_mu, advantage, keep)[keep], whole[keep])


def test_shape_and_dtype_are_those_of_the_logprob() -> None:
    log_pi, log_mu, advantage, keep = tokens()
    loss = policy_loss(
        log_pi.float().reshape(2, 3),
        log_mu.reshape(2, 3),
        advantage.reshape(2, 3),
        keep.reshape(2, 3),
        denominator=DENOMINATOR,
    )
    assert loss.dtype == torch.float32
    assert loss.shape == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behavior_logprob": torch.zeros(2)}, r"`behavior_logprob`.*\(6,\).*\(2,\)"),
        ({"advantage": torch.zeros(6, 1)}, r"`advantage`.*\(6,\).*\(6, 1\)"),
        ({"keep": torch.ones(6)}, "`keep` must be bool.*float32"),
        ({"denominator": 0.0}, "`denominator` must be positive.*0"),
        ({"denominator": math.nan}, "`denominator` must be positive.*nan"),
        ({"ratio_cap": 0.0}, "`ratio_cap` must be positive"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    change: dict[str, Tensor | float], message: str
) -> None:
    log_pi, log_mu, advantage, keep = tokens()
    arguments = {
        "logprob": log_pi,
        "behavior_logprob": log_mu,
        "advantage": advantage,
        "keep": keep,
        "denominator": DENOMINATOR,
    } | change
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    half = torch.full((2,), -1.0, dtype=dtype)
    with pytest.raises(ValueError, match="must be float32 or float64"):
        policy_loss(half, half, half, torch.ones(2, dtype=torch.bool), denominator=2)
