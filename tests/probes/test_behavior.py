"""What the behavior policy said is refused where it does not fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltad.probes import ProbeError, ResponseTokens


def good(**changes: Any) -> dict[str, Any]:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 2:4] = True
    mask[1, 1] = True
    given = {
        "response_mask": mask,
        "advantages": torch.zeros(2),
        "behavior_logprobs": torch.zeros(2, 5),
        "topk_ids": torch.zeros(2, 5, 3, dtype=torch.long),
        "topk_logprobs": torch.zeros(2, 5, 3),
        "sequence": torch.arange(2),
        "group": torch.zeros(2, dtype=torch.int32),
    }
    return {**given, **changes}


def test_rows_come_in_order_of_sequence_and_position() -> None:
    tokens = ResponseTokens(**good())
    b, j = tokens.where()
    assert list(zip(b.tolist(), j.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 1)]
    assert tokens.top_k == 3


def test_values_a_token_are_taken_too() -> None:
    ResponseTokens(
        **good(
            advantages=torch.zeros(2, 5, dtype=torch.bfloat16),
            sequence=torch.zeros(2, 5, dtype=torch.long),
            keep=torch.ones(2, 5, dtype=torch.bool),
            input_ids=torch.zeros(2, 5, dtype=torch.int32),
        )
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_mask": torch.zeros(2, 5)}, "`response_mask` must be bool.*float32"),
        ({"response_mask": torch.ones(2, 5, dtype=torch.bool)}, "True at position 0 of row 0"),
        ({"advantages": torch.zeros(3)}, r"`advantages` must have shape \(2,\) or \(2, 5\)"),
        ({"advantages": torch.zeros(2).long()}, "`advantages` must be floating point, got"),
        ({"behavior_logprobs": torch.zeros(2)}, r"`behavior_logprobs` must have shape \(2, 5\)"),
        ({"topk_ids": torch.zeros(2, 5).long()}, r"`topk_ids` must have shape \(2, 5, 1\)"),
        ({"topk_ids": torch.zeros(2, 5, 0).long()}, r"`topk_ids` must have shape \(2, 5, 1\)"),
        ({"topk_ids": torch.zeros(2, 5, 3)}, "`topk_ids` must be integer, got torch.float32"),
        ({"topk_logprobs": torch.zeros(2, 5, 4)}, r"`topk_logprobs` must have shape \(2, 5, 3\)"),
        ({"sequence": torch.zeros(2)}, "`sequence` must be integer"),
        ({"group": torch.zeros(2, dtype=torch.bool)}, "`group` must be integer, got torch.bool"),
        ({"keep": torch.ones(2, 5)}, "`keep` must be bool, got torch.float32"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        ResponseTokens(**good(**changes))
