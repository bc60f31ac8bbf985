"""Responses laid out as a trainer's micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltad.probes import ResponseTokens
from deltad.probes.engines import EngineError, EngineResponse, Missing, read_vllm
from deltad.probes.engines.packing import response_tokens

from .known import Known, knowns, unlisted, vllm_dicts, vllm_output

NAN = float("nan")


def read(known: Known, mode: Any = "processed", **options: Any) -> EngineResponse:
    output = vllm_output(known, vllm_dicts(known))
    return read_vllm(output, listed=known.top_k, mode=mode, **options)[0]


def layout(tokens: list[list[int]], prompt: int = 2) -> dict[str, Any]:
    """A response a row, right-padded, after a prompt."""
    length = prompt + max(map(len, tokens))
    ids = torch.zeros(len(tokens), length, dtype=torch.long)
    mask = torch.zeros(len(tokens), length, dtype=torch.bool)
    for row, line in enumerate(tokens):
        ids[row, prompt : prompt + len(line)] = torch.tensor(line)
        mask[row, prompt : prompt + len(line)] = True
    return {
        "response_mask": mask, "input_ids": ids, "advantages": torch.ones(len(tokens)),
        "sequence": torch.arange(len(tokens)), "group": torch.zeros(len(tokens), dtype=torch.long),
    }  # fmt: skip


@given(st.lists(knowns(), min_size=1, max_size=3))
def test_every_token_has_what_its_engine_said(all_known: list[Known]) -> None:
    made = response_tokens(
        [read(known) for known in all_known], **layout([known.token_ids for known in all_known])
    )
    assert made.top_k == max(known.top_k for known in all_known)
    for row, known in enumerate(all_known):
        for t in range(len(known)):
            at = (row, 2 + t)
            assert made.behavior_logprobs[at].item() == np.float32(known.sampled(t))
            best = known.best(t)
            assert made.topk_ids[at].tolist()[: known.top_k] == [i for i, _ in best]
            assert made.topk_ids[at].tolist()[known.top_k :] == [-1] * (made.top_k - known.top_k)
            values = made.topk_logprobs[at].tolist()[: known.top_k]
            assert values == [np.float32(value) for _, value in best]


KNOWN = Known(np.log([[0.5, 0.3, 0.2]] * 3), [0, 1, 2], 2)
OTHER = Known(np.log([[0.6, 0.3, 0.1]] * 2), [2, 0], 2)


def test_longer_lists_are_cut_to_the_k_asked_for_and_shorter_are_padded() -> None:
    for k, expected in ((1, [0]), (2, [0, 1]), (4, [0, 1, -1, -1])):
        made = response_tokens([read(KNOWN)], **layout([KNOWN.token_ids]), top_k=k)
        assert made.topk_ids[0, 2].tolist() == expected


def test_without_lists_a_column_of_padding_is_left() -> None:
    bare = unlisted([0], [-1.0], mode="processed")
    made = response_tokens([bare], **layout([[0]]))
    assert made.topk_ids[0, 2].tolist() == [-1]
    assert made.behavior_logprobs[0, 2].item() == -1.0


def test_several_responses_in_a_row_and_gaps_in_them() -> None:
    """Row: prompt, the first response with a tool's token in it, the second at once."""
    ids = torch.tensor([[9, 0, 1, 9, 2, 2, 0]])
    mask = torch.tensor([[False, True, True, False, True, True, True]])
    sequence = torch.tensor([[4, 4, 4, 4, 4, 6, 6]])
    made = response_tokens(
        [read(KNOWN), read(OTHER)], response_mask=mask, input_ids=ids, advantages=torch.ones(1, 7),
        sequence=sequence, group=sequence,
    )  # fmt: skip
    expected = np.log([0.5, 0.3, 0.2, 0.1, 0.6]).astype(np.float32)
    np.testing.assert_array_equal(made.behavior_logprobs[0, mask[0]].numpy(), expected)
    assert made.topk_ids[0, 3].tolist() == [-1, -1]


def unscored() -> EngineResponse:
    return unlisted(
        [0, 1, 2], [-0.5, NAN, -1.0],
        mode="processed", missing=(Missing(1, "logprob", "sentinel"),), request="r5",
    )  # fmt: skip


def test_tokens_without_a_log_prob_are_refused_or_dropped() -> None:
    with pytest.raises(
        EngineError, match=r"r5, position 1: .*\(sentinel; 1 of 3 tokens\)"
    ) as error:
        response_tokens([unscored()], **layout([[0, 1, 2]]))
    assert error.value.position == 1
    given_layout = layout([[0, 1, 2]])
    made = response_tokens([unscored()], **given_layout, missing="drop")
    assert made.response_mask[0].tolist() == [False, False, True, False, True]
    assert given_layout["response_mask"][0].tolist() == [False, False, True, True, True]
    assert unscored().behavior_metadata()["missing"] == {"logprob": {"sentinel": 1}}


def test_ids_that_are_not_known_are_taken_from_the_trainer() -> None:
    response = unlisted(
        [-1], [-0.5], mode="processed",
        missing=(Missing(0, "token_id", "no-ids"),),
    )  # fmt: skip
    made = response_tokens([response], **layout([[7]]))
    assert made.behavior_logprobs[0, 2].item() == -0.5


@pytest.mark.parametrize(
    ("mode", "temperature", "allowed"),
    [
        ("processed", None, True),
        ("tempered", 0.7, True),
        ("raw", 1.0, True),
        ("unknown", 1.0, True),
        ("raw", 0.7, False),
        ("raw", None, False),
        ("unknown", None, False),
    ],
)
def test_log_probs_must_be_at_the_sampling_temperature(
    mode: Any, temperature: float | None, allowed: bool
) -> None:
    response = read(KNOWN, mode, temperature=temperature)
    if allowed:
        made = response_tokens([response], **layout([KNOWN.token_ids]))
        assert isinstance(made, ResponseTokens)
        return
    with pytest.raises(EngineError, match="must be at the sampling temperature"):
        response_tokens([response], **layout([KNOWN.token_ids]))


def changed(**changes: Any) -> dict[str, Any]:
    return {**layout([KNOWN.token_ids]), **changes}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (layout([[0, 1]]), "row 0 has 2 response tokens, the response has 3"),
        (layout([[0, 2, 1]]), "position 1: the engine sampled token 1, but `input_ids` holds 2"),
        (layout([[0, 0, 2]]), "position 1: the engine sampled token 1, but `input_ids` holds 0"),
        (layout([[0, 1, 2]] * 2), "the layout holds 2 responses, got 1"),
        (changed(sequence=torch.zeros(3, dtype=torch.long)), "`sequence` must have shape"),
        (changed(input_ids=torch.zeros(1, 2, dtype=torch.long)), "of the same shape"),
        (changed(response_mask=torch.ones(1, 5)), "`response_mask` must be bool"),
        (changed(top_k=0), "`top_k` must be at least 1, got 0"),
        (changed(missing="ignore"), "must be 'refuse' or 'drop', got 'ignore'"),
    ],
)
def test_what_does_not_align_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        response_tokens([read(KNOWN)], **options)
