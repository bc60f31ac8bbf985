"""The layout of top-K log-probs: what it refuses, and what the two supports hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltad.losses import TopKLogprobs
from deltad.support import topk_support
from tests.losses.batch import draw, run

GIVEN: dict[str, Any] = {
    "token_ids": torch.tensor([[7, 1]]),
    "topk_ids": torch.tensor([[[5, 3, 2], [4, 1, -1]]]),
    "behavior": torch.zeros(1, 2, 3),
    "policy": torch.zeros(1, 2, 3),
    "vocab_size": 9,
}


def test_a_token_that_is_not_listed_takes_the_place_of_the_last() -> None:
    """7 replaces 2; 1 is listed, so that its row stays."""
    assert TopKLogprobs(**GIVEN).listed_ids().tolist() == [[[5, 3, 2], [4, 1, -1]]]
    replaced = TopKLogprobs(**GIVEN, support="replaced-last")
    assert replaced.listed_ids().tolist() == [[[5, 3, -1], [4, 1, -1]]]


def test_supports_agree_on_lists_that_were_delivered_with_the_last_replaced() -> None:
    batch = draw(0)
    topk = batch.topk()
    ids, listed, policy = topk.topk_ids.clone(), topk.behavior.clone(), topk.policy.clone()
    missing = ~(ids == batch.token_ids[..., None]).any(dim=-1)
    ids[..., -1] = torch.where(missing, batch.token_ids, ids[..., -1])
    listed[..., -1] = torch.where(missing, batch.log_mu, listed[..., -1])
    policy[..., -1] = torch.where(missing, batch.log_pi, policy[..., -1])
    delivered = replace(topk, topk_ids=ids, behavior=listed, policy=policy)
    values = [
        run(batch, criterion="ratio", topk=lists).metrics["divergence"].numerator.item()
        for lists in (
            delivered,
            replace(delivered, support="replaced-last"),
            replace(topk, support="replaced-last"),
        )
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert values[0] == pytest.approx(values[2], rel=1e-12)
    union = run(batch, criterion="ratio").metrics["divergence"].numerator.item()
    assert values[0] < union


def test_the_replaced_support_has_k_slots() -> None:
    batch = draw(1)
    topk = replace(batch.topk(), support="replaced-last")
    support = topk_support(
        topk.listed_ids().flatten(0, 1),
        topk.behavior.flatten(0, 1),
        topk.policy.flatten(0, 1),
        batch.token_ids.flatten(),
        batch.log_mu.flatten(),
        batch.log_pi.flatten(),
        vocab_size=topk.vocab_size,
    )
    assert set(support.used.sum(dim=-1).tolist()) == {topk.topk_ids.shape[-1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"`topk_ids`.*topk\), got \(2, 3\)"),
        ({"token_ids": torch.zeros(1, 3, dtype=torch.int64)}, r"`token_ids`.*\(1, 2\).*\(1, 3\)"),
        ({"behavior": torch.zeros(1, 2, 2)}, r"`behavior`.*\(1, 2, 3\).*\(1, 2, 2\)"),
        ({"policy": torch.zeros(1, 2, 2)}, r"`policy`.*\(1, 2, 3\).*\(1, 2, 2\)"),
        ({"collision": torch.zeros(2)}, r"`collision`.*\(1, 2\).*\(2,\)"),
        ({"token_ids": torch.zeros(1, 2)}, "`token_ids` must be integers, got torch.float32"),
        ({"vocab_size": 0}, "`vocab_size` must be positive, got 0"),
        ({"support": "replace"}, "`support` must be one of union, replaced-last, got 'replace'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKLogprobs(**(GIVEN | change))
