"""Rollout dumps of slime and verl."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from deltad.probes.engines import EngineError, read_rollout_dump

from .known import Known, fixture, is_union, knowns


def slime(known: Known, **changes: Any) -> dict[str, Any]:
    """From documentation: a sample as slime's `to_dict` has it, with the lists of miles."""
    tokens = range(len(known))
    return {
        "index": 3,
        "tokens": [1, 2, *known.token_ids],
        "response_length": len(known),
        "loss_mask": [1] * len(known),
        "rollout_log_probs": [known.sampled(t) for t in tokens],
        "rollout_topk_token_ids": np.array(
            [[i for i, _ in known.best(t)] for t in tokens], np.int32
        ),
        "rollout_topk_log_probs": np.array([[v for _, v in known.best(t)] for t in tokens]),
        **changes,
    }


@given(knowns())
def test_from_documentation_samples_of_slime_give_the_distribution_back(known: Known) -> None:
    (response,) = read_rollout_dump({"rollout_id": 0, "samples": [slime(known)]})
    is_union(response, known)
    assert (response.engine, response.mode, response.request) == ("slime", "tempered", "3")
    assert response.prompt_ids is not None
    assert response.prompt_ids.tolist() == [1, 2]


def test_from_documentation_tools_and_empty_slots_are_left_out() -> None:
    known = Known(np.log([[0.5, 0.3, 0.2]] * 3), [0, 1, 2], 2)
    sample = slime(known, loss_mask=[1, 0, 1])
    sample["rollout_topk_token_ids"][0, 1] = -1
    sample["rollout_topk_log_probs"][0, 1] = -np.inf
    (response,) = read_rollout_dump(sample)
    assert response.token_ids.tolist() == [0, 2]
    assert response.topk_ids.tolist() == [[0, -1], [0, 1]]
    assert response.missing == ()


def test_from_documentation_a_sample_of_slime_itself_has_no_list() -> None:
    known = Known(np.log([[0.5, 0.3, 0.2]]), [0], 2)
    sample = slime(known)
    del sample["rollout_topk_token_ids"], sample["rollout_topk_log_probs"]
    (response,) = read_rollout_dump([sample])
    assert response.listed == 0
    assert response.missing_counts() == {"topk": {"not-returned": 1}}
    (bare,) = read_rollout_dump({**sample, "rollout_log_probs": None})
    assert bare.missing_counts()["logprob"] == {"not-returned": 1}


def test_written_row_of_verl_takes_its_lists_from_the_pass_before() -> None:
    """By verl 0.9.1's own functions of a recorded vLLM output; see the fixtures' README."""
    row = fixture("verl_rescored")
    (response,) = read_rollout_dump(row)
    prompt = fixture("vllm_offline_raw_top5")["prompt_logprobs"]
    assert response.token_ids.tolist() == [4, 5]
    assert (response.engine, response.mode) == ("verl", "raw")
    for t, position in enumerate((2, 4)):
        entry = prompt[position]
        best = sorted((e["rank"], int(i), e["logprob"]) for i, e in entry.items())[:3]
        assert response.topk_ids[t].tolist() == [i for _, i, _ in best]
        np.testing.assert_allclose(response.topk_logprobs[t], [v for _, _, v in best], atol=1e-6)
        token = response.token_ids[t]
        np.testing.assert_allclose(response.logprobs[t], entry[str(token)]["logprob"], atol=1e-6)


def test_a_batch_of_verl_is_read_row_by_row() -> None:
    row = fixture("verl_rescored")
    batch = {
        key: torch.tensor([value, value])
        for key, value in row.items()
    }  # fmt: skip
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    batch["response_mask"][1, 2] = 0
    first, second = read_rollout_dump(batch)
    assert first.token_ids.tolist() == [4, 5]
    assert second.token_ids.tolist() == [4]
    assert second.prompt_ids is not None
    assert second.prompt_ids.tolist() == [1]
    del batch["teacher_ids"], batch["teacher_logprobs"]
    (sampled, _) = read_rollout_dump(batch)
    assert (sampled.mode, sampled.listed) == ("processed", 0)


