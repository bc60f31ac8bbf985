"""Whatever stands in the place of a part, a reader gives responses or an EngineError."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltad.probes.engines import (
    EngineError,
    read_ctranslate2,
    read_llama_cpp,
    read_openai,
    read_prime_rl,
    read_rollout_dump,
    read_sglang,
    read_transformers,
    read_vllm,
)

JUNK: tuple[Any, ...] = (
    None,
    5,
    -1,
    True,
    "x",
    "5",
    [],
    [None],
    {},
    {"a": 1},
    math.nan,
    math.inf,
    10**30,
    2.5,
)

TOP = [[[-0.4, 8, None], [-1.6, 2, None]], [[-0.1, 9, None], [-3.0, 3, None]]]
META = {"id": "a", "output_token_logprobs": [[-3.0, 5, None], [-0.1, 9, None]]}
FLAT = {
    "start_indices": [0, 3],
    "end_indices": [3, 5],
    "token_ids": [5, 8, 2, 9, 9],
    "logprobs": [-3.0, -0.4, -1.6, -0.1, -0.1],
    "ranks": [14, 1, 2, 1, 1],
}
PROBABLE = [
    {"id": 5, "token": "a", "prob": 0.1, "top_probs": [{"id": 8, "token": "b", "prob": 0.6}]}
]
CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "vllm": (
        read_vllm,
        {
            "prompt_token_ids": [11],
            "outputs": [{"token_ids": [5], "logprobs": [{5: {"logprob": -3.0, "rank": 14}}]}],
        },
    ),
    "vllm flat": (read_vllm, {"outputs": [{"token_ids": [5, 9], "logprobs": FLAT}]}),
    "sglang": (
        read_sglang,
        {"output_ids": [5, 9], "meta_info": META | {"output_top_logprobs": TOP}},
    ),
    "sglang support": (
        read_sglang,
        {
            "meta_info": META
            | {
                "output_token_sampling_mask": [[8, 5], [9]],
                "output_token_sampling_logprobs": [[-0.4, -1.6], [0.0]],
            }
        },
    ),
    "openai": (
        read_openai,
        {
            "choices": [
                {
                    "logprobs": {
                        "tokens": ["token_id:5"],
                        "token_logprobs": [-3.0],
                        "top_logprobs": [{"token_id:8": -0.4}],
                    }
                }
            ],
            "usage": {"prompt_tokens": 1},
        },
    ),
    "llama.cpp": (
        read_llama_cpp,
        {"generation_settings": {"temperature": 0.7}, "completion_probabilities": PROBABLE},
    ),
    "llama.cpp, v1": (read_llama_cpp, {"choices": [{"logprobs": {"content": PROBABLE}}]}),
    "slime": (
        read_rollout_dump,
        {
            "tokens": [1, 5],
            "response_length": 1,
            "rollout_log_probs": [-3.0],
            "loss_mask": [1],
            "rollout_topk_token_ids": [[8, 2]],
            "rollout_topk_log_probs": [[-0.4, -1.6]],
        },
    ),
    "verl": (
        read_rollout_dump,
        {
            "prompts": [1],
            "responses": [5],
            "response_mask": [1],
            "rollout_log_probs": [-3.0],
            "teacher_ids": [[8, 2], [1, 2]],
            "teacher_logprobs": [[-0.4, -1.6], [-1.0, -2.0]],
            "attention_mask": [1, 1],
        },
    ),
    "prime-rl": (
        read_prime_rl,
        {"schema_version": 1, "token_ids": [1, 5], "loss_mask": [False, True],
         "inference_logprobs": [0.0, -3.0]},
    ),
    "transformers": (read_transformers, {"sequences": [[1, 0]], "logits": [[[1.0, 2.0]]]}),
    "ctranslate2": (
        lambda value: read_ctranslate2(value, [[1]]),
        [{"sequences_ids": [[1, 0]], "logits": [[[1.0, 2.0]]]}],
    ),
}  # fmt: skip


def spoiled(value: Any) -> Iterator[Any]:
    """The value with junk in the place of each part, and without each part."""
    yield from JUNK
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        for part in spoiled(value[key]):
            other = copy.copy(value)
            other[key] = part
            yield other
        without = copy.copy(value)
        del without[key]
        yield without


@pytest.mark.parametrize("name", CASES)
def test_a_reader_gives_responses_or_its_error(name: str) -> None:
    read, good = CASES[name]
    read(good)
    refused = 0
    for bad in spoiled(good):
        try:
            read(bad)
        except EngineError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinite_logits_are_refused(value: float) -> None:
    output = {"sequences": [[1, 0]], "logits": [[[value, 2.0]]]}
    with pytest.raises(EngineError, match="position 0: logits must not be NaN or"):
        read_transformers(output)


def test_a_first_log_prob_that_is_null_is_no_echo_where_usage_says_so() -> None:
    choice = {"logprobs": {"tokens": ["token_id:5", "token_id:9"], "token_logprobs": [None, -0.1]}}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    (response,) = read_openai({"choices": [choice], "usage": usage})
    assert response.token_ids.tolist() == [5, 9]
    (echoed,) = read_openai({"choices": [choice], "usage": usage | {"completion_tokens": 1}})
    assert echoed.token_ids.tolist() == [9]
