"""CTranslate2's logits, which begin with the prompt's forced steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltad.probes.engines import EngineError, read_ctranslate2

from .known import fixture


def recorded(include: bool) -> tuple[list[dict[str, Any]], list[list[int]]]:
    results = [
        result
        for result in fixture("ctranslate2")["results"]
        if result["include_prompt_in_result"] == include
    ]
    return results, [result["prompt_ids"] for result in results]


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("temperature", [None, 1.3])
def test_recorded_logits_are_the_model_of_transformers(
    include: bool, temperature: float | None
) -> None:
    """Recorded of a real CTranslate2 4.8.5 beside transformers; see the fixtures' README."""
    results, prompts = recorded(include)
    responses = read_ctranslate2(
        results, prompts, temperature=temperature, include_prompt=include, listed=5
    )
    for result, response in zip(results, responses, strict=True):
        raw = np.array(result["transformers_logprobs"])
        scaled = raw / (temperature or 1.0)
        logprobs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        tokens = result["sequences_ids"][0][len(result["prompt_ids"]) if include else 0 :]
        assert response.token_ids.tolist() == tokens
        assert response.mode == ("raw" if temperature is None else "tempered")
        np.testing.assert_allclose(
            response.logprobs, logprobs[range(len(tokens)), tokens], atol=1e-5
        )
        np.testing.assert_allclose(
            response.topk_logprobs, -np.sort(-logprobs, axis=1)[:, :5], atol=1e-5
        )


def test_the_step_of_an_end_that_was_not_returned_is_left_out() -> None:
    results, prompts = recorded(False)
    whole = read_ctranslate2(results, prompts, include_prompt=False)[1]
    results[1]["sequences_ids"][0].pop()
    shorter = read_ctranslate2(results, prompts, include_prompt=False)[1]
    np.testing.assert_array_equal(shorter.topk_logprobs, whole.topk_logprobs[:-1])


def test_every_hypothesis_is_a_response() -> None:
    steps = [np.zeros(4)] * 2
    result = {"sequences_ids": [[1, 2], [3]], "logits": [steps, steps]}
    first, second = read_ctranslate2([result], [[0]], include_prompt=False)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1, 2], [3])
    assert second.request == "0, hypothesis 1"


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "one result a prompt, 1, got 0"),
        ([{"sequences_ids": [[1]]}], "set return_logits_vocab=True"),
        (
            [{"sequences_ids": [[5, 1]], "logits": [[np.zeros(4)]]}],
            r"must begin with its prompt \[0, 7\], got \[5, 1\]",
        ),
        (
            [{"sequences_ids": [[0, 7, 1]], "logits": [[np.zeros(4)] * 6]}],
            "1 steps of the prompt, 1 of the response and at most one of its end, got 6",
        ),
    ],
)
def test_malformed_results_are_refused(results: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_ctranslate2(results, [[0, 7]])
