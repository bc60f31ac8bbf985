"""Reduction to S and the tail, and what it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from deltad.support import (
    ROUNDED_LOGITS_TOLERANCE,
    SupportError,
    binary_support,
    full_support,
    topk_support,
)
from tests.oracle import atoms, support_of
from tests.policies import Pair, as_array, as_numpy, draw_pair, pairs

BACKENDS = [
    {"backend": backend, "dtype": dtype}
    for backend in ("numpy", "torch")
    for dtype in ("float32", "float64")
]


@given(pair=pairs())
def test_support_holds_the_atoms_of_both_policies(pair: Pair) -> None:
    support = pair.support()
    for row in range(len(pair.mu)):
        ids = support_of(pair.topk_ids[row].tolist(), int(pair.token_id[row]))
        *inside, (mu_tail, pi_tail) = atoms(pair.mu[row].tolist(), pair.pi[row].tolist(), ids)
        used = support.used[row]
        assert int(used.sum()) == len(ids)
        np.testing.assert_allclose(support.mu[row][used], [m for m, _ in inside], rtol=1e-12)
        np.testing.assert_allclose(support.pi[row][used], [p for _, p in inside], rtol=1e-12)
        assert support.mu_tail[row] == pytest.approx(mu_tail, abs=1e-14)
        assert support.pi_tail[row] == pytest.approx(pi_tail, abs=1e-14)
        assert support.tail_size[row] == pair.vocab_size - len(ids)
        assert support.mu_sampled[row] == pytest.approx(pair.mu[row, pair.token_id[row]])
        assert support.pi_sampled[row] == pytest.approx(pair.pi[row, pair.token_id[row]])
        assert int(support.sampled[row].sum()) == 1


@pytest.mark.parametrize("how", BACKENDS, ids=str)
def test_every_backend_gives_the_same_support_in_its_own_dtype(how: dict[str, str]) -> None:
    pair = draw_pair(np.random.default_rng(0), padded=1)
    reference, support = pair.support(), pair.support(**how)
    assert str(support.mu.dtype).endswith(how["dtype"])
    for name in ("mu", "pi", "used", "sampled", "mu_tail", "pi_tail", "tail_size"):
        np.testing.assert_allclose(
            as_numpy(getattr(support, name)),
            getattr(reference, name),
            atol=1e-6 if how["dtype"] == "float32" else 1e-15,
        )


def test_support_that_covers_the_vocabulary_has_no_tail() -> None:
    pair = draw_pair(np.random.default_rng(1), vocab_size=5, top_k=7)
    support = pair.support()
    assert (support.tail_size == 0).all()
    assert (support.mu_tail == 0).all()
    assert (support.pi_tail == 0).all()


def test_post_policy_on_the_same_support_equals_a_fresh_reduction() -> None:
    pair = draw_pair(np.random.default_rng(2), padded=1)
    later = draw_pair(np.random.default_rng(3))
    moved = Pair(pair.mu, later.pi, pair.topk_ids, pair.token_id, pair.advantage)
    _, topk_pi, _, pi_k = moved.logprobs()
    again = pair.support().with_policy(topk_pi, pi_k)
    for name in ("mu", "pi", "log_pi", "pi_tail", "mu_tail"):
        np.testing.assert_array_equal(getattr(again, name), getattr(moved.support(), name))


def test_padding_is_never_read() -> None:
    support = topk_support(
        np.array([[1, -1, -1]]),
        np.array([[np.log(0.5), np.nan, 7.0]]),
        np.array([[np.log(0.5), np.inf, -np.inf]]),
        np.array([1]),
        np.log([0.5]),
        np.log([0.5]),
        vocab_size=4,
    )
    np.testing.assert_allclose(support.mu, [[0.5, 0, 0, 0]])
    np.testing.assert_allclose(support.mu_tail, [0.5])


def test_behavior_may_hold_minus_infinity_and_the_id_stays_in_the_support() -> None:
    support = topk_support(
        np.array([[1, 2]]),
        np.array([[np.log(0.5), -np.inf]]),
        np.log([[0.5, 0.25]]),
        np.array([1]),
        np.log([0.5]),
        np.log([0.5]),
        vocab_size=4,
    )
    np.testing.assert_allclose(support.mu, [[0.5, 0, 0]])
    np.testing.assert_allclose(support.pi, [[0.5, 0.25, 0]])
    assert support.tail_size[0] == 2


def test_rounding_above_zero_counts_as_zero_and_leaves_no_tail() -> None:
    support = topk_support(
        np.array([[1]]),
        np.array([[5e-5]]),
        np.array([[9e-5]]),
        np.array([1]),
        np.array([5e-5]),
        np.array([9e-5]),
        vocab_size=4,
    )
    assert support.mu[0, 0] == support.pi[0, 0] == 1
    assert support.mu_tail[0] == support.pi_tail[0] == 0


def _valid() -> dict[str, Any]:
    """Three sound tokens; the middle one is what each case spoils."""
    return {
        "topk_ids": np.array([[1, 2], [3, 4], [5, 6]]),
        "topk_behavior_logprobs": np.log([[0.5, 0.2], [0.6, 0.1], [0.3, 0.3]]),
        "topk_policy_logprobs": np.log([[0.4, 0.3], [0.5, 0.2], [0.2, 0.2]]),
        "token_id": np.array([1, 3, 0]),
        "behavior_logprob": np.log([0.5, 0.6, 0.1]),
        "policy_logprob": np.log([0.4, 0.5, 0.2]),
        "vocab_size": 9,
    }


@pytest.mark.parametrize(
    ("field", "where", "value", "says"),
    [
        ("topk_ids", (1, 1), 3, "id 3 is listed twice"),
        ("topk_ids", (1, 1), 9, "top-K id 9 is neither"),
        ("topk_ids", (1, 1), -2, "top-K id -2 is neither"),
        ("token_id", 1, 9, "sampled id 9"),
        ("token_id", 1, -1, "sampled id -1"),
        ("topk_behavior_logprobs", (1, 1), np.nan, "behavior log-prob in slot 1"),
        ("topk_behavior_logprobs", (1, 1), np.inf, "behavior log-prob in slot 1"),
        ("topk_behavior_logprobs", (1, 1), 2e-4, "behavior log-prob in slot 1"),
        ("topk_behavior_logprobs", (1, 1), np.log(0.41), "sum to 1.01"),
        ("topk_behavior_logprobs", (1, 0), np.log(0.6) + 2e-4, "expected the same within"),
        ("topk_policy_logprobs", (1, 1), np.nan, "policy log-prob in slot 1"),
        ("topk_policy_logprobs", (1, 1), -np.inf, "policy log-prob in slot 1"),
        ("topk_policy_logprobs", (1, 1), np.log(0.51), "policy probabilities"),
        ("topk_policy_logprobs", (1, 0), np.log(0.5) - 2e-4, "expected the same within"),
        ("behavior_logprob", 1, -np.inf, "behavior log-prob of the sampled token"),
        ("behavior_logprob", 1, np.nan, "behavior log-prob of the sampled token"),
        ("behavior_logprob", 1, 0.5, "behavior log-prob of the sampled token"),
        ("policy_logprob", 1, -np.inf, "policy log-prob of the sampled token"),
        ("policy_logprob", 1, np.nan, "policy log-prob of the sampled token"),
    ],
)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_impossible_values_are_refused_by_row(
    backend: str, field: str, where: Any, value: float, says: str
) -> None:
    arguments = _valid()
    topk_support(**arguments)
    arguments[field][where] = value
    arguments = {
        name: as_array(a, backend=backend) if isinstance(a, np.ndarray) else a
        for name, a in arguments.items()
    }
    with pytest.raises(SupportError, match=says) as caught:
        topk_support(**arguments)
    assert caught.value.row == 1
    assert str(caught.value) == f"row 1: {caught.value.reason}"


def test_rounded_logits_widen_the_tolerance() -> None:
    arguments = _valid()
    arguments["topk_behavior_logprobs"][1, 1] = np.log(0.44)
    with pytest.raises(SupportError):
        topk_support(**arguments)
    support = topk_support(**arguments, tolerance=ROUNDED_LOGITS_TOLERANCE)
    assert support.mu_tail[1] == 0


def test_post_policy_is_checked_too() -> None:
    support = topk_support(**_valid())
    good = _valid()
    bad = good["topk_policy_logprobs"].copy()
    bad[2, 0] = np.nan
    with pytest.raises(SupportError, match="policy log-prob in slot 0") as caught:
        support.with_policy(bad, good["policy_logprob"])
    assert caught.value.row == 2


def test_full_and_binary_supports_check_the_sampled_token() -> None:
    logs = np.log(np.full((2, 4), 0.25))
    with pytest.raises(SupportError, match="sampled id 4") as caught:
        full_support(logs, logs, np.array([0, 4]))
    assert caught.value.row == 1
    never = logs.copy()
    never[0, 0] = -np.inf
    with pytest.raises(SupportError, match="behavior log-prob of the sampled"):
        full_support(never, logs, np.array([0, 1]))
    with pytest.raises(SupportError, match="policy log-prob of the sampled"):
        binary_support(np.array([-1.0]), np.array([-np.inf]))


def test_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(SupportError(3, "too large")))
    assert (error.row, error.reason, str(error)) == (3, "too large", "row 3: too large")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_and_integers_are_refused(dtype: torch.dtype) -> None:
    bad = torch.tensor([-1, -2]).to(dtype)
    with pytest.raises(TypeError, match="must be float32 or float64"):
        binary_support(bad, bad)
    if dtype != torch.bfloat16:
        with pytest.raises(TypeError, match="must be float32 or float64"):
            binary_support(bad.numpy(), bad.numpy())
