"""Each mode against a loop over responses and tokens, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from deltad.losses import AGGREGATIONS, aggregate, count

VALUES = torch.tensor([[3.0, 1.0, 2.0], [5.0, 7.0, 0.5], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])

# Responses of two and three tokens and an empty one: sums 4 and 12.5, means 2 and 25/6.
EXPECTED = {
    "token-mean": 16.5 / 5,
    "token-sum": 16.5,
    "seq-mean-token-sum": 16.5 / 2,
    "seq-mean-token-mean": (2 + 12.5 / 3) / 2,
    "seq-mean-token-sum-norm": 16.5 / 2 / 3,
    "grpo": (2 + 12.5 / 3) / 3,
    "bnpo": 16.5 / 5,
    "dr_grpo": 16.5 / 3 / 3,
    "dapo": 16.5 / 5,
    "luspo": 16.5 / 3,
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mode_is_its_mean_by_hand(name: str, dtype: torch.dtype) -> None:
    assert aggregate(VALUES, MASK.to(dtype), name).item() == pytest.approx(
        EXPECTED[name], rel=1e-14
    )


def test_every_mode_has_its_number_here() -> None:
    assert AGGREGATIONS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_values_outside_the_mask_are_never_read(name: str) -> None:
    spoiled = torch.where(MASK != 0, VALUES, math.nan).requires_grad_()
    loss = aggregate(spoiled, MASK, name)
    assert loss.item() == aggregate(VALUES, MASK, name).item()
    loss.backward()  # type: ignore[no-untyped-call]
    assert spoiled.grad is not None
    assert torch.equal(spoiled.grad != 0, MASK != 0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_mask_gives_zero(name: str) -> None:
    assert aggregate(VALUES, torch.zeros_like(MASK), name).item() == 0


@pytest.mark.parametrize("name", ["seq-mean-token-sum-norm", "dr_grpo"])
def test_a_horizon_is_taken_in_place_of_the_number_of_columns(name: str) -> None:
    assert aggregate(VALUES, MASK, name, horizon=30).item() == pytest.approx(EXPECTED[name] / 10)


def test_a_denominator_may_be_a_tensor() -> None:
    assert aggregate(VALUES, MASK, denominator=torch.tensor(33)).item() == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token-mean", 5), ("seq-mean-token-sum", 2), ("grpo", 3), ("token-sum", 1)],
)
def test_count_is_what_the_mode_divides_by(name: str, expected: int) -> None:
    assert count(MASK, name).item() == expected
    assert count(MASK.bool(), name).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mean"}, "no aggregation 'mean'; choose one of token-mean"),
        ({"denominator": 0}, "`denominator` must be positive, got 0"),
        ({"denominator": math.nan}, "`denominator` must be positive, got nan"),
        ({"ranks": 0}, "`ranks` must be at least 1, got 0"),
        ({"ranks": 2}, "`denominator` is needed with 2 ranks"),
        ({"name": "dr_grpo", "horizon": 0}, "`horizon` must be at least 1 token, got 0"),
        ({"response_mask": MASK[:2]}, r"got \(3, 3\) and \(2, 3\)"),
        ({"values": VALUES[0], "response_mask": MASK[0]}, r"\(batch, token\), got \(3,\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate(**({"values": VALUES, "response_mask": MASK} | options))  # type: ignore[arg-type]