def test_a_listed_sampled_token_has_the_log_prob_of_the_pass_that_listed_it() -> None:
    row = fixture("verl_rescored")
    row["responses"][0] = 9  # listed first, with −1.6047 in the second pass
    (response,) = read_rollout_dump(row)
    assert response.logprobs[0] == pytest.approx(-1.6047356, abs=1e-6)
    assert response.topk_ids[0, 0] == 9


KNOWN = Known(np.log([[0.5, 0.3, 0.2]] * 2), [0, 1], 2)


@pytest.mark.parametrize(
    ("dump", "message"),
    [
        ({"input": "a", "output": "b", "score": 1}, "these are texts without log-probs"),
        ("text", "must have `tokens` and `response_length`"),
        (slime(KNOWN, response_length=9), r"request 3: `response_length` must lie in \[0, 4\]"),
        (slime(KNOWN, tokens="ab"), "`tokens` must be a list of ids, got 'ab'"),
        (slime(KNOWN, loss_mask=[1]), r"the mask must have shape \(2,\), got \(1,\)"),
        (slime(KNOWN, rollout_log_probs=[0.0]), r"`rollout_log_probs` must have shape \(2,\)"),
        (slime(KNOWN, rollout_topk_log_probs=None), r"must have shape \(2, K\), got \(2, 2\) and"),
        (slime(KNOWN, rollout_topk_token_ids=np.ones((1, 2), int)), r"got \(1, 2\) and \(2, 2\)"),
        (
            slime(KNOWN, rollout_topk_token_ids=np.ones((2, 2), int)),
            "position 0: id 1 is listed twice",
        ),
        ({"responses": [1]}, "a row must have `prompts`"),
        (
            {"prompts": [1], "responses": [1], "response_mask": [1], "teacher_ids": [[1]]},
            r"`teacher_ids` must have shape \(2, K\), prompt and response, got \(1, 1\)",
        ),
        (
            {"prompts": [[1]], "responses": [[1], [2]], "response_mask": [[1], [1]]},
            r"every field must have 2 rows, got \{'prompts': 1\}",
        ),
    ],
)
def test_malformed_dumps_are_refused(dump: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_rollout_dump(dump)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_topk_token_ids": [[5.7, 2.0], [6.0, 3.0]]}, "position 0: a listed id must be"),
        ({"loss_mask": [np.nan, 1.0]}, "`loss_mask` must hold 0 and 1 alone"),
        ({"tokens": [1, [2], 5]}, "slime, request 0: the columns must be full and of numbers"),
        ({"rollout_log_probs": ["x", -1.0]}, "position 0: a log-prob must be a number or null"),
        ({"rollout_topk_token_ids": [[10**30, 2], [6, 3]]}, "position 0: a listed id must be"),
    ],
)
def test_columns_of_other_things_are_refused(change: dict[str, Any], message: str) -> None:
    sample = {
        "tokens": [1, 5, 6],
        "response_length": 2,
        "rollout_log_probs": [-1.0, -1.0],
        "rollout_topk_token_ids": [[5, 2], [6, 3]],
        "rollout_topk_log_probs": [[-1.0, -2.0], [-1.0, -2.0]],
    }
    assert read_rollout_dump(sample)[0].topk_ids.tolist() == [[5, 2], [6, 3]]
    with pytest.raises(EngineError, match=message):
        read_rollout_dump(sample | change)


def test_a_log_prob_that_is_null_is_missing() -> None:
    sample = {"tokens": [1, 5, 6], "response_length": 2, "rollout_log_probs": [None, -1.0]}
    (response,) = read_rollout_dump(sample)
    assert response.missing_counts()["logprob"] == {"null": 1}


def test_ids_of_verl_that_are_no_whole_numbers_are_refused() -> None:
    row = {"prompts": [1], "responses": [5.7], "response_mask": [1], "rollout_log_probs": [-1.0]}
    with pytest.raises(EngineError, match="`responses` must be a list of ids"):
        read_rollout_dump(row)
