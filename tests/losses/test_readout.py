"""Log-probs off the logits: against a plain float64 log-softmax, and what is held in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltad.losses import policy_logprobs, readout

ROWS, COLUMNS, VOCAB, TOP_K = 3, 4, 37, 5


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (batch, token, vocab), sampled ids, and top-K ids with some padding."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, COLUMNS, VOCAB, generator=generator, dtype=torch.float64)
    sampled = torch.randint(0, VOCAB, (ROWS, COLUMNS), generator=generator)
    listed = torch.rand(ROWS, COLUMNS, VOCAB, generator=generator).topk(TOP_K, dim=-1).indices
    listed[0, 1, 3:] = -1
    return logits.to(dtype), sampled, listed


def plain(logits: Tensor, temperature: float) -> Tensor:
    return (logits.double() / temperature).log_softmax(dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [2**24, 100, 1])
def test_values_are_those_of_the_log_softmax(
    temperature: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readout, "TILE", tile)
    logits, sampled, listed = drawn()
    found = policy_logprobs(
        logits, sampled, listed, temperature=temperature, collision=True, entropy=True
    )
    truth = plain(logits, temperature)
    at = truth.gather(-1, listed.clamp(min=0))
    at[listed < 0] = math.nan
    expected = (
        truth.gather(-1, sampled[..., None])[..., 0],
        at,
        truth.exp().square().sum(dim=-1),
        -(truth.exp() * truth).sum(dim=-1),
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("tile", [2**24, 100, 1])
def test_gradient_is_that_of_the_log_softmax(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "TILE", tile)
    logits, sampled, listed = drawn()
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = policy_logprobs(ours, sampled, listed, temperature=0.7)
    (found.logprob * weight).sum().backward()  # type: ignore[no-untyped-call]
    expected = plain(theirs, 0.7).gather(-1, sampled[..., None])[..., 0]
    (expected * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_gradient_agrees_with_finite_differences() -> None:
    logits, sampled, _ = drawn()
    assert torch.autograd.gradcheck(
        lambda x: policy_logprobs(x, sampled[:1], temperature=0.8).logprob,
        (logits[:1].clone().requires_grad_(),),
    )


def test_only_the_sampled_tokens_log_prob_carries_gradient() -> None:
    logits, sampled, listed = drawn()
    found = policy_logprobs(logits.requires_grad_(), sampled, listed, collision=True, entropy=True)
    assert [value is not None and value.requires_grad for value in found] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_logits_are_read_in_float32(dtype: torch.dtype) -> None:
    """As exact as the logits are: no worse than a float32 log-softmax of the same numbers."""
    logits, sampled, listed = drawn(dtype)
    found = policy_logprobs(logits, sampled, listed, temperature=0.7)
    assert found.logprob.dtype == torch.float32
    truth = plain(logits, 0.7).gather(-1, sampled[..., None])[..., 0]
    naive = (logits.float() / 0.7).log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
    ours = (found.logprob.double() - truth).abs().max()
    assert ours <= (naive.double() - truth).abs().max() + 2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_float32_copy_of_the_logits_is_made(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward make one tensor of the logits' size: the gradient, in their dtype."""
    monkeypatch.setattr(readout, "TILE", 2 * VOCAB)
    logits, sampled, listed = drawn(dtype)
    logits.requires_grad_()
    made: list[tuple[int, torch.dtype]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out._base is None:
                made.append((out.untyped_storage().nbytes() // out.element_size(), out.dtype))
            return out

    with Watch():  # type: ignore[no-untyped-call]
        found = policy_logprobs(logits, sampled, listed, collision=True, entropy=True)
        found.logprob.sum().backward()  # type: ignore[no-untyped-call]
    whole = [d for size, d in made if size > 2 * VOCAB and d != torch.int64]
    assert len(made) > 10
    assert set(whole) <= {dtype}
    assert logits.grad is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_the_loss_does_not_use_get_no_gradient_whatever_they_hold(bad: float) -> None:
    logits, sampled, listed = drawn()
    logits[1, 2] = bad
    logits.requires_grad_()
    found = policy_logprobs(logits, sampled, listed)
    used = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    used[1, 2] = False
    torch.where(used, found.logprob, 0).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert not logits.grad[1, 2].any()
    assert logits.grad.isfinite().all()


def test_masked_out_ids_of_the_vocabulary_count_as_zero() -> None:
    logits, sampled, _ = drawn()
    logits[..., -3:] = -math.inf
    sampled = sampled % (VOCAB - 3)
    logits.requires_grad_()
    found = policy_logprobs(logits, sampled, collision=True, entropy=True)
    cut = policy_logprobs(logits[..., :-3], sampled, collision=True, entropy=True)
    for ours, theirs in zip(found, cut, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
    found.logprob.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_any_leading_shape_and_no_rows_at_all() -> None:
    logits, sampled, listed = drawn()
    flat = policy_logprobs(logits.flatten(0, 1), sampled.flatten(), listed.flatten(0, 1))
    shaped = policy_logprobs(logits, sampled, listed)
    assert torch.equal(flat.logprob, shaped.logprob.flatten())
    assert shaped.topk is not None
    assert shaped.topk.shape == listed.shape
    none = policy_logprobs(logits[:0], sampled[:0], listed[:0], collision=True)
    assert none.logprob.shape == (0, COLUMNS)
    assert policy_logprobs(logits, sampled)[1:] == (None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(3, 5, dtype=torch.int64)}, r"`token_ids`.*\(3, 4\).*\(3, 5\)"),
        ({"topk_ids": torch.zeros(3, 5, 2, dtype=torch.int64)}, r"`topk_ids`.*topk.*\(3, 5, 2\)"),
        ({"temperature": 0.0}, "`temperature` must be positive, got 0.0"),
        ({"token_ids": torch.full((3, 4), 37)}, "vocabulary of 37.*got 37"),
        ({"token_ids": torch.full((3, 4), -1)}, "vocabulary of 37.*got -1"),
        ({"topk_ids": torch.full((3, 4, 1), -2)}, "vocabulary of 37.*got -2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    logits, sampled, listed = drawn()
    with pytest.raises(ValueError, match=message):
        policy_logprobs(**({"logits": logits, "token_ids": sampled, "topk_ids": listed} | change))


@pytest.mark.parametrize("ids", [torch.tensor([1.5]), torch.tensor([True])])
def test_ids_that_are_no_integers_are_refused(ids: torch.Tensor) -> None:
    logits = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="`token_ids` must be integers"):
        policy_logprobs(logits, ids)
    with pytest.raises(ValueError, match="`topk_ids` must be integers"):
        policy_logprobs(logits, torch.tensor([1]), ids[None])
    with pytest.raises(ValueError, match="`temperature` must be positive"):
        policy_logprobs(logits, torch.tensor([1]), temperature=float("inf"))
