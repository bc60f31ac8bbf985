from __future__ import annotations

import torch

from deltad.probes.trl.batch import KNOWN, ROW, BehaviorRows, loss_mask, without_ours


def inputs() -> dict[str, torch.Tensor]:
    """Two completions of three tokens after prompts of two."""
    return {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[8, 9, 1], [4, 1, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
        "advantages": torch.tensor([0.5, -0.5]),
    }


def known() -> BehaviorRows:
    """Four scored tokens with two ids each."""
    return BehaviorRows(
        mask=loss_mask(inputs()),
        logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64),
        topk_ids=torch.tensor([[8, 3], [1, 2], [4, 5], [1, -1]]),
        topk_logprobs=torch.arange(8.0, dtype=torch.float64).reshape(4, 2).neg(),
        sequence=torch.tensor([12, 7]),
        group=torch.tensor([3, 1]),
    )


def test_tool_tokens_and_padding_are_not_in_the_loss() -> None:
    assert loss_mask(inputs()).tolist() == [[True, False, True], [True, True, False]]


def test_rows_are_laid_out_like_the_forwards_ids() -> None:
    tokens = known().tokens(inputs())
    assert tokens.input_ids is not None
    assert tokens.input_ids.tolist() == [[0, 5, 8, 9, 1], [6, 7, 4, 1, 0]]
    where = [(0, 2), (0, 4), (1, 2), (1, 3)]
    assert [tuple(pair) for pair in tokens.response_mask.nonzero().tolist()] == where
    b, j = torch.tensor(where).T
    assert tokens.behavior_logprobs[b, j].tolist() == [-1, -2, -3, -4]
    assert tokens.topk_ids[b, j].tolist() == [[8, 3], [1, 2], [4, 5], [1, -1]]
    assert tokens.topk_logprobs[b, j].tolist() == [[0, -1], [-2, -3], [-4, -5], [-6, -7]]
    assert tokens.advantages.tolist() == [0.5, -0.5]
    assert (tokens.sequence.tolist(), tokens.group.tolist()) == ([12, 7], [3, 1])


def test_advantages_of_each_token_are_kept() -> None:
    each = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    tokens = known().tokens({**inputs(), "advantages": each})
    assert torch.equal(tokens.advantages[:, 2:], each)


def test_the_trainer_does_not_see_our_keys() -> None:
    given = {**inputs(), ROW: torch.arange(2), KNOWN: known()}
    assert without_ours(given).keys() == inputs().keys()
    assert KNOWN in given
