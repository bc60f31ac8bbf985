"""llama.cpp: the native route, its old form, OpenAI's shapes, llama-cpp-python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from deltad.probes.engines import EngineError, read_llama_cpp

from .known import Known, fixture, is_union, knowns

SAMPLED = [3, 4, 2]


def table(temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Log-probs of the table that the fixtures were written from (record_llama_cpp.py)."""
    logits = np.random.default_rng(5).normal(0.0, 2.0, (3, 8))
    logits[1] = [2.0, 1.5, 0.5, 1.0, -2.0, 0.0, -3.0, -4.0]
    logits[2, 5], logits[1, 5] = 9.0, 3.0
    logits = logits.astype(np.float32).astype(np.float64) / temperature
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


@given(knowns())
def test_native_lists_of_exactly_k_give_the_distribution_back(known: Known) -> None:
    body = {
        "completion_probabilities": [
            {
                "id": known.token_ids[t], "token": "", "logprob": known.sampled(t),
                "top_logprobs": [
                    {"id": i, "token": "", "logprob": value} for i, value in known.best(t)
                ],
            }
            for t in range(len(known))
        ]
    }  # fmt: skip
    (response,) = read_llama_cpp(body)
    is_union(response, known)


# Written by llama.cpp's own functions; see tests/fixtures/engines/README.md.


def test_written_native_response_gives_the_table_back_and_says_its_sampling() -> None:
    (response,) = read_llama_cpp(fixture("llama_cpp_native"))
    is_union(response, Known(table(), SAMPLED, 3), atol=1e-6)
    assert response.mode == "raw"
    assert (response.temperature, response.top_k, response.top_p, response.min_p) == (
        0.8, 7, 1.0, 0.0,
    )  # fmt: skip
    (told,) = read_llama_cpp(fixture("llama_cpp_native"), temperature=1.0)
    assert told.temperature == 1.0


def test_written_v1_response_gives_the_same() -> None:
    (response,) = read_llama_cpp(fixture("llama_cpp_v1_completions"))
    is_union(response, Known(table(), SAMPLED, 3), atol=1e-6)
    assert response.engine == "llama.cpp"


def test_written_probabilities_after_sampling_are_processed_log_probs() -> None:
    """Of the seven ids that top-k left, at the temperature."""
    probs = np.exp(table(0.8))
    probs[probs < np.sort(probs, axis=1)[:, -7:-6]] = 0.0
    probs /= probs.sum(axis=1, keepdims=True)
    body = fixture("llama_cpp_post_sampling")
    (response,) = read_llama_cpp(body)
    assert response.mode == "processed"
    np.testing.assert_allclose(np.exp(response.logprobs), probs[range(3), SAMPLED], rtol=1e-5)
    np.testing.assert_allclose(
        np.exp(response.topk_logprobs), -np.sort(-probs, axis=1)[:, :3], rtol=1e-5
    )
    content = {"logprobs": {"content": body["completion_probabilities"]}}
    (same,) = read_llama_cpp({"choices": [content]})
    np.testing.assert_array_equal(same.topk_logprobs, response.topk_logprobs)
    assert same.mode == "processed"


def test_the_lowest_float_stands_for_no_log_prob() -> None:
    body = fixture("llama_cpp_native")
    lowest = float(np.finfo(np.float32).min)
    body["completion_probabilities"][1]["logprob"] = lowest
    body["completion_probabilities"][0]["top_logprobs"][2]["logprob"] = lowest
    (response,) = read_llama_cpp(body)
    assert np.isnan(response.logprobs).tolist() == [False, True, False]
    assert response.missing_counts() == {"logprob": {"sentinel": 1}, "topk": {"sentinel": 1}}


def test_written_llama_cpp_python_lists_texts_of_which_two_collide() -> None:
    """Two ids are single bytes with an empty text: one entry of them is lost."""
    vocabulary = {"<eos>": [0], "a": [1], "b": [2], " c": [3], "": [4, 5], "d": [6], "e": [7]}
    (response,) = read_llama_cpp(fixture("llama_cpp_python_completion"), vocabulary=vocabulary)
    known = table()
    assert response.token_ids.tolist() == [3, -1, 2]
    assert response.mode == "raw"
    np.testing.assert_allclose(response.logprobs, known[range(3), SAMPLED], atol=1e-6)
    assert response.topk_ids.tolist() == [[3, -1, -1], [0, 1, -1], [6, 0, -1]]
    assert response.missing_counts() == {
        "token_id": {"ambiguous-text": 1},
        "topk": {"ambiguous-text": 3, "collision": 1},
    }


def old(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"completion_probabilities": list(entries)}


def test_from_documentation_the_old_form_has_probabilities_of_texts() -> None:
    body = old(
        {"content": "a", "probs": [{"tok_str": "b", "prob": 0.75}, {"tok_str": "a", "prob": 0.25}]},
        {"content": "c", "probs": [{"tok_str": "b", "prob": 1.0}, {"tok_str": "a", "prob": 0.0}]},
    )
    (response,) = read_llama_cpp(body, vocabulary={"a": [1], "b": [2], "c": [3]})
    assert response.mode == "unknown"
    assert response.token_ids.tolist() == [1, 3]
    np.testing.assert_allclose(np.exp(response.logprobs), [0.25, np.nan])
    assert response.topk_ids.tolist() == [[2, 1], [2, -1]]
    assert response.missing_counts() == {"logprob": {"null": 1}, "topk": {"truncated": 1}}


def spoil(change: Callable[[Any], Any]) -> dict[str, Any]:
    body = copy.deepcopy(fixture("llama_cpp_native"))
    change(body["completion_probabilities"][1])
    return dict(body)


@pytest.mark.parametrize(
    ("body", "message", "position"),
    [
        ([1], "must be an object, got [1]", None),
        ({"content": "a"}, "ask for n_probs", None),
        ({"completion_probabilities": "x"}, "ask for n_probs", None),
        ({"completion_probabilities": [5]}, "must have `id`", 0),
        (spoil(lambda item: item.pop("id")), "must have an `id`", 1),
        (spoil(lambda item: item.pop("top_logprobs")), "must have `id`, `logprob`", 1),
        (spoil(lambda item: item.update(logprob="x")), "must be a number or null, got 'x'", 1),
        (spoil(lambda item: item.update(id=-4)), "whole number of at least 0, got -4", 1),
        (spoil(lambda item: item.update(prob=1.5)), "must lie in [0, 1], got 1.5", 1),
        (spoil(lambda item: item.update(prob="x")), "must lie in [0, 1], got 'x'", 1),
        (old({"content": "a", "probs": [{"prob": 1.0}]}), "must hold `tok_str` and `prob`", 0),
        (old({"probs": []}), "must have `content` and `probs`", 0),
    ],
)
def test_malformed_bodies_are_refused_with_their_place(
    body: Any, message: str, position: int | None
) -> None:
    with pytest.raises(EngineError) as error:
        read_llama_cpp(body)
    assert message in str(error.value)
    assert error.value.position == position
